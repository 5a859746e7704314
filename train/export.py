#!/usr/bin/env python3
"""Export a checkpoint to a Hugging Face folder with config.json, model.safetensors and the tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--format hf | hf-fp8] [--tokenizer DIR]
    python train/export.py output/run OUT                  # the newest undamaged checkpoint of the run

Load OUT with transformers' AutoModelForCausalLM.from_pretrained, or with any server that supports Mistral. The export
needs no GPU.

With --format hf-fp8, the weights of the decoder layers are stored in FP8. If the model was trained in FP8 with
Transformer Engine, the stored FP8 values and scales are bit-identical to those used in training. docs/inference.md
lists the software that can load this format.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("exporting", "pydantic", "numpy", "safetensors", "torch", "transformers")

from safetensors import SafetensorError

from model.config import TRAINED_LENGTH, make_config
from model.keys import given_path
from train.checkpoint.files import (
    CheckpointError,
    RunState,
    find_checkpoint,
    identity,
    rank_file,
    read_state,
    trained_tokenizer,
)
from train.command import command
from train.data.encoder import (
    TOKENIZER_FILES,
    TextEncoder,
    chat_template_problem,
    load_exported,
)
from train.files import unused_backup_path
from train.record.model_card import COMPRESSED_HINT, write_card
from train.record.run_folder import EXPORTED_FROM, export_folder_problem

# Files to remove from an earlier export, because the new export may use other file names. A chat template is kept.
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
    """Export the verified checkpoint `path` to the Hugging Face folder `out`.

    The files are written to a temporary folder that is then renamed to `out`, so an interrupted export leaves no
    partial files. Files from an earlier export are replaced. Other files in `out` are kept, such as the user's
    README.md. The file exported_from.json in `out` identifies the checkpoint.

    Args:
        tokenizer: Folder with tokenizer files, for example a model folder. Only the tokenizer files are copied.
        form: "hf", or "hf-fp8" to store the weights of the decoder layers in FP8.

    Returns:
        Remarks about the weights and the tokenizer for the user.

    Raises:
        CheckpointError: `out` exists and was not written by an export.
        DataError: `tokenizer` contains no tokenizer, or transformers loads it with token ids outside the model's
            vocabulary or with other BOS or EOS tokens.
        PrecisionError: The weights cannot be stored in FP8.
        OSError: `out` cannot be written. It is unchanged.
    """
    if problem := export_folder_problem(out):
        raise CheckpointError(f"{problem}. Choose another folder", code="not_exportable", key=str(out))
    state = read_state(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new = Path(folder) / out.name
        try:
            lines = _write_model(path, new, form, tokenizer, state)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise OSError(f"{out} could not be written: {error}") from error
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, new / name)
        write_card(new, out, path, state.train_config, state.step, state.consumed_tokens)
        with contextlib.suppress(OSError):  # some file systems refuse chmod, for example CIFS
            for file in new.iterdir():  # safetensors makes its files readable only by the owner
                shutil.copymode(new / "config.json", file)
        (new / EXPORTED_FROM).write_text(
            json.dumps({"checkpoint": path.name, "manifest_sha256": identity(path)}) + "\n"
        )
        former = unused_backup_path(out)
        if out.exists():
            out.rename(former)
        new.rename(out)
    for file in former.glob("*"):
        if not ((out / file.name).exists() or any(file.match(pattern) for pattern in OWN_FILES)):
            file.rename(out / file.name)
    shutil.rmtree(former, ignore_errors=True)
    return lines


def _write_model(path: Path, out: Path, form: str, tokenizer: Path, state: RunState) -> list[str]:
    """Write config.json and the weights to the folder `out`, and return notes for the user.

    The weights keep their training dtype. With form "hf-fp8", the weights of the decoder layers are stored in FP8
    instead.
    """
    # These imports take seconds. They are not needed for --help, for a wrong path, or on ranks other than 0.
    import torch
    from transformers import AutoModelForCausalLM

    from model.fp8.precision import DTYPES
    from train.checkpoint.load import read_hf_weights

    config = make_config(state.model_config)
    lines = _set_bos_and_eos(config, TextEncoder(tokenizer), state)
    setattr(config, TRAINED_LENGTH, state.train_config["max_seq_length"])
    dtype = DTYPES[state.precision["compute"]]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    weights = {name: tensor.to(dtype) for name, tensor in read_hf_weights(path, config).items()}
    # a tied lm_head is not in the weights
    model.load_state_dict(weights, strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    if form == "hf-fp8":
        lines = [*_write_fp8(path, out, state, model, weights), *lines]
    else:
        model.save_pretrained(out)
    _add_older_rope_keys(out / "config.json")
    return lines


def _add_older_rope_keys(file: Path) -> None:
    """Add rope_theta and rope_scaling to a config.json, with the values of rope_parameters.

    transformers 4 and converters to GGUF read only these keys. Without them, they use rope_theta 10000 and no scaling.
    """
    values = json.loads(file.read_text(encoding="utf-8"))
    scaling = dict(values["rope_parameters"])
    values["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        values["rope_scaling"] = scaling
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _set_bos_and_eos(config: Any, encoder: TextEncoder, state: RunState) -> list[str]:
    """Set the BOS and EOS ids of a model configuration to those of the tokenizer `encoder`.

    The ids are set only if the training data was prepared with this tokenizer. Generation stops at the EOS id of the
    configuration.

    Returns:
        Notes about the chat template for the user.

    Raises:
        DataError: transformers loads the tokenizer with token ids outside the model's vocabulary or with other BOS or
            EOS tokens.
    """
    load_exported(encoder.folder, encoder, config.vocab_size)
    if encoder.sha256 in state.tokenizers:
        for key, own in (("bos_token_id", encoder.bos_id), ("eos_token_id", encoder.eos_id)):
            configured = getattr(config, key)
            if own not in (configured if isinstance(configured, list) else [configured]):
                setattr(config, key, own)
    return [problem] if (problem := chat_template_problem(encoder.folder)) else []


def _write_fp8(path: Path, out: Path, state: RunState, model: Any, weights: dict[str, Any]) -> list[str]:
    """Write the model to the folder `out` with FP8 weights in the decoder layers, and return notes for the user.

    Args:
        weights: All weights, keyed by Hugging Face name.

    Raises:
        PrecisionError: The weights cannot be stored in FP8.
    """
    import torch
    from huggingface_hub import save_torch_state_dict

    from model import serving
    from model.fp8.recipes import RECIPES, PrecisionConfig
    from model.hf_folder import read_hf_folder
    from train.checkpoint.reshard import load_shard

    precision, trained = PrecisionConfig(**state.precision), None
    how = f"one scale per row; the model was trained in {precision.compute} ({precision.recipe})"
    if precision.compute == "fp8" and RECIPES[precision.recipe].package == "te":
        trained = serving.TrainedFP8(
            model.config, state.train_config["model"]["variant"], precision, state.fallbacks
        )
        quantized = trained.quantize(weights, load_shard(path / rank_file(0))["fp8"])
        how = f"bit-identical to the FP8 weights used in training ({' and '.join(trained.recipes)} scaling)"
    else:
        quantized = serving.quantize_by_row(weights, serving.untrained_fp8(model, precision))
    kept = [name for name in serving.linear_names(model) if f"{name}.weight" not in quantized]
    blocks = bool(trained and trained.blocks)
    if model.config.dtype == torch.float32:  # FP8 servers compute in 16 bits
        model.config.dtype = torch.bfloat16
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    model.config.architectures = [type(model).__name__]
    model.config.quantization_config = serving.quantization_config(blocks, kept)
    model.config.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    save_torch_state_dict(serving.to_stored_tensors(weights | quantized), out)
    written = read_hf_folder(out, model.config, model.config.dtype)
    assert not serving.differences(written, quantized), (
        f"the FP8 weights in {out} differ from the weights that were written"
    )
    return [
        f"{len(quantized)} weights with {sum(q.codes.numel() for q in quantized.values()):,} FP8 values: {how}",
        f"stored in {model.config.dtype} instead of FP8: {', '.join(kept)}, the embedding and the norms",
        *([] if blocks else [COMPRESSED_HINT]),
    ]


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="checkpoint folder step-NNNNNNNN, or a run's output_dir to export its newest undamaged checkpoint",
    )
    parser.add_argument("out", type=given_path, help="Hugging Face folder to write")
    parser.add_argument(
        "--format",
        choices=("hf", "hf-fp8"),
        default="hf",
        help="storage format: hf keeps the training dtype, hf-fp8 stores the weights of the decoder layers in FP8 "
        "(default: hf)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder with the tokenizer to export (default: the tokenizer of the training data, or the tokenizer "
        "in the run's hf folder)",
    )
    arguments = parser.parse_args(argv)
    path = select_checkpoint(arguments.checkpoint)
    import model.fp8.torchao_fp8  # noqa: F401  imported before transformers, to silence torchao's warnings

    tokenizer = arguments.tokenizer or trained_tokenizer(path, read_state(path))
    lines = export(path, arguments.out.absolute(), tokenizer, arguments.format)
    upload = f"to upload it to the Hugging Face Hub: hf upload REPO_ID {shlex.quote(str(arguments.out))}"
    print("\n".join([*lines, f"wrote {arguments.out} from {path}", upload]))


def select_checkpoint(given: Path) -> Path:
    """Return `given` if it is a checkpoint, or the newest undamaged checkpoint if `given` is a run folder.

    Raises:
        CheckpointError: `given` is not a checkpoint and contains none.
    """
    if path := find_checkpoint(given):
        return path
    raise CheckpointError(
        f"{given} is not a checkpoint and does not contain a checkpoint. Pass a run's output_dir or "
        "RUN/checkpoints/step-NNNNNNNN",
        code="no_checkpoint",
        key=str(given),
    )


if __name__ == "__main__":
    sys.exit(main())
