"""The training loop: data -> forward and backward -> step -> log -> evaluate -> save, top to bottom.

Everything arrives built (train.py). Nothing here waits for the GPU outside logging, evaluation and saving,
nor for a save that is under way before the next one is due.
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
from train.health import Health, Spike, ranks_without_finite_loss, samples_record, samples_text
from train.metrics import MetricsLogger, mfu, peak_tflops
from train.optimizer import learning_rate_at
from train.replicas import ReplicaCheck, ReplicaError
from train.rollback import Rollback, past_skipped
from train.save import Saver
from train.save_errors import SaveError
from train.signals import Stopped, StopVote
from train.slow_ranks import SlowRanks
from train.watchdog import Watchdog


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
    saver: Saver
    flops_per_token: float
    stop_vote: StopVote
    watchdog: Watchdog


def train(run: Run) -> Path | None:
    """Train from `run.state.step` to max_steps; returns the checkpoint of the last step, None with save_strategy no.

    Raises Stopped: by a signal, after the step and its checkpoint. TrainingError: max_skipped_steps skipped in a row, a
    loss that is not finite in a step that was not skipped, or FP8 stopped running. ReplicaError: ranks whose weights
    differ. SaveError: a save failed, and on_save_failure is stop or no other save follows.
    """
    try:
        return _train(run)
    except (TrainingError, ReplicaError):  # on all ranks: what they save already is as good as ever
        try:
            settle(run)
        except SaveError as error:
            run.metrics.message(f"warning: {error}")
        raise


def _train(run: Run) -> Path | None:
    args, engine, state = run.arguments, run.engine, run.state
    world = dist.get_world_size()
    accumulation = args.gradient_accumulation_steps or 1
    samples_per_step = args.per_device_train_batch_size * accumulation * world
    tokens_per_step = samples_per_step * args.max_seq_length
    batches = MicroBatches(run.train_stream, args.per_device_train_batch_size, dist.get_rank(), world)
    peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "bf16")

    health = Health(engine, run.precision, args.spike_window, args.spike_threshold)
    health.load_state_dict(state.health)
    replicas = ReplicaCheck(engine, run.precision)
    rollback = Rollback(
        run.output_dir / "checkpoints", engine, run.precision, state, health, run.metrics, run.train_stream
    )
    if args.replica_check_steps:
        run.metrics.message(f"replica check, every {args.replica_check_steps} steps: {replicas.scope()}")
    engine.train()
    clock, clock_step = time.perf_counter(), state.step
    slow_ranks = SlowRanks(engine, run.stop_vote.group, args.speed.cuda_graphs)
    if state.evaluation_due:
        evaluate_late(run)
    while state.step < args.max_steps:
        learning_rate = learning_rate_at(state.step, args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        state.consumed_samples = past_skipped(state.consumed_samples, samples_per_step, state.skipped_samples)
        if stage := run.train_stream.stage_that_begins(state.consumed_samples, samples_per_step):
            run.metrics.message(f"step {state.step + 1}: {stage}")
        loss_sum = torch.zeros((), device=engine.device)
        share_sum = torch.zeros((), device=engine.device)  # of tokens with a label, where not all have one
        health.before_step()
        first_sample = state.consumed_samples
        for index in range(accumulation):
            run.watchdog.doing(f"step {state.step + 1}, micro-batch {index + 1} of {accumulation}")
            slow_ranks.begin()
            batch = batches.get(state.consumed_samples, index)
            input_ids, labels, documents = on_device(batch, engine.device)
            loss_sum += run.micro_step(input_ids, labels, index, documents)
            if documents is not None:
                share_sum += labelled(labels)
        state.step += 1
        state.consumed_samples += samples_per_step
        state.consumed_tokens += tokens_per_step
        record: dict[str, Any] = {}
        share = share_sum / accumulation if args.data.document_mask else None
        skipped = health.after_step(state.step, first_sample, loss_sum / accumulation, share)
        if skipped:
            record["skipped"] = _tell_skipped(run, loss_sum / accumulation, samples_per_step)
        if health.skipped_in_a_row == args.max_skipped_steps:
            if record:
                run.metrics.log({"step": state.step, "tokens": state.consumed_tokens, **record})
            raise TrainingError(
                f"the gradients of the last {args.max_skipped_steps} steps, to step {state.step}, were not finite and "
                f"no weight changed; {_advice(run)}"
            )

        stops, saving = run.stop_vote.stop_or(run.saver.busy)
        run.watchdog.met(f"step {state.step} is done")
        if run.saver.pending and not saving:
            settle(run)
        slow_ranks.step(state.step, run.metrics.message)
        last = state.step == args.max_steps
        logs, saves, evaluates = (
            last or bool(n and state.step % n == 0)
            for n in (args.logging_steps, args.save_steps, args.eval_steps)
        )
        checks = args.replica_check_steps and state.step % args.replica_check_steps == 0
        if checks:
            replicas.run(state.step)
        if logs or saves or evaluates or stops or health.full():
            if spikes := health.look():  # waits for the GPU
                record["spikes_found"] = _tell_spikes(run, spikes, samples_per_step)
                run.watchdog.met(f"looked at the numbers to step {state.step}")
                if args.on_spike == "rollback":
                    settle(run)
                    if rollback.after(spikes, samples_per_step):
                        run.watchdog.met(f"is back at step {state.step}")
                        clock, clock_step = time.perf_counter(), state.step
                        continue
        if logs or saves or evaluates or stops:
            loss = _mean_over_ranks(loss_sum / accumulation)  # waits for the GPU
            if args.data.document_mask:
                loss /= _mean_over_ranks(share_sum / accumulation)
            _check(loss, skipped, run)
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
            record["skipped_steps"], record["spikes"] = health.skipped, health.spikes
            if bad := health.mend_histories():
                run.metrics.message(
                    f"step {state.step}: {bad} amaxes in the histories of delayed scaling were not finite; they are "
                    "taken out, for their scales could not have moved while they are in"
                )
            clock, clock_step = now, state.step
        if evaluates:
            eval_loss = None if stops else evaluate(run)
            if eval_loss is None:  # the resumed run makes up for it
                stops = state.evaluation_due = True
            else:
                record["eval_loss"], record["unigram_loss"] = eval_loss, run.train_stream.unigram_loss
            clock, clock_step = time.perf_counter(), state.step
        if record:
            run.metrics.log({"step": state.step, "tokens": state.consumed_tokens, **record})
        if (saves or stops) and args.save_strategy != "no":
            state.health = health.state_dict()
            run.watchdog.met(f"saves step {state.step}")
            _save(run, last or stops)
            run.watchdog.met(f"step {state.step} is saved, or under way")
            clock, clock_step = time.perf_counter(), state.step
        if stops and (not last or state.evaluation_due):
            batches.close()
            raise Stopped(state.step, _checkpoint_of(run))
    batches.close()
    slow_ranks.close()
    return _checkpoint_of(run)


def _checkpoint_of(run: Run) -> Path | None:
    """The checkpoint of this step, None with save_strategy no."""
    if run.arguments.save_strategy == "no":
        return None
    return run.output_dir / "checkpoints" / checkpoint.name_of(run.state.step)


def _save(run: Run, last: bool) -> None:
    """Save this step; in the background, unless it is the last that this process does. Raises SaveError, as `settle`
    does."""
    settle(run)
    run.saver.begin(run.state)
    if last or not run.arguments.save_async:
        settle(run, last)


def settle(run: Run, last: bool = False) -> None:
    """Wait for the save under way, if there is one, and tell what came of it; every rank calls it.

    Raises SaveError: it failed, and the run is not to go on to its next save; after the `last` there is none.
    """
    if run.saver.pending:
        run.watchdog.doing("waits for the save under way")
    try:
        saved = run.saver.finish()
    except SaveError as error:
        if last or run.arguments.on_save_failure == "stop":
            raise
        run.metrics.message(
            f"warning: {error}. on_save_failure is continue: the run goes on to its next save"
        )
    else:
        if saved is not None:
            run.metrics.message(
                f"saved {saved.path} in {saved.seconds:.1f} s (training waited {saved.waited_s:.1f} s)"
            )


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Mean loss in nats a token over the held-out samples (at most max_eval_samples), in the precision of training.

    The FP8 scales and histories are put back afterwards: evaluating changes nothing in training. Every rank
    makes the same number of forwards (the collectives of ZeRO 3 would hang otherwise); rows beyond the last
    sample are masked. None, on every rank, if the run was asked to stop meanwhile: the evaluation is left.
    """
    args, engine = run.arguments, run.engine
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = args.per_device_eval_batch_size or args.per_device_train_batch_size
    samples = min(args.max_eval_samples, run.eval_stream.num_samples)
    before = snapshot_fp8_state(engine.module, run.precision)
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)  # loss sum, tokens
    engine.eval()
    stops = False
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
        stops = run.stop_vote.stop()
        run.watchdog.met(f"evaluates step {run.state.step}")
        if stops:
            break
    engine.train()
    for key, tensor in fp8_state(engine.module, run.precision).items():
        tensor.copy_(before[key])
    if stops:
        return None
    dist.all_reduce(total)
    return float(total[0] / total[1])


def evaluate_late(run: Run) -> None:
    """Make up for the evaluation that the run was stopped in. Raises Stopped: it is stopped again meanwhile."""
    state = run.state
    eval_loss = evaluate(run)
    if eval_loss is None:
        raise Stopped(state.step, _checkpoint_of(run))
    state.evaluation_due = False
    losses = {"eval_loss": eval_loss, "unigram_loss": run.train_stream.unigram_loss}
    run.metrics.log({"step": state.step, "tokens": state.consumed_tokens, **losses})


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Every rank has the same number of tokens, so the mean over ranks is the mean over tokens."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())


def _tell_skipped(run: Run, loss: torch.Tensor, samples: int) -> dict[str, Any]:
    """Say that the last step was skipped, with its `samples` samples; returns them for the metrics."""
    found = samples_record(run.train_stream, run.state.consumed_samples - samples, samples)
    losses = ranks_without_finite_loss(loss)
    where = ", ".join(f"{value} on rank {rank}" for rank, value in losses.items())
    run.metrics.message(
        f"step {run.state.step} is skipped on all ranks, no weight changed: "
        f"{f'the loss is {where}' if where else 'the loss is finite, a gradient is not'}; {samples_text(found)}"
    )
    return {**found, "ranks": list(losses)}


def _tell_spikes(run: Run, spikes: list[Spike], samples: int) -> list[dict[str, Any]]:
    """Say which steps spiked, with their `samples` samples; returns them for the metrics."""
    found = []
    for spike in spikes:
        record = samples_record(run.train_stream, spike.first_sample, samples)
        run.metrics.message(f"step {spike.step} is a spike: {spike}; {samples_text(record)}")
        found.append({"step": spike.step, spike.what: spike.value, "threshold": spike.threshold, **record})
    return found


def _check(loss: float, skipped: bool, run: Run) -> None:
    if not (skipped or math.isfinite(loss)):
        raise TrainingError(
            f"the loss of step {run.state.step} is {loss} and the step was not skipped; {_advice(run)}"
        )
    if run.precision.fp8 and not fp8_modules(run.engine.module, run.precision).ran:
        raise TrainingError(f"at step {run.state.step} no module runs FP8 any more")


def _advice(run: Run) -> str:
    """What to do after a step that went wrong; a run may have saved nothing yet, or with save_strategy no at all."""
    remedy = "with a lower learning_rate or another precision.recipe"
    if not (run.saver.pending or checkpoint.committed(run.output_dir / "checkpoints")):
        return f"this run has saved no checkpoint. Start anew {remedy}"
    return (
        "the checkpoints before it are intact. Go on from one of them in a new output_dir: train/export.py makes it a "
        f"folder for model.init_from, {remedy}"
    )


def _peak_memory_gib() -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
