"""Test function for ranks.py: steps at ZeRO 3 with weights that are gathered in 8 or in 16 bits."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import deepspeed.comm
import torch
import torch.distributed as dist

from model.checks.health import HealthCheck, statistics
from tests.conftest import random_ids
from tests.reliability.launching import build_micro_step
from tests.reliability.number_ranks import digests, spoil
from train.config.load import load_deepspeed
from train.data.stream import Batch
from train.engine import step as engine_step
from train.engine.process_group import make_deterministic
from train.engine.step import SkipDecision


def weight_statistics(check: HealthCheck) -> dict[str, list[float]]:
    """Return the health statistics of the weights over all ranks, by GEMM."""
    totals = check.totals()[:, 1].contiguous()
    largest = totals[:, -1].clone()
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    totals[:, -1] = largest
    return dict(zip(check.gemms, statistics(totals)[:, :4].tolist(), strict=True))


def gathered_steps(
    config: str,
    precision: dict[str, Any],
    is_packed: bool,
    quantize_once: bool = False,
    accumulation: int = 1,
    recompute: bool | str = False,
    fallbacks: dict[str, str] | None = None,
    sizes: tuple[int, int] = (1, 16),
    steps: int = 3,
    variant: str = "te_layer",
    in_place: bool = True,
) -> dict[str, Any]:
    """Take steps with an evaluation and a skipped step between them.

    Args:
        is_packed: gather weights in 8 bits.
        quantize_once: without `is_packed`, quantize the gathered weights only in the first micro-batch of a step.
        sizes: samples per micro-batch and tokens per sample.
        in_place: communicate without DeepSpeed's copies.

    Returns:
        losses, evaluations: losses of all micro-batches, and of the evaluation after each step.
        norms: gradient norm of each step.
        state: hashes of weights, optimizer states and FP8 state after the last step.
        sent: bytes of the gathers in the first step, by data type.
        health: statistics of the weights in the first step, by GEMM, over all ranks.
    """
    make_deterministic()
    samples, tokens = sizes
    deepspeed_config = load_deepspeed("ds_config_zero3.json")
    # else DeepSpeed keeps the matrices of small models on all ranks
    deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 1000
    # TE keeps the FP8 copies of the first micro-batch
    once = mock.patch.object(engine_step, "quantize_weights_again")
    copies = mock.patch.object(engine_step, "communicate_in_place")
    with contextlib.ExitStack() as changed:
        if quantize_once:
            changed.enter_context(once)
        if not in_place:
            changed.enter_context(copies)
        micro_step, _ = build_micro_step(
            config,
            fallbacks,
            variant,
            precision={**precision, "fp8_weight_gather": is_packed},
            max_seq_length=tokens,
            per_device_train_batch_size=samples,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=recompute,
            learning_rate=0.01,
            speed={"fused_cross_entropy": False},  # the loss is spoiled
            deepspeed=deepspeed_config,
        )
    engine, how, rank = micro_step.engine, micro_step.precision, dist.get_rank()
    skip_decision = SkipDecision(engine, how)
    micro_step.cache_weights |= quantize_once
    sent: dict[str, int] = {}

    def counting(gather: Any) -> Any:
        def counted(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if not evaluations:
                sent[str(output.dtype)] = sent.get(str(output.dtype), 0) + output.nbytes
            return gather(output, *arguments, **options)

        return counted

    def batch(seed: int) -> Batch:
        ids = random_ids(engine.module.config, *sizes, 100 * seed + rank).to(engine.device)
        return Batch(ids, ids)

    losses, evaluations, norms = [], [], []
    with (
        mock.patch.object(deepspeed.comm, "allgather_fn", counting(deepspeed.comm.allgather_fn)),
        mock.patch.object(dist, "all_gather_into_tensor", counting(dist.all_gather_into_tensor)),
    ):
        for step in range(steps):
            skip_decision.keep_fp8_state()
            is_bad = step == 1  # a loss that is not finite on one rank
            for index in range(accumulation):
                check = HealthCheck(engine.module, how) if step == index == 0 else None
                spoil("nan_loss" if is_bad and rank == 0 else None)
                with check.collecting() if check else contextlib.nullcontext():
                    losses.append(repr(float(micro_step(batch(10 * step + index), index))))
                if check:
                    health = weight_statistics(check)
            norms.append(float(engine.get_global_grad_norm()))
            spoil(None)
            assert skip_decision.is_skipped(step + 1) == is_bad
            engine.eval()
            with torch.no_grad():
                evaluated = batch(1000)
                evaluations.append(float(engine(evaluated.input_ids, labels=evaluated.labels).loss))
            engine.train()
    return {
        "losses": losses,
        "evaluations": evaluations,
        "norms": norms,
        "state": digests(engine, how),
        "sent": sent,
        "health": health,
    }
