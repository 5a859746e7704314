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
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("exporting", "pydantic", "numpy", "safetensors", "torch", "transformers")

from safetensors import SafetensorError

from model.config import TRAINED_LENGTH
from model.errors import UserError
from model.keys import given_path
from train.checkpoint.files import (
    CheckpointError,
    RunState,
    find_checkpoint,
    identity,
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
from train.files import discarded_name, naming, reason
from train.record.log import configure_logging
from train.record.model_card import NEEDS_COMPRESSED, write_card
from train.record.run_folder import EXPORTED_FROM, why_not_replaced

logger = logging.getLogger(__name__)

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
    """Write the Hugging Face folder `out` from the verified checkpoint `path`. Return remarks on weights and tokenizer.

    The folder is written beside `out` and then renamed: `out` is whole or absent. Files of an earlier export are
    replaced; others in `out` stay, such as a README.md of the user's. exported_from.json names the checkpoint.

    Args:
        tokenizer: a folder of which the tokenizer's files alone are copied; it may be that of a model.
        form: one of FORMATS.

    Raises:
        CheckpointError: the weights do not fit the configuration; `tokenizer` has none; `out` is no export.
        DataError: for transformers the tokenizer has more ids than the model, or another BOS or EOS.
        PrecisionError: the weights have no FP8 form.
        OSError: `out` cannot be written; then it is as it was.
    """
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not {"tokenizer.model", "tokenizer.json"} & {file.name for file in files}:
        raise CheckpointError(
            f"{tokenizer} has no tokenizer.model or tokenizer.json. Pass a folder that has with --tokenizer",
            code="no_tokenizer",
            key=str(tokenizer),
        )
    if problem := why_not_replaced(out):
        raise CheckpointError(f"{problem}. Choose another folder", code="not_exportable", key=str(out))
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():  # of an export that was killed
        shutil.rmtree(partial)
    try:
        with naming(out):
            lines = _write_model(path, partial, form, tokenizer)
            for file in files:
                shutil.copy2(file, partial / file.name)
            state = read_state(path)
            config, began_at = state.train_config, state.began_at.get("path")
            write_card(partial, out, path, config, state.step, state.consumed_tokens, state.changes, began_at)
            for file in partial.iterdir():  # safetensors lets only the owner read its files
                shutil.copymode(partial / "config.json", file)
            origin = {"checkpoint": path.name, "manifest_sha256": identity(path)}
            (partial / EXPORTED_FROM).write_text(json.dumps(origin) + "\n")
            _replace(out, partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        if isinstance(error, SafetensorError):  # as it reports a full disk
            raise OSError(f"{out} could not be written: {error}") from error
        raise
    return lines


def _replace(out: Path, partial: Path) -> None:
    """Rename `partial` to `out`, and move files into it that the former `out` had and no export writes."""
    if not out.exists():
        partial.rename(out)
        return
    former = discarded_name(out)
    out.rename(former)
    partial.rename(out)
    for path in former.iterdir():
        if not ((out / path.name).exists() or any(path.match(pattern) for pattern in OWN_FILES)):
            path.rename(out / path.name)
    shutil.rmtree(former, ignore_errors=True)  # the export is complete


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
    lines = _set_bos_and_eos(config, TextEncoder(tokenizer), state)
    setattr(config, TRAINED_LENGTH, length := state.train_config["max_seq_length"])
    if length != config.max_position_embeddings:
        lines.append(
            f"trained on sequences of {length:,} tokens; max_position_embeddings is {config.max_position_embeddings:,}"
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


def _set_bos_and_eos(config: Any, encoder: TextEncoder, state: RunState) -> list[str]:
    """Set BOS and EOS of `config` to those of the training's documents, if `encoder` is its tokenizer: a model
    generates up to the EOS of its configuration. Return remarks on them and on the chat template.

    Raises:
        DataError: for transformers the tokenizer has more ids than the model, or another BOS or EOS.
    """
    load_exported(encoder.folder, encoder, config.vocab_size)
    lines = [problem] if (problem := chat_template_problem(encoder.folder)) else []
    if encoder.sha256() not in _trained_with(state):
        return lines
    for key, own in (("bos_token_id", encoder.bos_id), ("eos_token_id", encoder.eos_id)):
        configured = getattr(config, key)
        if own not in (configured if isinstance(configured, list) else [configured]):
            setattr(config, key, own)
            lines.append(f"{key} {own}, as in the tokenizer; the model's configuration has {configured}")
    return lines


def _trained_with(state: RunState) -> set[str]:
    """Return the sha256 of the tokenizer of the training's data."""
    return {source["tokenizer_sha256"] for source in state.data_fingerprint["sources"].values()}


def _write_fp8(path: Path, out: Path, state: RunState, model: Any, weights: dict[str, Any]) -> list[str]:
    """Write `model` with the weights of its layers in FP8. `weights` are all of them, by Hugging Face's names. Return
    remarks.

    Raises:
        PrecisionError: the weights have no FP8 form.
        CheckpointError: codes differ from those that the training's modules make of the checkpoint.
    """
    import torch
    from huggingface_hub import save_torch_state_dict

    from model import serving
    from model.fp8 import hf_fp8
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
        how = precision.compute if precision.compute != "fp8" else f"torchao's FP8 ({precision.recipe})"
        return [f"{codes}, a scale a row; the model was trained in {how}", *lines]
    written = read_hf_folder(out, model.config, model.config.dtype)
    if differing := serving.differences(written, quantized):
        raise CheckpointError(
            f"{len(differing)} of {codes}, such as {differing[0]}, were not written to {out} as the training's modules "
            f"make them of {path}; export again, or with --format hf",
            code="codes_differ",
            key=str(path),
        )
    how = f"{variant}, {' and '.join(trained.recipes)} scaling"
    return [
        f"{codes}: the written codes and scales equal those of training ({how}), bit for bit",
        *lines,
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit status: 1 for what the system refused, 2 for what the user has to change."""
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
    arguments = parser.parse_args(argv)
    configure_logging(console="stderr")
    try:
        path = checkpoint_of(arguments.checkpoint)
        import model.fp8.torchao_fp8  # noqa: F401  before transformers, for which it quiets torchao

        state = read_state(path)
        sources, own = state.train_config["data"]["sources"], path.absolute().parent.parent / "hf"
        tokenizer = arguments.tokenizer or tokenizer_of(sources, own)
        check_tokenizer(tokenizer, state, arguments.tokenizer is None)
        lines = export(path, arguments.out.absolute(), tokenizer, arguments.format)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    print("\n".join([*lines, f"wrote {arguments.out}"]))
    return 0


def checkpoint_of(given: Path) -> Path:
    """Return the checkpoint `given`, or the newest good one of the run `given`. Raises CheckpointError: neither."""
    path = find_checkpoint(given)
    if path is None:
        raise CheckpointError(
            f"{given} is no checkpoint and holds none. Pass a run's output_dir or RUN/checkpoints/step-NNNNNNNN",
            code="no_checkpoint",
            key=str(given),
        )
    if path != given:
        print(f"{path}, the newest good one")
    return path


def check_tokenizer(folder: Path, state: RunState, must_be_the_same: bool) -> None:
    """Warn where the tokenizer in `folder` is not that of the training. Raises DataError: it must be."""
    encoder = TextEncoder(folder)
    if encoder.sha256() in _trained_with(state):
        return
    if must_be_the_same:
        raise DataError(
            f"{folder} is not the tokenizer that the model was trained with: the data were prepared again. Pass that "
            "tokenizer with --tokenizer DIR",
            code="other_tokenizer",
            key=str(folder),
        )
    logger.warning(
        f"{folder / encoder.files[0]} is not the file that the model was trained with; whether it gives the same ids "
        "is not checked"
    )


if __name__ == "__main__":
    sys.exit(main())
