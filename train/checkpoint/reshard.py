"""Load a checkpoint of another number of ranks, or of another ZeRO stage, than the engine's.

What this rank holds of each parameter and what the old shards hold of it (train/checkpoint/shards.py) is laid side by
side, and what overlaps is copied: in place, since CUDA graphs and Transformer Engine's FP8 copies rely on where the
weights are. No file is written, and nothing is held twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.files import CheckpointError, RunState, rank_file
from train.checkpoint.shards import (
    LOSS_SCALE,
    MOMENTS,
    WEIGHT,
    Contents,
    Piece,
    Sizes,
    flat_partition,
    named,
    partition_of_each,
    read,
    whole,
)
from train.engine.optimizer import parameter_groups


@torch.no_grad()
def load_repartitioned(engine: Any, path: Path, state: RunState) -> None:
    """Put weights, optimizer and counters of the checkpoint `path` (its run state: `state`) into `engine`; every rank
    calls it.

    The weights become the float32 ones, rounded to their type: that is what they were.

    Raises CheckpointError: a file is missing, cannot be read, or lacks something; it is of another model.
    """
    sizes = {engine.param_names[p]: getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()}
    saved = read(path, state, _group_names(engine))
    check(saved, sizes, path)
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    inner = getattr(optimizer, "optimizer", optimizer)
    if not saved.steps:
        inner.state.clear()
    for name, piece in _pieces_of_engine(engine, saved.steps):
        for old in saved.pieces[name]:
            first, end = max(piece.start, old.start), min(piece.end, old.end)
            if first < end:
                for what, tensor in piece.tensors.items():
                    found = old.tensors[what][first - old.start : end - old.start]
                    tensor[first - piece.start : end - piece.start].copy_(found)
    _weights_from_masters(optimizer, stage)
    for name, value in saved.counters.items():
        setattr(engine, name, value)
    scaler = _loss_scaler(optimizer)
    for name in LOSS_SCALE:
        if hasattr(scaler, name) and saved.loss_scale.get(name) is not None:
            setattr(scaler, name, saved.loss_scale[name])


def check(saved: Contents, sizes: dict[str, int], path: Path) -> None:
    """Raises CheckpointError: what the files of the checkpoint `path` hold are not exactly the parameters of `sizes`
    (name -> elements), after one number of steps."""
    if len(saved.steps) > 1:
        raise CheckpointError(f"{path}: AdamW's step differs between parameters: {sorted(saved.steps)}")
    pieces = saved.pieces
    missing, unknown = sorted(sizes.keys() - pieces.keys()), sorted(pieces.keys() - sizes.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model: it lacks {missing or 'nothing'}, and has {unknown or 'nothing'} in addition"
        )
    for name, found in pieces.items():
        ends = [0, *(piece.end for piece in found)]
        if [piece.start for piece in found] != ends[:-1] or ends[-1] != sizes[name]:
            stretches = ", ".join(f"{piece.start} to {piece.end}" for piece in found)
            raise CheckpointError(
                f"{path} does not have {name} whole: it has {sizes[name]} elements, and the shards hold {stretches}"
            )


def _weights_from_masters(optimizer: Any, stage: int) -> None:
    """The weights that the model computes with, in place; collective."""
    if stage == 3:
        flats = zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        )
        for index, (weights, masters) in enumerate(flats):
            weights.data.copy_(masters.data)
            optimizer._unflatten_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for groups in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for weight, master in zip(*groups, strict=True):
                weight.data.copy_(master)


def _loss_scaler(optimizer: Any) -> Any:
    """What holds the loss scale: the optimizer's of ZeRO 1 to 3, the configuration without ZeRO, else None."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


# ---------------------------------------------------------------- this engine


def _pieces_of_engine(engine: Any, steps: set[float]) -> Iterator[tuple[str, Piece]]:
    """What this rank holds of each parameter, with moments where there are `steps`: AdamW's one count."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    rank, world, names = dist.get_rank(), dist.get_world_size(), engine.param_names
    inner = getattr(optimizer, "optimizer", optimizer)

    def tensors(master: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {WEIGHT: master.data}
        if steps:
            state = inner.state[master]
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(master.data)
                found[moment] = state[moment]
            # as torch.optim.AdamW makes it: where its kernel reads it
            device = master.device if inner.defaults.get("fused") else "cpu"
            state["step"] = torch.tensor(next(iter(steps)), dtype=torch.float32, device=device)
        return found

    def sizes(group: Iterable[Any]) -> Sizes:
        return [(names[p], getattr(p, "ds_numel", p.numel())) for p in group]

    if stage == 3:
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            yield from partition_of_each(sizes(group), rank, world, tensors(flat))
    elif hasattr(optimizer, "bf16_groups"):
        for group, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            yield from flat_partition(sizes(group), [0] * len(group), rank, flat.numel(), tensors(flat))
    elif stage:
        groups, paddings = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_padding
        for group, padding, flat in zip(
            groups, paddings, optimizer.single_partition_of_fp32_groups, strict=True
        ):
            yield from flat_partition(sizes(group), padding, rank, flat.numel(), tensors(flat))
    else:
        weights = getattr(optimizer, "fp16_groups", None) or [g["params"] for g in optimizer.param_groups]
        masters = getattr(optimizer, "fp32_groups", weights)
        for weight, master in zip(itertools.chain(*weights), itertools.chain(*masters), strict=True):
            yield from whole(names[weight], tensors(master))


def _group_names(engine: Any) -> list[str]:
    """The parameters in the order in which an optimizer without ZeRO has them."""
    return [engine.param_names[p] for group in parameter_groups(engine.module, 0.0) for p in group["params"]]


# ---------------------------------------------------------------- FP8


def fp8_of_all_ranks(path: Path, world: int) -> dict[str, torch.Tensor]:
    """The FP8 state of delayed scaling of the `world` ranks that wrote the checkpoint `path`, which reduce their amaxes
    and so have the same. In the first row of a history a rank gathers its own amaxes until the next reduction: their
    maximum is what that would make of them.

    Raises CheckpointError: the ranks have different states.
    """
    files = [path / rank_file(rank) for rank in range(world)]
    states = []
    for file in files:
        with named(file):
            states.append(torch.load(file, map_location="cpu", weights_only=True)["fp8"])
    first = states[0]
    for file, state in zip(files, states, strict=True):
        if state.keys() != first.keys():
            raise CheckpointError(f"{file} has FP8 state of other modules than {files[0]}")
        for key, tensor in state.items():
            rows = slice(1, None) if key.endswith(".amax_history") else slice(None)
            if not torch.equal(tensor[rows].view(torch.int32), first[key][rows].view(torch.int32)):
                raise CheckpointError(
                    f"{file} and {files[0]} differ in {key}: each rank scaled by its own amaxes (precision.reduce_amax "
                    f"false), or one of them is wrong. Only {world} ranks can go on from {path.name}"
                )
    histories = [key for key in first if key.endswith(".amax_history")]
    return first | {key: torch.stack([state[key] for state in states]).amax(0) for key in histories}
