"""What the files of a checkpoint hold of each parameter, in whichever way its run was spread over its ranks.

DeepSpeed cuts the float32 weights and AdamW's two moments by ZeRO stage and number of ranks. Each such cut, that of
files or that of an engine (train/checkpoint/reshard.py), is described here as the same thing: for each parameter the
stretches (`Piece`) with the tensors that hold them. Files are mapped, not read: the ranks of a node share their pages.
Layouts checked against DeepSpeed 0.19.8: runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py, stage3.py,
runtime/fp16/unfused_optimizer.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.files import CheckpointError, RunState

WEIGHT, MOMENTS = "float32 weight", ("exp_avg", "exp_avg_sq")
# What a dynamic loss scale (float16) is made of; other attributes of DeepSpeed's scalers are its configuration.
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

Sizes = list[tuple[str, int]]  # name, elements; in the order in which a flat tensor has them


@dataclass
class Piece:
    """The elements from `start` on of a flattened parameter: 1-D tensors of equal length, by WEIGHT and MOMENTS."""

    start: int
    tensors: dict[str, torch.Tensor]

    @property
    def end(self) -> int:
        return self.start + len(self.tensors[WEIGHT])


Pieces = dict[str, list[Piece]]  # by the parameter's name


@dataclass
class Contents:
    """What the files of a checkpoint hold."""

    pieces: Pieces
    steps: set[float]  # AdamW's counts; empty before the first step
    loss_scale: dict[str, Any]
    counters: dict[str, int]  # the engine's


# ---------------------------------------------------------------- cuts


def whole(name: str, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, Piece]]:
    """Without ZeRO: every rank has all of each parameter."""
    yield name, Piece(0, {what: tensor.view(-1) for what, tensor in tensors.items()})


def flat_partition(
    sizes: Sizes, paddings: list[int], rank: int, length: int, flats: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Piece]]:
    """ZeRO 1 and 2: the parameters of a group one after another, paddings[i] elements after the i-th; rank r has the
    elements from r * `length` on."""
    begin, position = rank * length, 0
    for (name, numel), padding in zip(sizes, paddings, strict=True):
        first, end = max(position, begin), min(position + numel, begin + length)
        if first < end:
            yield name, Piece(first - position, _stretch(name, flats, first - begin, end - first))
        position += numel + padding


def partition_of_each(
    sizes: Sizes, rank: int, world: int, flats: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Piece]]:
    """ZeRO 3: of each parameter rank r has the r-th of `world` parts, all as long as the first; the last ones are
    padded. Its parts lie one after another."""
    offset = 0
    for name, numel in sizes:
        part = math.ceil(numel / world)
        if (count := min(part, numel - rank * part)) > 0:
            yield name, Piece(rank * part, _stretch(name, flats, offset, count))
        offset += part


def _stretch(name: str, flats: dict[str, torch.Tensor], start: int, count: int) -> dict[str, torch.Tensor]:
    for what, flat in flats.items():
        if flat.numel() < start + count:
            raise CheckpointError(
                f"{count} elements of {name} belong there, and its {what} ends {start + count - flat.numel()} too early"
            )
    return {what: flat[start : start + count] for what, flat in flats.items()}


# ---------------------------------------------------------------- the files


def read(path: Path, state: RunState, names: list[str]) -> Contents:
    """What the files of the checkpoint `path` hold, mapped into memory. names: the model's parameters in the order of
    an optimizer without ZeRO, whose file does not have them.

    Raises CheckpointError: a file is missing, cannot be read, or lacks something.
    """
    prefix = "zero_pp_rank_0_" if state.zero_stage == 3 else ""
    file = path / f"{prefix}mp_rank_00_model_states.pt"
    saved = Contents(defaultdict(list), set(), {}, {})
    with named(file):
        model = _map(file)
        saved.counters = {name: model[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        if state.zero_stage == 0:
            _read_whole(model, names, saved)
            return saved
        groups = [
            [(name, math.prod(shape)) for name, shape in group.items()] for group in model["param_shapes"]
        ]
    for rank in range(state.world_size):
        file = _shard(path, rank)
        with named(file):
            _read_shard(_map(file)["optimizer_state_dict"], groups, rank, state, saved)
    return saved


def _read_whole(model: dict[str, Any], names: list[str], saved: Contents) -> None:
    """Without ZeRO: torch's AdamW, or DeepSpeed's wrapper for bf16 and fp16 with its float32 weights."""
    optimizer = model["optimizer"]
    if "fp32_groups" in optimizer:
        masters = list(itertools.chain(*optimizer["fp32_groups"]))
        saved.loss_scale = {name: optimizer.get(name) for name in LOSS_SCALE}
    else:
        masters = [model["module"][name] for name in names]
    adam = optimizer.get("optimizer_state_dict", optimizer)
    for index, (name, master) in enumerate(zip(names, masters, strict=True)):
        _collect(saved, whole(name, _tensors(master, adam["state"], index, saved.steps)))


def _read_shard(
    content: dict[str, Any], groups: list[Sizes], rank: int, state: RunState, saved: Contents
) -> None:
    """A rank's part. ZeRO 1 and 2: a flat tensor for each group; ZeRO 3: one for each sub-group."""
    scaler = content.get("loss_scaler")
    saved.loss_scale = {name: getattr(scaler, name, None) for name in LOSS_SCALE}
    if state.zero_stage == 3:
        flats, adam = content["fp32_flat_groups"], content["optimizer_state_dict"]["state"]
    else:
        flats, adam = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]["state"]
    for index, (sizes, flat) in enumerate(zip(groups, flats, strict=True)):
        tensors = _tensors(flat, adam, index, saved.steps)
        if state.zero_stage == 3:
            _collect(saved, partition_of_each(sizes, rank, state.world_size, tensors))
            continue
        # The plain optimizer leaves out what pads the last partitions, BF16_Optimizer does not; it alone has no stage.
        left_out = content["group_paddings"][index] if "zero_stage" in content else 0
        paddings = content.get("param_alignment_paddings", [[0] * len(sizes) for sizes in groups])[index]
        length, total = flat.numel() + left_out, sum(numel for _, numel in sizes) + sum(paddings)
        if length * state.world_size < total:
            raise CheckpointError(
                f"{state.world_size} partitions of {length} elements do not hold the {total} of group {index}"
            )
        _collect(saved, flat_partition(sizes, paddings, rank, length, tensors))


def _tensors(
    master: torch.Tensor, adam: dict[int, dict[str, Any]], index: int, steps: set[float]
) -> dict[str, torch.Tensor]:
    """The float32 weight with AdamW's state of number `index`, of which there is none before the first step."""
    if not adam:
        return {WEIGHT: master}
    steps.add(float(adam[index]["step"]))
    return {WEIGHT: master, **{moment: adam[index][moment] for moment in MOMENTS}}


def _collect(saved: Contents, found: Iterator[tuple[str, Piece]]) -> None:
    for name, piece in found:
        saved.pieces[name].append(piece)


def _shard(path: Path, rank: int) -> Path:
    """DeepSpeed's file of the optimizer of a rank; its name begins with bf16_ where that is what was trained in."""
    candidates = [path / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for kind in ("bf16_", "")]
    for file in candidates:
        if file.exists():
            return file
    raise CheckpointError(f"{candidates[0]} is missing, and so is {candidates[1].name}")


def _map(file: Path) -> dict[str, Any]:
    """A file of DeepSpeed's, which has objects of its own in it; the caller has verified its hash."""
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)


@contextlib.contextmanager
def named(file: Path) -> Iterator[None]:
    """Errors of a file that is not as it should be, as a CheckpointError that names it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file} does not hold what DeepSpeed 0.19.8 writes there: {error!r}"
        ) from error
