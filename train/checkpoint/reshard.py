"""Load a checkpoint that was saved with another number of ranks or another ZeRO stage.

DeepSpeed partitions the float32 weights and the moments (two for AdamW, one for Muon) by ZeRO stage and number of
ranks. This module describes the partition of the files and that of the engine as pieces of each parameter (`Piece`) and
copies the overlapping elements. It copies in place, because CUDA graphs and Transformer Engine's FP8 copies rely on the
addresses of the weights. Files are memory-mapped, so the ranks of a node share their pages.

This module depends on the checkpoint files of DeepSpeed 0.19.8; train/engine/zero.py depends on its engine.
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
    """A contiguous range of elements of a flattened parameter.

    `tensors` holds 1-D tensors of equal length: the weight under WEIGHT, and the moments under their names
    (train/engine/zero.py).
    """

    start: int
    tensors: Tensors

    @property
    def end(self) -> int:
        return self.start + len(self.tensors[WEIGHT])


Pieces = dict[str, list[Piece]]  # by the parameter's name


@dataclass
class Contents:
    """The content of the files of a checkpoint."""

    pieces: Pieces
    steps: set[float]  # AdamW's step counts; empty before the first step
    loss_scale: dict[str, Any]
    counters: dict[str, int]  # of the engine


@torch.no_grad()
def load_resharded(engine: Any, path: Path, state: RunState) -> None:
    """Load the weights, optimizer state and counters of the checkpoint `path` into `engine`. Collective.

    The weights of the model are the float32 weights rounded to its dtype, as in training.

    Args:
        state: run state of the checkpoint.

    Raises: CheckpointError: a file is missing, unreadable or incomplete, or the checkpoint is of another model.
    """
    sizes = {zero.name_of(engine, p): zero.shape_of(p).numel() for p in engine.module.parameters()}
    # the order of parameters in an optimizer without ZeRO
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
    """Check that the checkpoint `path` holds exactly the parameters of `sizes`, all after the same number of steps.

    Args:
        sizes: number of elements by parameter name.

    Raises: CheckpointError: it does not."""
    if len(saved.steps) > 1:
        raise CheckpointError(f"{path}: AdamW's step count differs between parameters: {sorted(saved.steps)}")
    pieces = saved.pieces
    missing, unknown = sorted(sizes.keys() - pieces.keys()), sorted(pieces.keys() - sizes.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: missing parameters {missing}, unknown parameters {unknown}"
        )
    for name, found in pieces.items():
        ends = [0, *(piece.end for piece in found)]
        if [piece.start for piece in found] != ends[:-1] or ends[-1] != sizes[name]:
            stretches = ", ".join(f"{piece.start} to {piece.end}" for piece in found)
            raise CheckpointError(
                f"{path} does not hold all {sizes[name]} elements of {name}. Its shards hold {stretches}"
            )


# ---------------------------------------------------------------- partitions


def flat_partition(
    sizes: Sizes, paddings: list[int], rank: int, length: int, flats: Tensors
) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) for the partition of ZeRO 1 and 2.

    The parameters of a group are concatenated, with paddings[i] elements after the i-th. Rank r holds `length` elements
    from r * length on. Without ZeRO, each parameter is a group, with rank 0 and its whole length.
    """
    begin, position = rank * length, 0
    for (name, numel), padding in zip(sizes, paddings, strict=True):
        first, end = max(position, begin), min(position + numel, begin + length)
        if first < end:
            held = {what: flat.narrow(0, first - begin, end - first) for what, flat in flats.items()}
            yield name, Piece(first - position, held)
        position += numel + padding


def partition_of_each(sizes: Sizes, rank: int, world: int, flats: Tensors) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) for the partition of ZeRO 3.

    Each parameter is split into `world` parts of equal length, with padding at the end. Rank r holds the r-th part of
    each parameter; its parts are concatenated.
    """
    offset = 0
    for name, numel in sizes:
        part = math.ceil(numel / world)
        if (count := min(part, numel - rank * part)) > 0:
            held = {what: flat.narrow(0, offset, count) for what, flat in flats.items()}
            yield name, Piece(rank * part, held)
        offset += part


# ---------------------------------------------------------------- the engine


def _pieces_of_engine(engine: Any, steps: set[float]) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) for each part of a parameter that this rank holds.

    Args:
        steps: AdamW's step count, at most one; without it the pieces have no moments.
    """
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
                # on the device where the kernel of torch.optim.AdamW reads it
                device = master.tensor.device if zero.adamw_is_fused(engine) else "cpu"
                state["step"] = torch.tensor(next(iter(steps)), dtype=torch.float32, device=device)
        yield from pieces_of_master(engine, master, tensors)
        if packed:  # the caller has filled the tensors by now
            packed.put(master.tensor, tensors[WEIGHT], tensors, next(iter(steps), None))


def pieces_of_master(
    engine: Any, master: zero.Master, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) for each parameter in `master`.

    Args:
        tensors: 1-D tensors with the same partition as `master`.
    """
    rank, world, stage = dist.get_rank(), dist.get_world_size(), engine.zero_optimization_stage()
    sizes = [(zero.name_of(engine, p), zero.shape_of(p).numel()) for p in master.parameters]
    if stage == 3:
        yield from partition_of_each(sizes, rank, world, tensors)
    else:
        length = master.tensor.numel()
        yield from flat_partition(sizes, master.paddings, rank if stage else 0, length, tensors)


# ---------------------------------------------------------------- the files


def read(path: Path, state: RunState, names: list[str]) -> Contents:
    """Return the content of the files of the checkpoint `path`, memory-mapped.

    Args:
        state: run state of the checkpoint.
        names: names of the parameters in the order of an optimizer without ZeRO, whose file has no names.

    Raises: CheckpointError: a file is missing, unreadable or incomplete.
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
    """Return the float32 weights of a ZeRO 3 checkpoint by name; they are in the shards of the optimizer.

    Raises: CheckpointError: as `read` and `check`.
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
    """Read the optimizer state without ZeRO: of torch's optimizer, or of DeepSpeed's wrapper with float32 weights."""
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
    """Read the part of one rank: a flat tensor for each group (ZeRO 1 and 2) or sub-group (ZeRO 3)."""
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
            # DeepSpeedZeroOptimizer does not save the padding of the last partition. BF16_Optimizer does; its files
            # have no "zero_stage".
            left_out = content["group_paddings"][index] if "zero_stage" in content else 0
            paddings = content.get("param_alignment_paddings", [[0] * len(sizes) for sizes in groups])[index]
            length, total = flat.numel() + left_out, sum(numel for _, numel in sizes) + sum(paddings)
            if length * state.world_size < total:
                raise CheckpointError(
                    f"{state.world_size} partitions of {length} elements are too small for the {total} of group {index}"
                )
            found = flat_partition(sizes, paddings, rank, length, tensors)
        for name, piece in found:
            saved.pieces[name].append(piece)


def _tensors(
    master: torch.Tensor, of_optimizer: dict[int, dict[str, Any]], index: int, steps: set[float]
) -> Tensors:
    """Return the flat float32 weight and its moments.

    Before the first step there are no moments. Add AdamW's step count to `steps`; Muon has none.

    Args:
        master: float32 weight.
        of_optimizer: optimizer state by index.
        index: index of this weight.
    """
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
    """Return DeepSpeed's file with the optimizer state of a rank. For a run in bf16 its name begins with bf16_."""
    candidates = [path / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for kind in ("bf16_", "")]
    for file in candidates:
        if file.exists():
            return file
    raise CheckpointError(f"neither {candidates[0]} nor {candidates[1].name} exists")


def model_file(path: Path, state: RunState) -> Path:
    """Return DeepSpeed's file with the model; with ZeRO 3, that of rank 0."""
    prefix = "zero_pp_rank_0_" if state.zero_stage == 3 else ""
    return path / f"{prefix}mp_rank_00_model_states.pt"


def load_shard(file: Path | str, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Load a .pt file of a checkpoint without executing code in it. All programs load checkpoints with this function.

    Raises: CheckpointError: the file cannot be read, or contains a type that neither torch nor zero.SHARD_TYPES allows.
    """
    with named(Path(file)), torch.serialization.safe_globals(zero.SHARD_TYPES):
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)


@contextlib.contextmanager
def named(file: Path) -> Iterator[None]:
    """Convert errors in the block to a CheckpointError that names `file`."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        # torch's message advises to allow the type; use only its first sentence, which names the type
        reason = str(error.__context__ or error).partition(". ")[0]
        raise CheckpointError(
            f"{file} is refused: {reason}. Checkpoints of this program contain only tensors and plain values; other "
            "types could execute code. Use a checkpoint from a source that you trust"
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
        raise CheckpointError(f"{file} does not have the format of DeepSpeed 0.19.8: {error!r}") from error


# ---------------------------------------------------------------- FP8


def fp8_of_all_ranks(path: Path, world: int) -> dict[str, torch.Tensor]:
    """Merge the FP8 states of the `world` ranks that wrote the checkpoint `path`.

    With delayed scaling the ranks reduce their amaxes, so their states are equal, except for the first row of each
    history. There each rank collects its own amaxes until the next reduction; the merged row is their maximum.

    Raises: CheckpointError: the ranks have different states.
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
                    f"{file} and {files[0]} differ in {key}. Either each rank used its own amaxes "
                    f"(precision.reduce_amax false), or one file is wrong. Resume from {path.name} with {world} ranks"
                )
    histories = [key for key in first if key.endswith(".amax_history")]
    return first | {key: torch.stack([state[key] for state in states]).amax(0) for key in histories}
