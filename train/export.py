#!/usr/bin/env python3
"""Export a checkpoint to a Hugging Face folder with config.json, model.safetensors and the tokenizer.

    python train/export.py output/run/checkpoints/step-00001000 OUT [--format hf | hf-fp8] [--tokenizer DIR]
    python train/export.py output/run OUT                  # the newest undamaged checkpoint of the run

Load OUT with transformers' AutoModelForCausalLM.from_pretrained, or with an inference server that supports Mistral,
Llama or Qwen3 models. The export needs no GPU.

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

from model.config import TRAINED_LENGTH, make_config, model_name
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
    HARD_STRINGS,
    TOKENIZER_FILES,
    TextEncoder,
    chat_template_problem,
    compare_ids,
    copy_tokenizer_files,
    load_exported,
)
from train.files import to_json_text, unused_backup_path
from train.record.history import EVALUATION, HistoryError, read_history
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

# A later export replaces a README.md only if it contains this line.
MARK = "<!-- written by train/export.py from the run's files; without this line an export leaves the card as it is -->"
COMPRESSED = "compressed-tensors"
COMPRESSED_HINT = "transformers needs the package compressed-tensors: pip install compressed-tensors"
LOSSES = {"training loss": "loss", "evaluation loss": EVALUATION, "loss of a unigram model": "unigram_loss"}


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
        CheckpointError: `out` is a link, or it exists and was not written by an export.
        DataError: `tokenizer` contains no tokenizer, or transformers encodes text with the exported tokenizer to other
            ids, has ids outside the model's vocabulary, or has different BOS or EOS ids.
        PrecisionError: The weights cannot be stored in FP8.
        OSError: `out` cannot be written. It is unchanged.
    """
    if problem := export_folder_problem(out):
        raise CheckpointError(f"{problem}. Choose another folder", code="not_exportable", key=str(out))
    state, encoder = read_state(path), TextEncoder(tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new = Path(folder) / out.name
        try:
            lines = _write_model(path, new, form, encoder, state)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise OSError(f"{out} could not be written: {error}") from error
        copy_tokenizer_files(encoder, new)
        compare_ids(encoder, load_exported(new, encoder, state.model_config["vocab_size"]), HARD_STRINGS)
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


def _write_model(path: Path, out: Path, form: str, encoder: TextEncoder, state: RunState) -> list[str]:
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
    lines = _set_bos_and_eos(config, encoder, state)
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

    transformers 4 and converters to GGUF read only these two keys. If the keys were missing, these programs would use
    rope_theta 10000 and no scaling.
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
    """
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
    how = f"one scale per row, computed from the weights (training precision: {precision.compute})"
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


# ---------------------------------------------------------------- the model card


def write_card(
    out: Path,
    former: Path,
    checkpoint: Path,
    config: dict[str, Any],
    step: int,
    tokens: int,
) -> None:
    """Write the model card README.md of an exported model, or keep a README.md that the user has written.

    In a new card, the license, the language and the intended use are left for the user to fill in.

    Args:
        out: The folder of the new export, which contains config.json.
        former: The folder of the export that `out` replaces.
        checkpoint: The path of the exported checkpoint, RUN/checkpoints/step-NNNNNNNN.
        config: The training configuration of the checkpoint.
        step: The number of training steps at the checkpoint.
        tokens: The number of training tokens at the checkpoint.
    """
    old = former / "README.md"
    if old.is_file() and MARK not in old.read_text(encoding="utf-8", errors="replace"):
        shutil.copyfile(old, out / "README.md")
        return
    model_config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    precision, start_weights = config["precision"], config["model"].get("init_from") or ""
    base_model = hub_id(start_weights)
    method = (model_config.get("quantization_config") or {}).get("quant_method", "")
    note = f"; {COMPRESSED_HINT}" if method == COMPRESSED else ""
    facts = {
        "model": f"{model_name(config['model']['config'])}, trained as {config['model']['variant']}",
        "started from": f"the weights of {base_model or model_name(start_weights)}"
        if start_weights
        else "random weights",
        "data": ", ".join(config["data"]["sources"]),
        "steps, tokens": f"{step:,}, {tokens:,}",
        "sequence length": f"{config['max_seq_length']:,}",
        "precision": precision["compute"]
        + (f", {precision['recipe']} scaling" if precision["compute"] == "fp8" else ""),
        "precision.schedule": to_json_text(precision["schedule"]) if precision.get("schedule") else "",
        **_run_facts(checkpoint.parent.parent, step),
        "max_position_embeddings": f"{model_config['max_position_embeddings']:,}",
        "quantization": f"FP8 weights (quant_method {method}){note}" if method else "",
    }
    rows = "".join(
        f"| {name} | {value.replace('|', chr(92) + '|')} |\n" for name, value in facts.items() if value
    )
    # metadata for the Hugging Face Hub
    metadata = {
        "license": "other  # fill in",
        "language": "und  # fill in, for example en",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model,
        "tags": f"\n- {model_config['model_type']}\n- {precision['compute']}",
        "training_tokens": tokens,
        "sequence_length": config["max_seq_length"],
        "precision": precision["compute"],
        "quantization": method,
    }
    front = "".join(f"{key}: {value}\n" for key, value in metadata.items() if value != "")
    (out / "README.md").write_text(
        f"---\n{front}---\n{MARK}\n\n# {checkpoint.resolve().parent.parent.name}\n\n| | |\n|---|---|\n{rows}\n"
        "License, intended use and limitations: please fill in.\n",
        encoding="utf-8",
    )


def hub_id(folder: str) -> str:
    """Return the Hugging Face Hub id org/name of a folder in the Hub's cache, or "" for any other folder."""
    cached = [part for part in Path(folder).parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else ""


def _run_facts(run: Path, step: int) -> dict[str, str]:
    """Return model card entries about the training, or {} if the run has no metrics.

    The entries are the last losses up to `step`, the results of the startup check, the GPUs, the package versions and
    the commit.
    """
    try:
        history = read_history(run)
    except (HistoryError, OSError):
        return {}
    facts = {}
    for name, key in LOSSES.items():
        values = [r[key] for r in history.records if r["step"] <= step and r.get(key) is not None]
        facts[name] = f"{values[-1]:.4f} nats per token" if values else ""
    if starts := [start for start in history.starts if start["step"] < step]:
        last = starts[-1]
        fallbacks = {change["module"] for change in last["escalations"] if change["step"] < step}
        facts |= {
            "startup check": "; ".join(line.strip() for line in last["startup_checks"]),
            "modules after a fallback": str(len(fallbacks) or ""),
            "GPU": f"{last['gpus']} x {gpu}" if (gpu := last["machine"].get("gpu")) else "",
            "versions": ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
            "commit": last["commit"],
        }
    return facts


# ---------------------------------------------------------------- the command


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
        CheckpointError: `given` is not a checkpoint and contains no undamaged checkpoint.
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
