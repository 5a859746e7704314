"""Load a checkpoint that was saved with a different number of ranks or ZeRO stage.

DeepSpeed partitions the float32 weights and the optimizer moments (two for AdamW, one for Muon) according to the ZeRO
stage and the number of ranks. This module describes the partitions in the files and in the engine as contiguous pieces
of each parameter (`Piece`), and copies the overlapping elements. The elements are copied in place, because CUDA graphs
and Transformer Engine's FP8 weights depend on the addresses of the weights. Files are memory-mapped, so all ranks on a
node share the same memory pages.

This module depends on the checkpoint format of DeepSpeed 0.19.8, and train/engine/zero.py depends on its engine.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.files import CheckpointError, RunState, rank_file
from train.config.arguments import LrScales
from train.engine import zero
from train.engine.optimizer import parameter_groups
from train.engine.packed_adamw import MOMENTS, DecodedSlice, PackedAdamW, decoded_slices

WEIGHT = "float32 weight"

Tensors = dict[str, torch.Tensor] | dict[str, DecodedSlice]  # the weight and its moments, by name
Sizes = list[tuple[str, int]]  # parameter name and number of elements, in the order of a flat tensor


@dataclass
class Piece:
    """A contiguous range of elements in a flattened parameter.

    Attributes:
        start: index of the first element in the flattened parameter.
        tensors: 1-D tensors of equal length: the float32 weight (key: WEIGHT) and the optimizer moments (keys: MOMENTS
            for AdamW, MOMENTUM for Muon).
    """

    start: int
    tensors: Tensors

    @property
    def end(self) -> int:
        return self.start + len(self.tensors[WEIGHT])


Pieces = dict[str, list[Piece]]  # by parameter name


@dataclass
class Contents:
    """Weights, optimizer state and counters read from the files in a checkpoint."""

    pieces: Pieces
    step: float | None = None  # AdamW's step count, or None before the first step
    counters: dict[str, int] = field(default_factory=dict)  # step and sample counters of the DeepSpeed engine


@torch.no_grad()
def load_resharded(engine: Any, path: Path, state: RunState) -> None:
    """Load weights, optimizer state and counters from a checkpoint into `engine`.

    Collective: all ranks must call this function.

    The model weights are set to the float32 weights rounded to the dtype of the model, as in training. The fp16 loss
    scale is reset.

    Args:
        path: the checkpoint.
        state: run state read from the checkpoint.

    Raises:
        CheckpointError: if a file is missing, unreadable or incomplete, or the checkpoint belongs to another model.
    """
    # order of the parameters in the optimizer state without ZeRO
    optim = state.train_config.get("optim", "adamw")
    scales = LrScales(**state.train_config.get("lr_scales", {}))
    groups = parameter_groups(engine.module, 0.0, optim, scales)
    ordered = [zero.parameter_name(engine, p) for group in groups for p in group["params"]]
    saved = read(path, state, ordered)
    check(
        saved,
        {zero.parameter_name(engine, p): zero.full_shape(p).numel() for p in engine.module.parameters()},
        path,
    )
    if saved.step is None:
        zero.base_optimizer(engine).state.clear()
    with zero.edit_masters(engine):
        for name, piece in _engine_pieces(engine, saved.step):
            for old in saved.pieces[name]:
                first, end = max(piece.start, old.start), min(piece.end, old.end)
                if first < end:
                    for what, tensor in piece.tensors.items():
                        found = old.tensors[what][first - old.start : end - old.start]
                        tensor[first - piece.start : end - piece.start].copy_(found)
    vars(engine).update(saved.counters)


def check(saved: Contents, sizes: dict[str, int], path: Path) -> None:
    """Check that a checkpoint contains exactly the parameters of the model.

    Args:
        saved: content of the checkpoint.
        sizes: number of elements of each model parameter, by name.
        path: the checkpoint, for the error message.

    Raises:
        CheckpointError: if the parameters or their sizes differ.
    """
    held = {name: sum(piece.end - piece.start for piece in found) for name, found in saved.pieces.items()}
    if wrong := [name for name in sorted(held.keys() | sizes.keys()) if held.get(name) != sizes.get(name)]:
        name = wrong[0]
        raise CheckpointError(
            f"{path} was saved from a different model: {len(wrong)} parameters differ. For example, {name} has "
            f"{held.get(name, 0)} elements in the checkpoint and {sizes.get(name, 0)} in the model. Choose a "
            "checkpoint of the configured model"
        )


# ---------------------------------------------------------------- partitions


def zero12_partition(
    sizes: Sizes, paddings: list[int], rank: int, length: int, flats: Tensors
) -> Iterator[tuple[str, Piece]]:
    """Yield the parameter pieces that a rank stores with ZeRO 1 or 2.

    DeepSpeed concatenates the parameters of a group, with `paddings[i]` padding elements after parameter i. Rank r
    stores `length` elements of the result, starting at element r * length. Without ZeRO, call this function separately
    for each parameter, with `rank` 0 and the number of its elements as `length`.

    Args:
        flats: 1-D tensors stored by the rank: the weights and their moments, by name.

    Yields:
        (parameter name, piece).
    """
    begin, position = rank * length, 0
    for (name, numel), padding in zip(sizes, paddings, strict=True):
        first, end = max(position, begin), min(position + numel, begin + length)
        if first < end:
            held = {what: flat.narrow(0, first - begin, end - first) for what, flat in flats.items()}
            yield name, Piece(first - position, held)
        position += numel + padding


def zero3_partition(sizes: Sizes, rank: int, world: int, flats: Tensors) -> Iterator[tuple[str, Piece]]:
    """Yield the parameter pieces that a rank stores with ZeRO 3.

    DeepSpeed splits each parameter into `world` parts of equal length, with padding at the end. Rank r stores part r of
    each parameter. The parts are concatenated.

    Args:
        flats: 1-D tensors stored by the rank: the weights and their moments, by name.

    Yields:
        (parameter name, piece).
    """
    offset = 0
    for name, numel in sizes:
        part = math.ceil(numel / world)
        if (count := min(part, numel - rank * part)) > 0:
            held = {what: flat.narrow(0, offset, count) for what, flat in flats.items()}
            yield name, Piece(rank * part, held)
        offset += part


# ---------------------------------------------------------------- the engine


def _engine_pieces(engine: Any, step: float | None) -> Iterator[tuple[str, Piece]]:
    """Yield the parameter pieces that the engine stores on this rank.

    Args:
        step: AdamW's step count. If None, the pieces contain no moments.

    Yields:
        (parameter name, piece).
    """
    optimizer = zero.base_optimizer(engine)
    for master in zero.masters(engine):
        if isinstance(optimizer, PackedAdamW):
            kinds = (WEIGHT,) if step is None else (WEIGHT, *MOMENTS)
            tensors = {what: torch.zeros(master.tensor.numel()) for what in kinds}
            yield from master_pieces(engine, master, tensors)
            # the caller has filled the tensors before it requests the next piece
            optimizer.set_weight(master.tensor, tensors[WEIGHT], tensors, step)
            continue
        tensors = {WEIGHT: master.tensor.data.view(-1)}
        if step is not None:
            state = optimizer.state[master.tensor]
            for moment in master.moments:
                if moment not in state:
                    state[moment] = torch.zeros_like(master.tensor.data)
                tensors[moment] = state[moment].view(-1)
            if master.moments == MOMENTS:
                # the fused AdamW kernel reads the step count on the GPU, other kernels on the CPU
                device = master.tensor.device if zero.adamw_is_fused(engine) else "cpu"
                state["step"] = torch.tensor(step, dtype=torch.float32, device=device)
        yield from master_pieces(engine, master, tensors)


def master_pieces(
    engine: Any, master: zero.Master, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Piece]]:
    """Split this rank's optimizer tensors into pieces that each belong to one model parameter.

    Args:
        master: describes which model parameters the tensors contain, and in which order.
        tensors: the float32 weights and the moments, as 1-D tensors of the same length as `master.tensor`.

    Yields:
        (parameter name, piece).
    """
    rank, world, stage = dist.get_rank(), dist.get_world_size(), engine.zero_optimization_stage()
    sizes = [(zero.parameter_name(engine, p), zero.full_shape(p).numel()) for p in master.parameters]
    if stage == 3:
        yield from zero3_partition(sizes, rank, world, tensors)
    else:
        length = master.tensor.numel()
        yield from zero12_partition(sizes, master.paddings, rank if stage else 0, length, tensors)


# ---------------------------------------------------------------- the files


def read(path: Path, state: RunState, names: list[str]) -> Contents:
    """Read weights, optimizer state and counters from a checkpoint. The tensors are memory-mapped.

    Args:
        path: the checkpoint.
        state: run state read from the checkpoint.
        names: parameter names in the order of the optimizer state without ZeRO, which does not contain names.

    Raises:
        CheckpointError: if a file is missing, unreadable or incomplete.
    """
    file = model_file(path, state)
    saved = Contents(defaultdict(list))
    with convert_load_errors(path):
        model = load_shard(model_file(path, state), mmap=True)
        saved.counters = {name: model[name] for name in ("global_steps", "global_samples", "skipped_steps")}
        if state.zero_stage == 0:
            _read_whole(model, names, saved)
            return saved
        groups = [[(n, math.prod(shape)) for n, shape in group.items()] for group in model["param_shapes"]]
        for rank in range(state.world_size):
            # the file name begins with bf16_ if the run trained in bf16
            (file,) = path.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            _read_shard(load_shard(file, mmap=True)["optimizer_state_dict"], groups, rank, state, saved)
    return saved


def read_partitioned_weights(path: Path, state: RunState) -> dict[str, torch.Tensor]:
    """Return the float32 weights of a ZeRO 3 checkpoint by parameter name, read from the optimizer files of all ranks.

    Raises:
        CheckpointError: if a file is missing, unreadable or incomplete.
    """
    model, pieces = load_shard(model_file(path, state)), read(path, state, []).pieces
    weights = {
        name: torch.cat([piece.tensors[WEIGHT] for piece in pieces[name]]).view(shape)  # type: ignore[misc]
        for group in model["param_shapes"]
        for name, shape in group.items()
    }
    return weights | {name: weights[other] for name, other in dict(model["shared_params"]).items()}


def _read_whole(model: dict[str, Any], names: list[str], saved: Contents) -> None:
    """Read the optimizer state of a checkpoint that was saved without ZeRO.

    The state was written by a torch optimizer, or by DeepSpeed's optimizer wrapper with float32 weights.
    """
    optimizer = model["optimizer"]
    weights = [[model["module"][name] for name in names]]
    masters = itertools.chain(*optimizer.get("fp32_groups", weights))
    adam = optimizer.get("optimizer_state_dict", optimizer)
    for index, (name, master) in enumerate(zip(names, masters, strict=True)):
        saved.pieces[name].append(Piece(0, _tensors(master, adam["state"], index, saved)))


def _read_shard(
    content: dict[str, Any], groups: list[Sizes], rank: int, state: RunState, saved: Contents
) -> None:
    """Read the optimizer state of one rank.

    The state contains a flat tensor for each parameter group (ZeRO 1 and 2) or parameter sub-group (ZeRO 3).
    """
    if state.zero_stage == 3:
        flats, adam = content["fp32_flat_groups"], content["optimizer_state_dict"]["state"]
    else:
        flats, adam = content["single_partition_of_fp32_groups"], content["base_optimizer_state"]["state"]
    for index, (sizes, flat) in enumerate(zip(groups, flats, strict=True)):
        tensors = _tensors(flat, adam, index, saved)
        if state.zero_stage == 3:
            found = zero3_partition(sizes, rank, state.world_size, tensors)
        else:
            # DeepSpeedZeroOptimizer does not save the padding of the last partition. BF16_Optimizer saves this
            # padding, and its files have no key "zero_stage".
            padding = content["group_paddings"][index] if "zero_stage" in content else 0
            paddings = content.get("param_alignment_paddings", [[0] * len(sizes) for sizes in groups])[index]
            found = zero12_partition(sizes, paddings, rank, flat.numel() + padding, tensors)
        for name, piece in found:
            saved.pieces[name].append(piece)


def _tensors(
    master: torch.Tensor, of_optimizer: dict[int, dict[str, Any]], index: int, saved: Contents
) -> Tensors:
    """Return a flat float32 weight and its optimizer moments, by name.

    There are no moments before the first step. AdamW's step count is stored in `saved`. Muon has no step count.

    Args:
        master: float32 weight.
        of_optimizer: optimizer state of each weight, by index.
        index: index of this weight in the optimizer state.
    """
    if not of_optimizer:
        return {WEIGHT: master.view(-1)}
    state = of_optimizer[index]
    if "remainder" in state:
        weight, moments = decoded_slices(master, state)
    else:
        names = zero.MOMENTUM if zero.MOMENTUM[0] in state else MOMENTS
        weight, moments = master.view(-1), {name: state[name].view(-1) for name in names}
    if zero.MOMENTUM[0] not in state:
        saved.step = float(state["step"])
    return {WEIGHT: weight, **moments}


def model_file(path: Path, state: RunState) -> Path:
    """Return the path of DeepSpeed's model file in a checkpoint. With ZeRO 3, the file of rank 0 is returned."""
    prefix = "zero_pp_rank_0_" if state.zero_stage == 3 else ""
    return path / f"{prefix}mp_rank_00_model_states.pt"


def load_shard(file: Path | str, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Load a .pt file from a checkpoint without executing code in the file.

    All commands load checkpoints with this function.

    Raises:
        CheckpointError: if the file cannot be read, or contains a type that neither torch nor zero.SHARD_TYPES allows.
    """
    with convert_load_errors(Path(file)), torch.serialization.safe_globals(zero.SHARD_TYPES):
        return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap)


@contextlib.contextmanager
def convert_load_errors(file: Path) -> Iterator[None]:
    """Convert exceptions in a `with` block to a CheckpointError that contains the path `file`."""
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # use only the first sentence of torch's message; the rest advises users to allow the type
        reason = str(error.__context__ or error).partition(". ")[0]
        raise CheckpointError(
            f"{file} was not loaded: {reason}. A checkpoint may contain only tensors and plain values, because "
            "loading other types can execute code. Use a checkpoint from a source that you trust"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read ({error!r}). The file is damaged or not in the format of DeepSpeed 0.19.8. Choose "
            "another checkpoint"
        ) from error


# ---------------------------------------------------------------- FP8


def merge_fp8_states(path: Path, world: int) -> dict[str, torch.Tensor]:
    """Merge the FP8 states that the ranks saved in a checkpoint, and return one state in the same format.

    With delayed scaling, the ranks reduce their amax values. Their FP8 states are therefore equal, except for the first
    row of each amax history: each rank collects its own values in this row until the next reduction. The merged row is
    the maximum over the ranks.

    Args:
        path: the checkpoint.
        world: number of ranks that saved the checkpoint.

    Raises:
        CheckpointError: if the FP8 states differ in other values.
    """
    states, merged = [load_shard(path / rank_file(rank))["fp8"] for rank in range(world)], {}
    for key, first in states[0].items():
        tensors, is_history = torch.stack([state[key] for state in states]), key.endswith(".amax_history")
        reduced = tensors[:, 1:] if is_history else tensors
        if not torch.equal(reduced, reduced[:1].expand_as(reduced)):
            raise CheckpointError(
                f"{path} cannot be resharded, because it was saved with precision.reduce_amax false and the FP8 states "
                f"of the ranks differ, for example in {key}. Resume with {world} ranks"
            )
        merged[key] = tensors.amax(0) if is_history else first
    return merged
