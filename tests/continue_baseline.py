#!/usr/bin/env python3
"""Continue what an older commit wrote, with its own code and with this tree's, and compare the results bit for bit.

    git worktree add /tmp/baseline COMMIT
    python tests/continue_baseline.py /tmp/baseline WORK_DIR [CASE ...]

The baseline prepares data and trains a tiny model for a few steps on the CPU, once for each case. Each checkpoint in
the middle is continued by both trees in new folders. Losses, gradient norms, learning rates, evaluation losses and
exported weights must be equal; so must the data when this tree prepares them again. Both trees run by their commands,
with this Python. Exit status 1: something differs, or a command failed; its output is in WORK_DIR.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPARED = "step", "loss", "step_loss", "grad_norm", "learning_rate", "eval_loss"
MODEL = {
    "model_type": "mistral",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "max_seq_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_steps": 2,
    "save_total_limit": 9,
    "eval_steps": 2,
    "max_eval_samples": 5,
}
DELAYED = {"recipe": "delayed", "amax_history_len": 4}
BF16_FIRST = {"until_step": 3, "compute": "bf16"}


def zero(stage: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a ZeRO stage."""
    types = {"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}
    return {"deepspeed": {"zero_optimization": {"stage": stage}, **types}}


# name -> ranks, settings
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero_0": (1, zero(0)),
    "zero_1_two_ranks": (2, zero(1)),
    "zero_2": (1, zero(2)),
    "zero_3": (1, zero(3)),
    "packed_states": (1, {"precision": {"optimizer_states": "bf16_remainder"}}),
    "muon": (1, {"optim": "muon"}),
    "delayed_te_layer": (1, {"precision": DELAYED, "model": {"variant": "te_layer"}}),
    "delayed_te_linear": (1, {"precision": DELAYED, "model": {"variant": "te_linear"}}),
    "current": (1, {"precision": {"recipe": "current"}}),
    "block": (1, {"precision": {"recipe": "block"}}),
    "bf16": (1, {"precision": {"compute": "bf16"}}),
    "schedule": (1, {"precision": {"schedule": [BF16_FIRST, DELAYED]}}),
    # so high a rate that scales of earlier steps do not fit: modules fall back in the first steps
    "fallback": (
        1,
        {
            "precision": {**DELAYED, "health_steps": 1, "on_trouble": "escalate"},
            "learning_rate": 0.05,
            "warmup_steps": 0,
            "save_steps": 0,
            "max_steps": 6,
        },
    ),
}


class Failed(Exception):
    """A command failed."""


def command(tree: Path, log: Path, *arguments: object) -> None:
    """Run a program of `tree` on the CPU, with its output in `log`. Raises Failed."""
    hidden = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        program = [sys.executable, *map(str, arguments)]
        done = subprocess.run(program, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed(f"{arguments[0]} ended with status {done.returncode}: {log}")


def write_inputs(folder: Path) -> list[Path]:
    """A text file, a .jsonl and a .csv of different documents, some with quotes and line ends."""
    words = (
        "the quick brown fox jumps over lazy dogs while seven wizards mix potions under a pale moon".split()
    )
    texts = [
        " ".join(words[(i * j + j * j) % len(words)] for j in range(1, 20 + i % 41)) + f'\n"{i}", said {i}\n'
        for i in range(240)
    ]
    files = [folder / f"input.{kind}" for kind in ("txt", "jsonl", "csv")]
    files[0].write_text("\n".join(texts[:60]))
    files[1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[60:160]))
    with files[2].open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([i, text] for i, text in enumerate(texts[160:]))])
    return files


def prepare(tree: Path, folder: Path, inputs: list[Path], output: Path) -> None:
    options = ["--eval_fraction", "0.2", "--workers", "1", "--tokenizer", folder / "tokenizer"]
    log = folder / f"{output.name}.log"
    command(tree, log, "train/prepare_data.py", "--input", *inputs, "--output", output, *options)


def train(tree: Path, ranks: int, config: Path, output: Path, start: str) -> None:
    launcher = ["train/launch.py", "--nproc", str(ranks)] if ranks > 1 else []
    options = ["--output_dir", output, "--resume_from_checkpoint", start]
    command(tree, output.with_suffix(".log"), *launcher, "train/train.py", config, *options)


def middle(output: Path) -> Path:
    """The checkpoint to continue from: the first one, which after a fallback is that of the fallback."""
    return min((output / "checkpoints").glob("step-*"))


def curve(output: Path, after: int) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [
        {key: line.get(key) for key in COMPARED} for line in lines if "loss" in line and line["step"] > after
    ]


def weights(output: Path) -> dict[str, tuple[Any, bytes]]:
    """The tensors of the export, as their descriptions and bytes."""
    data = (output / "hf/model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            first, end = (begin + offset for offset in entry.pop("data_offsets"))
            found[name] = entry, data[first:end]
    return found


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def different(one: dict, other: dict) -> list[str]:
    """Names that one of the two lacks or has with another value."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def compare_data(baseline: Path, work: Path, inputs: list[Path]) -> str:
    """Prepare the data again. Returns what differs."""
    prepare(ROOT, work, inputs, work / "data_again")
    return ", ".join(different(files(work / "data"), files(work / "data_again")))


def compare_case(baseline: Path, work: Path, name: str) -> str:
    """Write a checkpoint and continue from it by both trees. Returns what differs."""
    ranks, settings = CASES[name]
    folder, config = work / name, work / f"{name}.json"
    model = {"config": str(work / "model.json")} | settings.get("model", {})
    data = {"sources": {"text": str(work / "data")}}
    config.write_text(
        json.dumps(SETTINGS | {"output_dir": "none", "data": data} | settings | {"model": model})
    )
    train(baseline, ranks, config, folder / "whole", "never")
    start = middle(folder / "whole")
    step, state = int(start.name.removeprefix("step-")), json.loads((start / "run_state.json").read_text())
    if step >= state["train_config"]["max_steps"] or (name == "fallback" and not state["escalations"]):
        raise Failed(f"{start} is not in the middle of the run, or without a fallback")
    trees = {"baseline": baseline, "current": ROOT}
    for tree_name, tree in trees.items():
        train(tree, ranks, config, folder / tree_name, str(start))
    curves = [curve(folder / tree_name, step) for tree_name in ("whole", *trees)]
    found = [] if curves[2] else ["no steps"]
    found += [] if curves[0] == curves[1] else ["baseline does not resume exactly"]
    for ours, theirs in (
        zip(*curves[1:], strict=True) if len(curves[1]) == len(curves[2]) else [({}, {"steps": 0})]
    ):
        found += [f"{key} of step {theirs.get('step')}" for key in different(ours, theirs)]
    exported = [weights(folder / tree_name) for tree_name in trees]
    return ", ".join(found + different(*exported))


def main(baseline: Path, work: Path, names: list[str]) -> int:
    work.mkdir(parents=True)
    inputs, failed = write_inputs(work), 0
    (work / "model.json").write_text(json.dumps(MODEL))
    tokenizer = ["--vocab_size", "400", "--output", work / "tokenizer"]
    command(baseline, work / "tokenizer.log", "train/train_tokenizer.py", "--input", *inputs, *tokenizer)
    prepare(baseline, work, inputs, work / "data")
    for name in names or ["data", *CASES]:
        begin = time.monotonic()
        try:
            if name == "data":
                found = compare_data(baseline, work, inputs)
            else:
                found = compare_case(baseline, work, name)
        except Failed as error:
            found = str(error)
        failed += bool(found)
        print(
            f"{name:20} {time.monotonic() - begin:6.1f} s  {f'DIFFERENT: {found}' if found else 'equal'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]))
