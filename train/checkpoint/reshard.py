"""Load a checkpoint of another number of ranks, or of another ZeRO stage, than the engine's.

DeepSpeed partitions the float32 weights and AdamW's two moments, or Muon's one, by ZeRO stage and number of ranks. Both
partitions, of the files and of the engine, are described as pieces of each parameter (`Piece`), and what overlaps is
copied. It is copied in place: CUDA graphs and Transformer Engine's FP8 copies rely on the addresses of weights. Files
are memory-mapped, so that the ranks of a node share their pages.

This file knows DeepSpeed's checkpoint files (of 0.19.8); train/engine/zero.py knows its engine.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.files import CheckpointError, RunState, rank_file
from train.engine import zero
from train.engine.optimizer import parameter_groups
from train.engine.states import MOMENTS, PackedAdamW, Stretch, stretches

WEIGHT = "float32 weight"

Tensors = dict[str, torch.Tensor] | dict[str, Stretch]  # by WEIGHT and MOMENTS
Sizes = list[tuple[str, int]]  # name, elements; in the order of a flat tensor


@dataclass
class Piece:
    """Elements of a flattened parameter from `start` on: 1-D tensors of equal length, by WEIGHT and the names of
    moments (train/engine/zero.py)."""

    start: int
    tensors: Tensors

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


@torch.no_grad()
def load_resharded(engine: Any, path: Path, state: RunState) -> None:
    """Load weights, optimizer and counters of the checkpoint `path`, whose run state is `state`, into `engine`.
    Collective.

    The weights are the float32 ones rounded to their type, as they were.

    Raises CheckpointError: a file is missing, cannot be read, or lacks something; it is of another model.
    """
    sizes = {zero.name_of(engine, p): zero.shape_of(p).numel() for p in engine.module.parameters()}
    # the order in which an optimizer without ZeRO has them
    groups = parameter_groups(engine.module, 0.0, state.train_config.get("optim", "adamw"))
    ordered = [p for group in groups for p in group["params"]]
    saved = read(path, state, [zero.name_of(engine, p) for p in ordered])
    check(saved, sizes, path)
    if not saved.steps:
        zero.base_optimizer(engine).state.clear()
    with zero.rewritten_masters(engine):
        for name, piece in _pieces_of_engine(engine, saved.steps):
            for old in saved.pieces[name]:
                first, end = max(piece.start, old.start), min(piece.end, old.end)
                if first < end:
                    for what, tensor in piece.tensors.items():
                        found = old.tensors[what][first - old.start : end - old.start]
                        tensor[first - piece.start : end - piece.start].copy_(found)
    for name, value in saved.counters.items():
        setattr(engine, name, value)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name in zero.LOSS_SCALE:
        if hasattr(scaler, name) and saved.loss_scale.get(name) is not None:
            setattr(scaler, name, saved.loss_scale[name])


def check(saved: Contents, sizes: dict[str, int], path: Path) -> None:
    """Raise CheckpointError: the files of the checkpoint `path` do not hold exactly the parameters of `sizes` (name ->
    elements), after one number of steps."""
    if len(saved.steps) > 1:
        raise CheckpointError(f"{path}: AdamW's step differs between parameters: {sorted(saved.steps)}")
    pieces = saved.pieces
    missing, unknown = sorted(sizes.keys() - pieces.keys()), sorted(pieces.keys() - sizes.keys())
    if missing or unknown:
        raise CheckpointError(f"{path} is of another model: missing are {missing}, unknown are {unknown}")
    for name, found in pieces.items():
        ends = [0, *(piece.end for piece in found)]
        if [piece.start for piece in found] != ends[:-1] or ends[-1] != sizes[name]:
            stretches = ", ".join(f"{piece.start} to {piece.end}" for piece in found)
            raise CheckpointError(
                f"{path} does not hold all {sizes[name]} elements of {name}: the shards hold {stretches}"
            )


# ---------------------------------------------------------------- partitions


def flat_partition(
    sizes: Sizes, paddings: list[int], rank: int, length: int, flats: Tensors
) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of ZeRO 1 and 2: the parameters of a group lie one after another, with paddings[i] elements
    after the i-th, and rank r has the elements from r * `length` on. Without ZeRO: a group of one parameter, all of
    rank 0."""
    begin, position = rank * length, 0
    for (name, numel), padding in zip(sizes, paddings, strict=True):
        first, end = max(position, begin), min(position + numel, begin + length)
        if first < end:
            held = {what: flat.narrow(0, first - begin, end - first) for what, flat in flats.items()}
            yield name, Piece(first - position, held)
        position += numel + padding


def partition_of_each(sizes: Sizes, rank: int, world: int, flats: Tensors) -> Iterator[tuple[str, Piece]]:
    """Yield the pieces of ZeRO 3: rank r has the r-th of `world` parts of each parameter, all as long as the first; the
    last ones are padded. A rank's parts lie one after another."""
    offset = 0
    for name, numel in sizes:
        part = math.ceil(numel / world)
        if (count := min(part, numel - rank * part)) > 0:
            held = {what: flat.narrow(0, offset, count) for what, flat in flats.items()}
            yield name, Piece(rank * part, held)
        offset += part


# ---------------------------------------------------------------- the engine


def _pieces_of_engine(engine: Any, steps: set[float]) -> Iterator[tuple[str, Piece]]:
    """Yield what this rank holds of each parameter, with moments where there are `steps`: AdamW's one count."""
    optimizer = zero.base_optimizer(engine)
    for master in zero.masters(engine):
        packed = optimizer if isinstance(optimizer, PackedAdamW) else None
        if packed:
            kinds = (WEIGHT, *MOMENTS) if steps else (WEIGHT,)
            tensors = {what: torch.zeros(master.tensor.numel()) for what in kinds}
        else:
            tensors = {WEIGHT: master.tensor.data.view(-1)}
        if steps and not packed:
            state = optimizer.state[master.tensor]
            for moment in master.moments:
                if moment not in state:
                    state[moment] = torch.zeros_like(master.tensor.data)
                tensors[moment] = state[moment].view(-1)
            if master.moments == MOMENTS:
                # as torch.optim.AdamW allocates it: where its kernel reads it
                device = master.tensor.device if zero.adamw_is_fused(engine) else "cpu"
                state["step"] = torch.tensor(next(iter(steps)), dtype=torch.float32, device=device)
        yield from pieces_of_master(engine, master, tensors)
        if packed:  # the caller has filled the tensors
            packed.put(master.tensor, tensors[WEIGHT], tensors, next(iter(steps), None))


def pieces_of_master(
    engine: Any, master: zero.Master, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) of each parameter that this rank has a part of in `master`. The 1-D `tensors` are partitioned
    as it is."""
    rank, world, stage = dist.get_rank(), dist.get_world_size(), engine.zero_optimization_stage()
    sizes = [(zero.name_of(engine, p), zero.shape_of(p).numel()) for p in master.parameters]
    if stage == 3:
        yield from partition_of_each(sizes, rank, world, tensors)
    else:
        length = master.tensor.numel()
        yield from flat_partition(sizes, master.paddings, rank if stage else 0, length, tensors)


# ---------------------------------------------------------------- the files


def read(path: Path, state: RunState, names: list[str]) -> Contents:
    """Return what the files of the checkpoint `path` hold, memory-mapped.

    Args:
        names: the model's parameters in the order of an optimizer without ZeRO, whose file does not have them.

    Raises CheckpointError: a file is missing, cannot be read, or lacks something.
    """
    file = model_file(path, state)
    saved, model = Contents(defaultdict(list), set(), {}, {}), load_shard(file, mmap=True)
    with named(file):
        saved.counters = {name: model[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        if state.zero_stage == 0:
            _read_whole(model, names, saved)
            return saved
        groups = [
            [(name, math.prod(shape)) for name, shape in group.items()] for group in model["param_shapes"]
        ]
    for rank in range(state.world_size):
        file = _shard(path, rank)
        content = load_shard(file, mmap=True)
        with named(file):
            _read_shard(content["optimizer_state_dict"], groups, rank, state, saved)
    return saved


def read_partitioned_weights(path: Path, state: RunState) -> dict[str, torch.Tensor]:
    """Return the float32 weights of a checkpoint of ZeRO 3, which has them in the shards of the optimizer, by name.

    Raises CheckpointError as `read` and `check`.
    """
    file = model_file(path, state)
    model = load_shard(file)
    with named(file):
        shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        tied = dict(model["shared_params"])
    saved = read(path, state, [])
    check(saved, {name: math.prod(shape) for name, shape in shapes.items()}, path)
    weights = {
        name: torch.cat([piece.tensors[WEIGHT] for piece in saved.pieces[name]]).view(shape)  # type: ignore[misc]
        for name, shape in shapes.items()
    }
    return weights | {name: weights[other] for name, other in tied.items()}


def _read_whole(model: dict[str, Any], names: list[str], saved: Contents) -> None:
    """Read the optimizer without ZeRO: torch's, or DeepSpeed's wrapper for bf16 with its float32 weights."""
    optimizer = model["optimizer"]
    if "fp32_groups" in optimizer:
        masters = list(itertools.chain(*optimizer["fp32_groups"]))
    else:
        masters = [model["module"][name] for name in names]
    adam = optimizer.get("optimizer_state_dict", optimizer)
    for index, (name, master) in enumerate(zip(names, masters, strict=True)):
        saved.pieces[name].append(Piece(0, _tensors(master, adam["state"], index, saved.steps)))


def _read_shard(
    content: dict[str, Any], groups: list[Sizes], rank: int, state: RunState, saved: Contents
) -> None:
    """Read a rank's part: a flat tensor for each group (ZeRO 1 and 2) or sub-group (ZeRO 3)."""
    scaler = content.get("loss_scaler")
    saved.loss_scale = {name: getattr(scaler, name, None) for name in zero.LOSS_SCALE}
    if state.zero_stage == 3:
        flats, adam = content["fp32_flat_groups"], content["optimizer_state_dict"]["state"]
    else:
        flats, adam = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]["state"]
    for index, (sizes, flat) in enumerate(zip(groups, flats, strict=True)):
        tensors = _tensors(flat, adam, index, saved.steps)
        if state.zero_stage == 3:
            found = partition_of_each(sizes, rank, state.world_size, tensors)
        else:
            # The plain optimizer does not save what pads the last partitions; BF16_Optimizer does, and saves no
            # "zero_stage".
            left_out = content["group_paddings"][index] if "zero_stage" in content else 0
            paddings = content.get("param_alignment_paddings", [[0] * len(sizes) for sizes in groups])[index]
            length, total = flat.numel() + left_out, sum(numel for _, numel in sizes) + sum(paddings)
            if length * state.world_size < total:
                raise CheckpointError(
                    f"{state.world_size} partitions of {length} elements do not hold the {total} of group {index}"
                )
            found = flat_partition(sizes, paddings, rank, length, tensors)
        for name, piece in found:
            saved.pieces[name].append(piece)


def _tensors(
    master: torch.Tensor, of_optimizer: dict[int, dict[str, Any]], index: int, steps: set[float]
) -> Tensors:
    """Return the flat float32 weight with the optimizer's state of number `index`, if there is any: before the first
    step there is none. Muon's has no count of steps."""
    if not of_optimizer:
        return {WEIGHT: master.view(-1)}
    state = of_optimizer[index]
    if zero.MOMENTUM[0] in state:
        return {WEIGHT: master.view(-1)} | {name: state[name].view(-1) for name in zero.MOMENTUM}
    steps.add(float(state["step"]))
    if "remainder" in state:
        weight, moments = stretches(master, state)
        return {WEIGHT: weight, **moments}
    return {WEIGHT: master.view(-1)} | {moment: state[moment].view(-1) for moment in MOMENTS}


def _shard(path: Path, rank: int) -> Path:
    """Return DeepSpeed's file of the optimizer of a rank. Its name begins with bf16_ for a run in bf16."""
    candidates = [path / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for kind in ("bf16_", "")]
    for file in candidates:
        if file.exists():
            return file
    raise CheckpointError(f"{candidates[0]} is missing, and so is {candidates[1].name}")


def model_file(path: Path, state: RunState) -> Path:
    """Return DeepSpeed's file of the model, with ZeRO 3 that of rank 0."""
    prefix = "zero_pp_rank_0_" if state.zero_stage == 3 else ""
    return path / f"{prefix}mp_rank_00_model_states.pt"


def load_shard(file: Path | str, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Load a .pt file of a checkpoint without executing code in it. All programs load checkpoints with this function.

    Raises CheckpointError: the file cannot be read, or has a type that neither torch allows nor zero.SHARD_TYPES has.
    """
    with named(Path(file)), torch.serialization.safe_globals(zero.SHARD_TYPES):
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)


@contextlib.contextmanager
def named(file: Path) -> Iterator[None]:
    """Raise errors of a file in the block as a CheckpointError that names it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        # torch's own message advises to allow the type; its first sentence names it
        reason = str(error.__context__ or error).partition(". ")[0]
        raise CheckpointError(
            f"{file} is refused: {reason}. A checkpoint of this program holds tensors and plain values; another type "
            "could execute code. Take a checkpoint from a source that you trust"
        ) from error
    except (
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
        EOFError,
    ) as error:
        raise CheckpointError(
            f"{file} does not hold what DeepSpeed 0.19.8 writes there: {error!r}"
        ) from error


# ---------------------------------------------------------------- FP8


def fp8_of_all_ranks(path: Path, world: int) -> dict[str, torch.Tensor]:
    """Return the FP8 state of the `world` ranks that wrote the checkpoint `path`. With delayed scaling they reduce
    their amaxes and so have the same, but for the first row of a history, where each gathers its own amaxes until the
    next reduction: that takes their maximum.

    Raises CheckpointError: the ranks have different states.
    """
    files = [path / rank_file(rank) for rank in range(world)]
    states = [load_shard(file)["fp8"] for file in files]
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
