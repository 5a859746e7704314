#!/usr/bin/env python3
"""Export a checkpoint to a Hugging Face folder with config.json, model.safetensors and the tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--format hf | hf-fp8] [--tokenizer DIR]
    python train/export.py output/run OUT                  # the newest good checkpoint of the run

Load OUT with transformers' AutoModelForCausalLM.from_pretrained, or with any server that supports Mistral. The export
needs no GPU. With hf-fp8, the weights of the layers are stored in FP8. If the model was trained with Transformer
Engine's FP8, the codes and scales equal those used in training, bit for bit. docs/inference.md lists the programs that
read this format.
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
# Files of an earlier export that must not stay beside a new one, which may have other file names. A chat template fits
# any export.
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
    """Write the Hugging Face folder `out` from the verified checkpoint `path`.

    The files are written to a temporary folder, which is then renamed, so `out` is complete or absent. Files of an
    earlier export are replaced. Other files in `out` stay, such as the user's README.md. exported_from.json names the
    checkpoint.

    Args:
        tokenizer: folder with tokenizer files, for example a model folder; only the tokenizer files are copied.
        form: one of FORMATS.

    Returns: remarks about the weights and the tokenizer, for the user.

    Raises:
        CheckpointError: the weights do not fit the configuration, `tokenizer` holds no tokenizer, or `out` is not an
            export.
        DataError: transformers reads more token ids than the model has, or another BOS or EOS.
        PrecisionError: the weights cannot be stored in FP8.
        OSError: `out` cannot be written; it is unchanged.
    """
    files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    if not {"tokenizer.model", "tokenizer.json"} & {file.name for file in files}:
        raise CheckpointError(
            f"{tokenizer} has no tokenizer.model or tokenizer.json. Pass a folder that has one with --tokenizer",
            code="no_tokenizer",
            key=str(tokenizer),
        )
    if problem := why_not_replaced(out):
        raise CheckpointError(f"{problem}. Choose another folder", code="not_exportable", key=str(out))
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():  # left by a killed export
        shutil.rmtree(partial)
    try:
        with naming(out):
            lines = _write_model(path, partial, form, tokenizer)
            for file in files:
                shutil.copy2(file, partial / file.name)
            state = read_state(path)
            config, began_at = state.train_config, state.began_at.get("path")
            write_card(partial, out, path, config, state.step, state.consumed_tokens, state.changes, began_at)
            for file in partial.iterdir():  # safetensors makes its files readable only by the owner
                shutil.copymode(partial / "config.json", file)
            origin = {"checkpoint": path.name, "manifest_sha256": identity(path)}
            (partial / EXPORTED_FROM).write_text(json.dumps(origin) + "\n")
            _replace(out, partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
        if isinstance(error, SafetensorError):  # safetensors reports a full disk this way
            raise OSError(f"{out} could not be written: {error}") from error
        raise
    return lines


def _replace(out: Path, partial: Path) -> None:
    """Rename `partial` to `out`. Keep the files of the former `out` that do not belong to an export."""
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
    """Write config.json and the weights. Return remarks for the user.

    The weights keep the dtype of training, except those that `form` stores in FP8.
    """
    # These imports take seconds: --help, a wrong path and the ranks of a run, which import this file, do not need them.
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
            f"{path} does not fit its model configuration: missing weights {missing}, unknown weights {unexpected}",
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
    """Set the BOS and EOS of `config` to those of the training data, if `encoder` is the tokenizer of that data.

    Generation stops at the EOS of the configuration.

    Returns: remarks about BOS, EOS and the chat template, for the user.

    Raises:
        DataError: transformers reads more token ids than the model has, or another BOS or EOS.
    """
    load_exported(encoder.folder, encoder, config.vocab_size)
    lines = [problem] if (problem := chat_template_problem(encoder.folder)) else []
    if encoder.sha256() not in _trained_with(state):
        return lines
    for key, own in (("bos_token_id", encoder.bos_id), ("eos_token_id", encoder.eos_id)):
        configured = getattr(config, key)
        if own not in (configured if isinstance(configured, list) else [configured]):
            setattr(config, key, own)
            lines.append(f"{key} is {own}, as in the tokenizer; the model's configuration has {configured}")
    return lines


def _trained_with(state: RunState) -> set[str]:
    """Return the sha256 of each tokenizer that prepared the training data."""
    return {source["tokenizer_sha256"] for source in state.data_fingerprint["sources"].values()}


def _write_fp8(path: Path, out: Path, state: RunState, model: Any, weights: dict[str, Any]) -> list[str]:
    """Write `model` with the weights of its layers in FP8. Return remarks for the user.

    Args:
        weights: all weights by their Hugging Face names.

    Raises:
        PrecisionError: the weights cannot be stored in FP8.
        CheckpointError: the written codes differ from those of the training modules.
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
    if model.config.dtype == torch.float32:  # FP8 servers compute in 16 bits
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
        return [f"{codes}, one scale per row; the model was trained in {how}", *lines]
    written = read_hf_folder(out, model.config, model.config.dtype)
    if differing := serving.differences(written, quantized):
        raise CheckpointError(
            f"{out}: {len(differing)} of {codes} differ from those of the training modules for {path}, such as "
            f"{differing[0]}. Export again, or use --format hf",
            code="codes_differ",
            key=str(path),
        )
    how = f"{variant}, {' and '.join(trained.recipes)} scaling"
    return [
        f"{codes}: the written codes and scales equal those of training ({how}), bit for bit",
        *lines,
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit status: 1 after an error of the system, 2 after an error the user can fix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="checkpoint folder step-NNNNNNNN, or a run's output_dir for its newest good checkpoint",
    )
    parser.add_argument("out", type=given_path, help="Hugging Face folder to write")
    parser.add_argument(
        "--format", choices=FORMATS, default="hf", help="hf-fp8 stores weights in FP8 (default: hf)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of another tokenizer (default: that of the training data, or else of the run's hf/)",
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
    """Return the checkpoint `given`, or the newest good checkpoint of the run `given`.

    Raises: CheckpointError: `given` is neither."""
    path = find_checkpoint(given)
    if path is None:
        raise CheckpointError(
            f"{given} is not a checkpoint and contains none. Pass a run's output_dir or RUN/checkpoints/step-NNNNNNNN",
            code="no_checkpoint",
            key=str(given),
        )
    if path != given:
        print(f"{path} is the newest good checkpoint")
    return path


def check_tokenizer(folder: Path, state: RunState, must_be_the_same: bool) -> None:
    """Warn if the tokenizer in `folder` is not the one used in training.

    Raises: DataError: it differs and `must_be_the_same` is set."""
    encoder = TextEncoder(folder)
    if encoder.sha256() in _trained_with(state):
        return
    if must_be_the_same:
        raise DataError(
            f"{folder} is not the tokenizer that the model was trained with; the data was prepared again since then. "
            "Pass the original tokenizer with --tokenizer DIR",
            code="other_tokenizer",
            key=str(folder),
        )
    logger.warning(
        f"{folder / encoder.files[0]} is not the file that the model was trained with. Make sure that it gives the "
        "same token ids; this is not checked"
    )


if __name__ == "__main__":
    sys.exit(main())
