"""What ranks do in a preflight that finds something: functions of tests/reliability/ranks.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import log_messages, random_ids
from tests.reliability.launching import build_micro_step
from tests.reliability.number_ranks import digests, spoil
from train import run as training
from train.config.load import build_arguments
from train.data.format import DataError
from train.data.stream import Batch, open_stream
from train.engine import process_group
from train.preflight import ranks
from train.preflight.check import PreflightError
from train.preflight.gradients import check_gradients

ACCUMULATION, SAMPLES, TOKENS = 3, 2, 16


def loses(engine: Any, micro_batch: int, factor: float, of: str = "") -> None:
    """From the next forward on DeepSpeed gets `factor` times the gradient of one micro-batch of the last rank, or with
    -1 of all; of parameters whose names end in `of`. After what looks at the right ones has set its hooks."""
    current, done = -1, False

    def begins(module: nn.Module, inputs: Any) -> None:
        nonlocal current, done
        current = (current + 1) % ACCUMULATION
        if not done:
            for name, parameter in module.named_parameters():
                if name.endswith(of):
                    parameter.register_hook(lambda g: g * factor if micro_batch in (-1, current) else g)
        done = True

    if dist.get_rank() == dist.get_world_size() - 1:
        engine.module.register_forward_pre_hook(begins)


def gradients(
    stage: int,
    fault: str,
    config: str,
    precision: dict | None = None,
    data_types: dict | None = None,
    clipping: float = 1.0,
    optim: str = "adamw",
) -> dict[str, Any]:
    """What the check of the gradients says, in a run whose second step is about to begin; and what it changed."""
    rank = dist.get_rank()
    micro_step, args = build_micro_step(
        config,
        precision=precision or {},
        max_seq_length=TOKENS,
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=clipping,
        optim=optim,
        deepspeed={"zero_optimization": {"stage": stage}, "data_types": data_types or {}},
    )
    engine, how = micro_step.engine, micro_step.precision

    def batch(start: int, size: int) -> Batch:
        ids = random_ids(engine.module.config, size, TOKENS, start)
        return Batch(ids, ids)

    for index in range(ACCUMULATION):
        micro_step(batch(1000 * rank + index, SAMPLES), index)
    right_backward = engine.backward
    match fault:
        case "left_out":
            loses(engine, 1, 0.0)
        case "twice":
            loses(engine, ACCUMULATION - 1, 2.0)
        case "one_parameter":
            loses(engine, -1, 0.0, "layernorm_qkv.layer_norm_weight")
        case "factor":
            engine.backward = lambda loss: right_backward(loss * ACCUMULATION)
        case "norm":
            right_norm = engine.get_global_grad_norm
            engine.get_global_grad_norm = lambda: 2 * right_norm()
        case "not_finite":
            spoil("nan_loss" if rank else None)
    before, error = digests(engine, how), None
    random_state = torch.get_rng_state()
    try:
        stream, state = SimpleNamespace(batch=batch), SimpleNamespace(consumed_samples=0, skipped_samples=[])
        with log_messages() as said:
            check_gradients(args, engine, micro_step, how, stream, state)
    except PreflightError as found:
        error = str(found)
    spoil(None)
    after = digests(engine, how)
    changed = [name for name in before if before[name] != after[name]]
    return {
        "error": error,
        "said": said,
        "changed": changed,
        "counters": [engine.global_steps, engine.micro_steps, engine.skipped_steps],
        "random": torch.equal(random_state, torch.get_rng_state()),
    }


GPU: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "driver": "2.3.4"},
    "gemm_tflops": 700.0,
}
# What the second rank has instead: of ranks.Rank, and of its `equal`.
FAULTS: dict[str, dict[str, Any]] = {
    "gemm": {"gemm_tflops": 500.0},
    "gpu": {"machine": {"gpu": "NVIDIA A100", "driver": "2.3.4"}},
    "torch": {"equal": {"torch": "1.0"}},
    "sources": {"equal": {"the hash of model/ and train/": "0123456789ab"}},
}


def alike(settings: dict, fault: str, folder: str, gpus: bool = False) -> dict[str, Any]:
    """Run `check_alike` with a fault on the second rank.

    Args:
        folder: an empty folder.
        gpus: let the ranks report a GPU.
    """
    args, is_second = build_arguments(settings), dist.get_rank() == 1
    right, right_existing = ranks.this_rank, ranks.nearest_existing_path
    ranks.VISIBILITY_TIMEOUT_S = 0.3
    if is_second and fault == "other_data":
        args.seed += 1
    stream = open_stream(args.data.sources, None, args.max_seq_length, args.seed)
    if is_second and fault == "other_folder":
        ranks.nearest_existing_path = lambda path: Path(folder)

    def this_rank(*values: Any) -> ranks.Rank:
        found = replace(right(*values), **(GPU if gpus else {}))
        changed = FAULTS.get(fault, {}) if is_second else {}
        return replace(found, **changed | {"equal": found.equal | changed.get("equal", {})})

    ranks.this_rank = this_rank
    problems: list[str] = []
    try:
        with log_messages() as said:
            ranks.check_alike(args, stream)
    except PreflightError as error:
        problems = [str(problem) for problem in error.problems]
    finally:
        ranks.this_rank, ranks.nearest_existing_path = right, right_existing
    return {"problems": problems, "warnings": [line for line in said if line.startswith("warning")]}


def missing_data(settings: dict, folder: str) -> str | None:
    """Start a run whose data folder does not exist on the second rank. Return the code of the error."""
    args, prepared = build_arguments(settings), process_group.init_distributed
    if dist.get_rank() == 1:
        args.data.sources = {name: f"{folder}/missing" for name in args.data.sources}
    process_group.init_distributed = lambda: None  # it is initialized
    try:
        training.run(args)
    except DataError as error:
        return error.code
    finally:
        process_group.init_distributed = prepared
    return None
