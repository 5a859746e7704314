#!/usr/bin/env python3
"""A checkpoint -> a Hugging Face folder: config.json, model.safetensors, tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--format hf | hf-fp8] [--tokenizer DIR]
    python train/export.py output/run OUT                  # its newest good checkpoint

OUT loads with transformers' AutoModelForCausalLM.from_pretrained, and so in whatever serves Mistral models. No GPU is
needed. hf-fp8: the weights of the layers in FP8, of a model that trained in Transformer Engine's FP8 the codes and
scales that training multiplied with, bit for bit; docs/inference.md has what reads it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("exporting", "pydantic", "numpy", "safetensors", "torch", "transformers")

from safetensors import SafetensorError

from model.config import TRAINED_LENGTH
from model.keys import given_path, why_not_written
from train.checkpoint.files import (
    FOLDER,
    CheckpointError,
    RunState,
    identity,
    meant_by,
    others_than,
    rank_file,
    read_state,
)
from train.data.encoder import (
    TOKENIZER_FILES,
    TextEncoder,
    chat_template_problem,
    load_exported,
    tokenizer_of,
)
from train.data.format import DataError
from train.files import discarded_name, naming, reason, tell
from train.guard.lock import Lock, LockError
from train.record.model_card import NEEDS_COMPRESSED, write_card
from train.record.run_folder import EXPORTED_FROM, RunFolder, why_not_replaced

FORMATS = ("hf", "hf-fp8")
# Files of an earlier export that would mix with a new one, which may have other names. A chat template mixes with any.
OWN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    EXPORTED_FROM,
    *(name for name in TOKENIZER_FILES if name != "chat_template.jinja"),
)


def export(path: Path, out: Path, tokenizer: Path, form: str = "hf") -> list[str]:
    """Write the Hugging Face folder `out` from the verified checkpoint `path`, with the tokenizer in the folder
    `tokenizer`, of which nothing else is taken: that may be a model's. It is written beside `out` and then renamed, so
    that `out` is whole or absent. The files of an earlier export in `out` are replaced; all others stay, also a
    README.md that the user wrote. Meanwhile OUT.lock beside it keeps other exports out. exported_from.json in `out`
    names the checkpoint.
    form: one of FORMATS. Returns what there is to say about weights and configuration, as lines.

    Raises CheckpointError: `path` holds weights that do not fit its configuration; `tokenizer` has none; `out` is a
    folder that no export wrote, a checkpoint's place, or the hf/ of a run, and the weights are to be FP8; its folder is
    a file or not this user's. DataError: for transformers the tokenizer has more ids than the model, or another BOS or
    EOS. PrecisionError: weights that have no FP8 form. LockError: another export to `out` is under way. OSError: `out`
    cannot be written, or replaced; what was written is removed, what was there is as it was.
    """
    if why := why_not_written(out.parent):
        raise CheckpointError(f"{out.parent} {why}", code="not_writable", key=str(out.parent))
    lock = Lock(out.with_name(f"{out.name}.lock"), "export", out, "OUT")
    with naming(out):
        lock.acquire()
        try:
            return _export_alone(path, out, tokenizer, form)
        finally:
            lock.release()


def _export_alone(path: Path, out: Path, tokenizer: Path, form: str) -> list[str]:
    """`export`, with the lock."""
    found = []
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not {"tokenizer.model", "tokenizer.json"} & {file.name for file in files}:
        found.append(
            f"{tokenizer} has no tokenizer.model or tokenizer.json; --tokenizer DIR names a folder that has"
        )
    if why := why_not_replaced(out):
        found.append(
            f"{why}; {'name the folder itself' if out.is_symlink() else 'choose another folder, or move it away'}"
        )
    if FOLDER.fullmatch(out.name) and out.parent == RunFolder(out.parent.parent).checkpoints:
        found.append(
            f"{out} is where a run saves, which removes what is no checkpoint; choose another folder"
        )
    if form != "hf" and out.name == "hf" and RunFolder(out.parent).checkpoints.is_dir():
        found.append(
            f"{out} is where a run has its own export, which others read as {FORMATS[0]}; choose another folder, such "
            f"as {out.with_name(form)}"
        )
    if found:
        raise CheckpointError("; ".join(found), code="not_exportable", key=str(out))
    partial = out.with_name(f"{out.name}.partial")
    _remove(partial)  # of an export that was killed; what stayed in it would be taken for a part of this one
    try:
        lines = _write_model(path, partial, form, tokenizer)
        for file in files:
            shutil.copy2(file, partial / file.name)
        state = read_state(path)
        config, changes, began_at = state.train_config, state.changes, state.began_at.get("path")
        write_card(partial, out, path, config, state.step, state.consumed_tokens, changes, began_at)
        for file in partial.iterdir():  # safetensors' are for their owner alone: a server may be another user
            shutil.copymode(partial / "config.json", file)
        origin = {"checkpoint": path.name, "manifest_sha256": identity(path)}
        (partial / EXPORTED_FROM).write_text(json.dumps(origin) + "\n")
        _put_in_place(partial, out)
    except BaseException as error:
        _remove_or_tell(partial)  # gigabytes, which a full disk needs
        if isinstance(error, SafetensorError):  # what a full disk is to safetensors
            raise OSError(f"{out} could not be written: {error}") from error
        raise
    return lines


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename the complete export `partial` to `out`, and move into it what the former `out` had besides an export.

    The former folder is renamed first and removed last: after an error or a kill one of the two is complete, and no
    file of the user's is deleted. Raises OSError: `out` cannot be replaced, or a file cannot be moved.
    """
    before = discarded_name(out) if out.exists() else None
    try:
        if before:
            out.rename(before)
        try:
            partial.rename(out)
        except BaseException:
            if before:
                before.rename(out)
            raise
    except OSError as error:
        where = "is as it was" if before is None or out.exists() else f"what it was is in {before}"
        raise OSError(error.errno, f"{out} cannot be replaced, and {where}: {error.strerror}") from error
    if before is None:
        return
    for path in sorted(before.iterdir()):
        written = (out / path.name).exists() or any(path.match(pattern) for pattern in OWN_FILES)
        if not written:
            try:
                path.rename(out / path.name)
            except OSError as error:
                what = f"the export is complete, but {path} cannot be moved into it"
                raise OSError(error.errno, f"{what}: {error.strerror}; move it yourself") from error
    _remove_or_tell(before)


def _remove(folder: Path) -> None:
    """Also a file or a link of that name. Raises OSError."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _remove_or_tell(folder: Path) -> None:
    try:
        _remove(folder)
    except OSError as error:
        tell(
            f"warning: {folder} could not be removed: {error}. Nothing needs it; to remove it: "
            f"rm -r {shlex.quote(str(folder))}",
            file=sys.stderr,
        )


def _write_model(path: Path, out: Path, form: str, tokenizer: Path) -> list[str]:
    """config.json and weights, in the dtype of training but for those that `form` has in FP8; what to say of them."""
    # Here: it takes seconds, which --help and a wrong path do not wait for, nor a run, whose ranks import this file.
    import torch
    from transformers import MistralConfig, MistralForCausalLM
    from transformers.utils import logging as transformers_logging

    from model.fp8.precision import DTYPES
    from train.checkpoint.load import read_hf_weights

    state = read_state(path)
    config = MistralConfig.from_dict(state.model_config)
    lines = _name_ends(config, TextEncoder(tokenizer), state)
    setattr(config, TRAINED_LENGTH, length := state.train_config["max_seq_length"])
    if length != config.max_position_embeddings:
        lines.append(
            f"trained on sequences of {length:,} tokens, and max_position_embeddings is "
            f"{config.max_position_embeddings:,}: the model has not seen longer contexts"
        )
    dtype = DTYPES[state.precision["compute"]]
    with torch.device("meta"):
        model: Any = MistralForCausalLM(config)
    weights = {name: tensor.to(dtype) for name, tensor in read_hf_weights(path, config).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise CheckpointError(
            f"{path}: missing weights {missing}, unknown weights {unexpected}",
            code="other_weights",
            key=str(path),
        )
    model.tie_weights()
    model.config.dtype = dtype
    transformers_logging.disable_progress_bar()
    if form == "hf-fp8":
        return [*_write_fp8(path, out, state, model, weights), *lines]
    model.save_pretrained(out)
    return lines


def _name_ends(config: Any, encoder: TextEncoder, state: RunState) -> list[str]:
    """Give `config` the BOS and EOS that documents had in training, if `encoder` is its tokenizer: a model generates up
    to the EOS of its configuration, which may have been written for another tokenizer. Returns what to say of it and of
    a chat template.

    Raises:
        DataError: for transformers the tokenizer has more ids than the model, or another BOS or EOS.
    """
    load_exported(encoder.folder, encoder, config.vocab_size)
    lines = [problem] if (problem := chat_template_problem(encoder.folder)) else []
    if encoder.sha256() in _trained_with(state):
        for key, own in (("bos_token_id", encoder.bos_id), ("eos_token_id", encoder.eos_id)):
            named = getattr(config, key)
            if own not in (named if isinstance(named, list) else [named]):
                setattr(config, key, own)
                lines.append(f"{key} {own}, as in the tokenizer; the model's configuration has {named}")
    return lines


def _trained_with(state: RunState) -> set[str]:
    """The sha256 of the tokenizer of the training's data."""
    return {source["tokenizer_sha256"] for source in state.data_fingerprint["sources"].values()}


def _write_fp8(path: Path, out: Path, state: RunState, model: Any, weights: dict[str, Any]) -> list[str]:
    """`weights`, those of `model` by Hugging Face's names, with the layers' in FP8; what there is to say of them."""
    import torch
    from huggingface_hub import save_torch_state_dict

    from model.fp8 import hf_fp8, serving
    from model.fp8.recipes import PrecisionConfig
    from model.hf_folder import read_hf_folder
    from train.checkpoint.reshard import load_shard

    precision = PrecisionConfig(**state.precision)
    variant = state.train_config["model"]["variant"]
    fp8_state = load_shard(path / rank_file(0))["fp8"]
    trained = None
    if serving.trained_in_fp8(precision):
        trained = serving.TrainedFP8(model.config, variant, precision, state.levels)
        quantized = trained.quantize(weights, fp8_state)
    else:
        quantized = serving.by_row(weights, serving.untrained_fp8(model, precision))
    kept = [name for name in serving.linears(model) if f"{name}.weight" not in quantized]
    lines = [f"not FP8: {', '.join(kept)}, the embedding and the norms"]
    rest = weights
    if model.config.dtype == torch.float32:  # what serves FP8 computes in 16 bits
        model.config.dtype = torch.bfloat16
        rest = {name: tensor.bfloat16() for name, tensor in weights.items()}
        lines = [f"{lines[0]}: these are rounded to bfloat16"]
    is_blocks = bool(trained and trained.blocks)
    if not is_blocks:
        lines.append(NEEDS_COMPRESSED)
    model.config.architectures = [type(model).__name__]
    model.config.quantization_config = hf_fp8.quantization_config(is_blocks, kept)
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    save_torch_state_dict(hf_fp8.flat(rest | quantized), out)
    codes = f"{len(quantized)} weights of {sum(q.codes.numel() for q in quantized.values()):,} FP8 codes"
    if trained is None:
        error = sum(
            float((q.dequantize(torch.float32) - weights[n].float()).norm() ** 2)
            for n, q in quantized.items()
        )
        size = sum(float(weights[n].float().norm() ** 2) for n in quantized)
        how = precision.compute if precision.compute != "fp8" else f"torchao's FP8 ({precision.recipe})"
        return [
            f"{codes}, a scale a row; relative error {(error / size) ** 0.5:.1e}. At this checkpoint the model "
            f"trains in {how}, so there are no codes of training to compare with",
            *lines,
        ]
    if differing := trained.differences(
        read_hf_folder(out, model.config, model.config.dtype), weights, fp8_state
    ):
        raise CheckpointError(
            f"{len(differing)} of {codes}, such as {differing[0]}, are not what the training's modules make of "
            f"{path}: a fault of this program; export --format hf",
            code="codes_differ",
            key=str(path),
        )
    return [
        f"{codes}: codes and scales equal those that training ({variant}, {' and '.join(trained.recipes)} scaling) "
        "multiplies with at this checkpoint, bit for bit, compared with the written files",
        *lines,
        *trained.level_lines(),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a folder step-NNNNNNNN, or a run's output_dir: its newest good one"
    )
    parser.add_argument("out", type=given_path, help="the Hugging Face folder to write")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="hf-fp8: weights in FP8; default: hf")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of another one; default: the training data's, else that of the run's hf/",
    )
    arguments = parser.parse_args()
    try:
        path = checkpoint_of(arguments.checkpoint)
        import model.fp8.torchao_fp8  # noqa: F401  before transformers, for which it quiets torchao

        state = read_state(path)
        sources, own = state.train_config["data"]["sources"], path.absolute().parent.parent / "hf"
        tokenizer = arguments.tokenizer or tokenizer_of(sources, own)
        check_tokenizer(tokenizer, state, arguments.tokenizer is None)
        lines = export(path, arguments.out.absolute(), tokenizer, arguments.format)
    except (CheckpointError, DataError, LockError, ValueError, OSError) as error:
        parser.exit(1 if isinstance(error, OSError) else 2, f"error: {reason(error)}\n")
    print("\n".join([*lines, f"wrote {arguments.out}"]))


def checkpoint_of(given: Path) -> Path:
    """The checkpoint that `given` is, or the newest good one of the run that it is. Raises CheckpointError: neither."""
    try:
        if path := meant_by(given, lambda line: print(line, file=sys.stderr)):
            if path != given:
                print(f"{path}, the newest good one")
            return path
        problem = f"{given} is no checkpoint and holds none"
    except CheckpointError as error:
        problem = str(error)
    raise CheckpointError(
        f"{problem}; give a committed one, RUN/checkpoints/step-NNNNNNNN{others_than(given)}",
        code="no_checkpoint",
        key=str(given),
    )


def check_tokenizer(folder: Path, state: RunState, must_be_the_same: bool) -> None:
    """Raise DataError: the tokenizer in `folder` has more ids than the model, or is not the one of its training, unless
    it need not be the same, which is told then."""
    encoder = TextEncoder(folder)
    if encoder.vocab_size > (allowed := state.model_config["vocab_size"]):
        raise DataError(
            f"--tokenizer {folder} has a vocabulary of {encoder.vocab_size}, the model one of {allowed}: it is another "
            "model's",
            code="other_tokenizer",
            key=str(folder),
        )
    if encoder.sha256() in _trained_with(state):
        return
    if must_be_the_same:
        raise DataError(
            f"{folder} is not the tokenizer that the model was trained with: the data there are others by now; give "
            "that tokenizer as --tokenizer DIR",
            code="other_tokenizer",
            key=str(folder),
        )
    print(
        f"note: {folder / encoder.files[0]} is not the file that the model was trained with: it has to give the "
        "same ids, which is not checked",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
