"""A step that leaves no trace: afterwards the run is, bit for bit, what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from model.errors import UserError
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reset_fp8_state, snapshot_fp8_state
from train.checkpoint.load import set_random_state
from train.checkpoint.save import rank_state
from train.engine import zero
from train.guard.replicas import checksum, make_multipliers

CHUNK = 2**28  # elements that are looked at together; torch.nonzero takes fewer than 2**31 on a GPU


class ChangedError(UserError):
    """A step of the preflight has changed the run."""

    code = "preflight_changed_run"


@contextmanager
def as_before(engine: Any, precision: Precision) -> Iterator[None]:
    """Whole steps with a learning rate of 0 may be taken within it. Then random generators, FP8 state, the optimizer's
    moments, weights that are -0 (of which such a step makes 0) and what counts steps are put back, in place. Of a run
    that goes on, the moments wait in host memory.

    Raises ChangedError: weights or the optimizer are not what they were."""
    random_state = rank_state(engine.module, precision)
    fp8 = snapshot_fp8_state(engine.module, precision)
    state = zero.base_optimizer(engine).state
    moments = {
        tensor: {
            key: value.to("cpu", copy=True) if torch.is_tensor(value) else value for key, value in its.items()
        }
        for tensor, its in state.items()
    }
    zeros = negative_zeros(engine)
    before = checksums(engine)
    with zero.uncounted(engine):
        yield
    put_back_fp8(engine, precision, fp8)
    for tensor, its in state.items():
        for key, value in its.items():
            if not torch.is_tensor(value):
                raise ChangedError(f"the optimizer's {key} is no tensor, which a preflight cannot put back")
            # what AdamW begins with; DeepSpeed has linked these very tensors to its weights
            if (old := moments.get(tensor, {}).get(key)) is None:
                value.zero_()
            else:
                value.copy_(old)
    for part, places in zeros:
        part[places] = -0.0
    set_random_state(random_state)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    after = checksums(engine)
    if changed := [name for name in before if before[name] != after[name]]:
        raise ChangedError(
            f"a step of the preflight with a learning rate of 0 has changed {changed[0]} and "
            f"{len(changed) - 1} others; start again with --preflight false, and report this"
        )


def put_back_fp8(engine: Any, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """`saved`: of snapshot_fp8_state; what it does not have, had not run by then."""
    reset_fp8_state(engine.module, precision)
    for key, tensor in fp8_state(engine.module, precision).items():
        if key in saved:
            tensor.copy_(saved[key])


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and float32 weights on this rank, by what they are."""
    tensors = {f"weight {name}": zero.held_of(p) for name, p in engine.module.named_parameters()}
    return tensors | {f"master {i}": master.tensor.data for i, master in enumerate(zero.masters(engine))}


def negative_zeros(engine: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(part of a weight, 1-D; int64 places in it) of all that are -0."""
    parts = [part for tensor in weights_of(engine).values() for part in tensor.view(-1).split(CHUNK)]
    found = [(part, ((part == 0) & part.signbit()).nonzero()[:, 0]) for part in parts]
    return [(part, places) for part, places in found if len(places)]


def checksums(engine: Any) -> dict[str, int]:
    """Of `weights_of`."""
    multipliers, tensors = make_multipliers(engine.device), weights_of(engine)
    sums = [checksum(tensor, multipliers) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))
