"""The training loop: data -> forward and backward -> step -> log -> evaluate -> save, top to bottom.

Everything arrives built (train.py). Nothing here waits for the GPU outside logging, evaluation and saving.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.fp8_state import fp8_state, snapshot_fp8_state
from model.precision import Precision, fp8_modules
from train import checkpoint
from train.arguments import TrainingArguments
from train.dataset import NO_LABEL, MicroBatches, SampleStream
from train.engine import MicroStep, labelled, on_device
from train.metrics import MetricsLogger, mfu, peak_tflops
from train.optimizer import learning_rate_at

MAX_SKIPPED_STEPS = 10


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step and what to do."""


@dataclass
class Run:
    """What the loop needs, built by train.py."""

    arguments: TrainingArguments  # resolved
    output_dir: Path
    engine: Any  # deepspeed.DeepSpeedEngine
    micro_step: MicroStep
    precision: Precision
    train_stream: SampleStream
    eval_stream: SampleStream
    metrics: MetricsLogger
    state: checkpoint.RunState
    flops_per_token: float


def train(run: Run) -> Path | None:
    """Train from `run.state.step` to max_steps; returns the checkpoint of the last step, None with save_strategy no.

    Raises TrainingError: a loss that is not finite at a logged or saved step, MAX_SKIPPED_STEPS skipped in a row, or
    FP8 stopped running.
    """
    args, engine, state = run.arguments, run.engine, run.state
    world = dist.get_world_size()
    accumulation = args.gradient_accumulation_steps or 1
    samples_per_step = args.per_device_train_batch_size * accumulation * world
    tokens_per_step = samples_per_step * args.max_seq_length
    batches = MicroBatches(run.train_stream, args.per_device_train_batch_size, dist.get_rank(), world)
    peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "bf16")

    skipped, skipped_in_a_row = engine.skipped_steps, 0
    engine.train()
    clock, clock_step = time.perf_counter(), state.step
    while state.step < args.max_steps:
        learning_rate = learning_rate_at(state.step, args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if stage := run.train_stream.stage_that_begins(state.consumed_samples, samples_per_step):
            run.metrics.message(f"step {state.step + 1}: {stage}")
        loss_sum = torch.zeros((), device=engine.device)
        share_sum = torch.zeros((), device=engine.device)  # of tokens with a label, where not all have one
        for index in range(accumulation):
            batch = batches.get(state.consumed_samples, index)
            input_ids, labels, documents = on_device(batch, engine.device)
            loss_sum += run.micro_step(input_ids, labels, index, documents)
            if documents is not None:
                share_sum += labelled(labels)
        state.step += 1
        state.consumed_samples += samples_per_step
        state.consumed_tokens += tokens_per_step
        # DeepSpeed leaves the weights as they are where a gradient is not finite, and says nothing
        skipped_in_a_row = skipped_in_a_row + 1 if engine.skipped_steps > skipped else 0
        skipped = engine.skipped_steps
        if skipped_in_a_row == MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"the gradients of the last {MAX_SKIPPED_STEPS} steps, to step {state.step}, were not finite and no "
                f"weight changed; {_advice(run)}"
            )

        last = state.step == args.max_steps
        logs, saves = (last or (n and state.step % n == 0) for n in (args.logging_steps, args.save_steps))
        saves = saves and args.save_strategy != "no"
        record: dict[str, Any] = {}
        if logs or saves:
            loss = _mean_over_ranks(loss_sum / accumulation)  # waits for the GPU
            if args.data.document_mask:
                loss /= _mean_over_ranks(share_sum / accumulation)
            _check(loss, run)
        if logs:
            record["loss"] = loss
            now = time.perf_counter()
            rate = (state.step - clock_step) * tokens_per_step / (now - clock)
            norm = engine.get_global_grad_norm()  # DeepSpeed computes none at ZeRO 0 in float32
            record["grad_norm"] = None if norm is None else float(norm)
            record["learning_rate"] = learning_rate
            record["tokens_per_second"] = rate
            record["mfu"] = mfu(rate / world, run.flops_per_token, peak)
            record["memory_gib"] = _peak_memory_gib()
            record["skipped_steps"] = skipped
            clock, clock_step = now, state.step
        if last or (args.eval_steps and state.step % args.eval_steps == 0):
            record["eval_loss"], record["unigram_loss"] = evaluate(run), run.train_stream.unigram_loss
            clock, clock_step = time.perf_counter(), state.step
        if record:
            run.metrics.log({"step": state.step, "tokens": state.consumed_tokens, **record})
        if saves:
            start = time.perf_counter()
            path = checkpoint.save(
                engine, run.output_dir / "checkpoints", state, run.precision, args.save_total_limit
            )
            run.metrics.message(f"saved {path} in {time.perf_counter() - start:.1f} s")
            clock, clock_step = time.perf_counter(), state.step
    batches.close()
    if args.save_strategy == "no":
        return None
    return run.output_dir / "checkpoints" / checkpoint.name_of(state.step)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss in nats a token over the held-out samples (at most max_eval_samples), in the precision of training.

    The FP8 scales and histories are put back afterwards: evaluating changes nothing in training. Every rank
    makes the same number of forwards (the collectives of ZeRO 3 would hang otherwise); rows beyond the last
    sample are masked.
    """
    args, engine = run.arguments, run.engine
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = args.per_device_eval_batch_size or args.per_device_train_batch_size
    samples = min(args.max_eval_samples, run.eval_stream.num_samples)
    before = snapshot_fp8_state(engine.module, run.precision)
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)  # loss sum, tokens
    engine.eval()
    for start in range(rank * batch, math.ceil(samples / (batch * world)) * batch * world, batch * world):
        rows = max(0, min(batch, samples - start))
        found = run.eval_stream.batch(start if rows else 0, max(rows, 1))
        missing = batch - len(found[0])
        found = tuple(torch.cat([t, t[:1].expand(missing, -1)]) for t in found)
        found[1][rows:] = NO_LABEL
        tokens = int((found[1] != NO_LABEL).sum())
        input_ids, labels, documents = on_device(found, engine.device)
        within = {} if documents is None else {"documents": documents}
        loss = engine(input_ids, labels=labels, **within).loss
        if tokens:  # the mean over no label is nan
            total += torch.stack([loss.double() * tokens, loss.new_tensor(tokens, dtype=torch.float64)])
    engine.train()
    for key, tensor in fp8_state(engine.module, run.precision).items():
        tensor.copy_(before[key])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Every rank has the same number of tokens, so the mean over ranks is the mean over tokens."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def _check(loss: float, run: Run) -> None:
    if not math.isfinite(loss):
        raise TrainingError(f"the loss of step {run.state.step} is {loss}; {_advice(run)}")
    if run.precision.fp8 and not fp8_modules(run.engine.module, run.precision).ran:
        raise TrainingError(f"at step {run.state.step} no module runs FP8 any more")


def _advice(run: Run) -> str:
    """What to do after a step that went wrong; a run may have saved nothing yet, or with save_strategy no at all."""
    remedy = "with a lower learning_rate or another precision.recipe"
    if not checkpoint.committed(run.output_dir / "checkpoints"):
        return f"this run has saved no checkpoint. Start anew {remedy}"
    return (
        "the checkpoints before it are intact. Go on from one of them in a new output_dir: train/export.py makes it a "
        f"folder for model.init_from, {remedy}"
    )


def _peak_memory_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
