"""Test function for ranks.py that records the samples, losses and state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.distributed import distributed_c10d

from model.fp8.state import fp8_state
from tests.reliability.number_ranks import hash_tensors
from train import phase
from train import run as training
from train.checkpoint.load import load_checkpoint
from train.config.load import build_arguments, open_inputs, resolve_arguments
from train.data.stream import Batch
from train.engine.packed_adamw import PackedAdamW
from train.engine.process_group import suppress_prints
from train.engine.step import MicroStep
from train.engine.zero import base_optimizer, masters, parameter_name


@torch.no_grad()
def full_state(engine: Any, precision: Any) -> dict[str, torch.Tensor]:
    """Return all weights, the float32 optimizer state and the FP8 state, without partitioning.

    The tensors are read with DeepSpeed's own functions. Collective: all ranks must call this function.
    """
    optimizer, found = engine.optimizer, {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            found[f"weight {name}"] = parameter.data.clone()
    if engine.zero_optimization_stage() == 0:
        for master in masters(engine):
            (weight,), state = master.parameters, base_optimizer(engine).state.get(master.tensor, {})
            found |= {
                f"optimizer {parameter_name(engine, weight)} {moment}": state[moment].clone()
                for moment in master.moments
                if moment in state
            }
            if master.tensor is not weight:
                found[f"optimizer {parameter_name(engine, weight)}"] = master.tensor.data.clone()
    else:
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        # the bf16 halves of packed weights are the weights
        more = ("remainder",) if isinstance(optimizer.optimizer, PackedAdamW) else ()
        moments = {id(p): (*master.moments, *more) for master in masters(engine) for p in master.parameters}
        for name, parameter in engine.module.named_parameters():
            found[f"optimizer {name}"] = safe_get_full_fp32_param(parameter)
            for moment in moments[id(parameter)]:
                found[f"optimizer {name} {moment}"] = safe_get_full_optimizer_state(parameter, moment)
    inner = getattr(optimizer, "optimizer", optimizer)
    found["step"] = torch.tensor(
        sorted({float(state["step"]) for state in inner.state.values() if "step" in state})
    )
    found["counters"] = torch.tensor([engine.global_steps, engine.global_samples, engine.skipped_steps])
    return found | {
        f"FP8 {key}": tensor.clone() for key, tensor in fp8_state(engine.module, precision).items()
    }


def group_timeouts() -> list[float]:
    """Return the timeouts of all process groups on this rank in seconds, one for each device type of a group."""
    return [
        group._get_backend(device).options._timeout.total_seconds()
        for group in distributed_c10d._world.pg_map
        for device in group._device_types
    ]


def watched_run(folder: str, settings: dict, keep_after_step: int = 0) -> None:
    """Run a training, and write its state, samples and timeouts to a folder.

    Rank 0 writes the results of `full_state`:

    - kept.pt: the state after the step `keep_after_step` of this process.
    - loaded.pt: the state after loading the checkpoint from which the run resumes.
    - again.pt: the state after loading this checkpoint again at the end of the run, as in a rollback.

    Each rank R writes samples_R.json, a list of [step of this process, micro-batch, sample hash, micro-batch loss], and
    timeouts_R.json, the result of `group_timeouts`.
    """
    args = resolve_arguments(build_arguments(settings), dist.get_world_size())
    accumulation = args.gradient_accumulation_steps or 1
    build, call = phase.build_engine, MicroStep.__call__
    output, rank = Path(folder), dist.get_rank()
    loaded_from: list[Path] = []
    calls: list[MicroStep] = []
    samples: list[tuple[int, int, str, float]] = []

    def dump(name: str, engine: Any, precision: Any) -> None:
        state = full_state(engine, precision)
        if rank == 0:
            torch.save(state, output / f"{name}.pt")

    def built(*values: Any) -> Any:
        engine = build(*values)
        # as if so many steps had been skipped: a resume has the number of the ranks that saved
        engine.skipped_steps = dist.get_world_size()
        return engine

    def loaded(engine: Any, path: Path, precision: Any, *how: Any) -> None:
        addresses = [p.data_ptr() for p in engine.module.parameters()]
        load_checkpoint(engine, path, precision, *how)
        if engine.zero_optimization_stage() < 3:  # ZeRO 3 moves them in each step
            assert addresses == [p.data_ptr() for p in engine.module.parameters()]
        loaded_from.append(path)
        dump("loaded", engine, precision)

    def micro_step(step: MicroStep, batch: Batch, index: int) -> torch.Tensor:
        calls.append(step)
        number, last = -(-len(calls) // accumulation), len(calls) % accumulation == 0
        loss = call(step, batch, index)
        samples.extend((number, index, hash_tensors([row])[:16], float(loss)) for row in batch.input_ids)
        if last and number == keep_after_step:
            dump("kept", step.engine, step.precision)
        return loss

    # train.py creates this folder for the lock
    Path(settings["output_dir"]).mkdir(parents=True, exist_ok=True)
    with (
        mock.patch.object(phase, "build_engine", built),
        mock.patch.object(phase, "load_checkpoint", loaded),
        mock.patch.object(MicroStep, "__call__", micro_step),
    ):
        training.run_training(args, open_inputs(args))
    if loaded_from:
        engine, precision = calls[-1].engine, calls[-1].precision
        with suppress_prints():
            load_checkpoint(engine, loaded_from[0], precision)
        dump("again", engine, precision)
    (output / f"samples_{rank}.json").write_text(json.dumps(samples))
    (output / f"timeouts_{rank}.json").write_text(json.dumps(group_timeouts()))
    dist.barrier()
