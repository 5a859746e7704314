"""Evaluation: the mean loss over the held-out samples."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from model.fp8.state import fp8_state, snapshot_fp8_state
from train.data.stream import NO_LABEL
from train.guard.signals import Stopped
from train.run import Run


@torch.no_grad()
def evaluate(run: Run) -> float | None:
    """Mean loss in nats a token over the held-out samples (at most max_eval_samples), in the precision of training.

    The FP8 scales and histories are put back afterwards: evaluating changes nothing in training. Every rank
    makes the same number of forwards (the collectives of ZeRO 3 would hang otherwise); rows beyond the last
    sample are masked. None, on every rank, if the run was asked to stop meanwhile: the evaluation is left.
    """
    args, engine = run.arguments, run.engine
    rank, world = dist.get_rank(), dist.get_world_size()
    size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    samples = min(args.max_eval_samples, run.eval_stream.num_samples)
    before = snapshot_fp8_state(engine.module, run.precision)
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)  # loss sum, tokens
    engine.eval()
    stops = False
    for start in range(rank * size, math.ceil(samples / (size * world)) * size * world, size * world):
        rows = max(0, min(size, samples - start))
        batch = run.eval_stream.batch(start if rows else 0, max(rows, 1)).filled(size)
        batch.labels[rows:] = NO_LABEL
        tokens = int((batch.labels != NO_LABEL).sum())
        input_ids, labels, documents = batch.to(engine.device)
        loss = engine(input_ids, labels=labels, documents=documents).loss
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
        raise Stopped(state.step, run.checkpoint)
    state.evaluation_due = False
    losses = {"eval_loss": eval_loss, "unigram_loss": run.train_stream.unigram_loss}
    run.log(losses)
