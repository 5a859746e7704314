"""Evaluate the loss on held-out sets with the engine of the run, in the precision of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from model.fp8.precision import Precision
from model.fp8.state import fp8_state, snapshot_fp8_state
from train.data.stream import NO_LABEL, SampleStream, held_out_batches


@torch.no_grad()
def held_out_losses(
    engine: Any,
    precision: Precision,
    streams: Mapping[str, SampleStream],
    batch_size: int,
    should_stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Return the mean loss of each held-out set in nats per token, keyed by loss name.

    The loss of a set with several sources is the mean over the tokens of all sources. The mean over the tokens of one
    source is added as NAME/SOURCE.

    Collective: all ranks must call this function.

    FP8 scales and amax histories are restored after each set, so the evaluation affects neither the training nor the
    other sets.

    Args:
        streams: Held-out sets, keyed by loss name.
        batch_size: Number of samples per batch on each rank.
        should_stop: Function that is called after each batch and returns whether to cancel the evaluation. It must
            return the same value on every rank.

    Returns:
        The losses, or None if the evaluation was cancelled.
    """
    before, losses = snapshot_fp8_state(engine.module, precision), dict[str, float]()
    engine.eval()
    for name, stream in streams.items():
        totals = _sum_losses(engine, stream, batch_size, should_stop)
        for key, tensor in fp8_state(engine.module, precision).items():
            tensor.copy_(before[key])
        if totals is None:
            engine.train()
            return None
        means = {name: sum(totals.values())}
        if len(totals) > 1:
            means |= {f"{name}/{source}": total for source, total in totals.items()}
        losses |= {key: float(total[0] / total[1]) for key, total in means.items()}
    engine.train()
    return losses


def _sum_losses(
    engine: Any, stream: SampleStream, batch_size: int, should_stop: Callable[[], bool]
) -> dict[str, torch.Tensor] | None:
    """Return the sum of the losses and the number of tokens of each source, or None if the evaluation was cancelled."""
    totals, ranks = dict[str, torch.Tensor](), (dist.get_rank(), dist.get_world_size())
    for source, samples in stream.parts.items():
        total = totals[source] = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for *_, batch in held_out_batches(stream, batch_size, *ranks, samples):
            tokens = int((batch.labels != NO_LABEL).sum())
            input_ids, labels, documents = batch.to(engine.device)
            loss = engine(input_ids, labels=labels, documents=documents).loss
            total += torch.stack([loss.double() * tokens, loss.new_tensor(tokens, dtype=torch.float64)])
            if should_stop():
                return None
        dist.all_reduce(total)
    return totals
