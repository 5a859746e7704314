"""Access private attributes of DeepSpeed 0.19.8 and work around its bugs.

Before an update of DeepSpeed, check this file, weight_gather.py, optimizer.py, process_group.py,
train/monitor/watchdog.py and train/checkpoint/reshard.py, which reads DeepSpeed's checkpoint files. Before an update of
torch, check `_coalescing_manager`. The tensors that AdamW or Muon updates (`masters`) depend on DeepSpeed's optimizer
wrapper:

    ZeRO  optimizer wrapper                           tensors that are updated
    0     none (float32)                              the weights
    0     FP16_UnfusedOptimizer (bf16)                a float32 copy of each weight
    1     BF16_Optimizer (float32 accumulation)       this rank's part of each parameter group, flat; after
                                                      `pack_states`, the bf16 weights themselves
    1, 2  DeepSpeedZeroOptimizer                      this rank's part of each parameter group, flat, in its own order
    3     DeepSpeedZeroOptimizer_Stage3               this rank's part of each parameter of a sub-group, flat

Sources in DeepSpeed: runtime/engine.py, bf16_optimizer.py, fp16/unfused_optimizer.py, zero/stage_1_and_2.py,
zero/stage3.py, zero/muon/.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import (
    AllGatherHandle,
    MultipleAllGatherHandles,
    ZeroParamStatus,
)
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from train.engine.packed_adamw import MOMENTS, PackedAdamW


def enum_member(enum: type[Enum], name: str) -> Enum:
    """Return the member `name` of an enum. This function replaces getattr when pickled enum members are loaded.

    Early releases of Python 3.11, such as 3.11.2 of Debian 12, pickle a member as a call of getattr, which is not safe
    to allow when loading a file.
    """
    return enum[name]


# Types in DeepSpeed's files that torch.load does not allow by default (DeepSpeed #8500). They are safe to load, because
# their constructors run no other code.
SHARD_TYPES = [
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    (enum_member, "builtins.getattr"),
]

# ---------------------------------------------------------------- parameters and optimizer tensors


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO 3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def parameter_name(engine: Any, parameter: nn.Parameter) -> str:
    """Return the name of a parameter in the engine's model."""
    return engine.param_names[parameter]


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the engine's optimizer (AdamW, or Muon with AdamW) without DeepSpeed's wrapper."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def adamw_is_fused(engine: Any) -> bool:
    """Return whether the engine uses the fused AdamW kernel, which reads the step count on the GPU."""
    return bool(
        getattr(base_optimizer(engine), "aux_optimizer", base_optimizer(engine)).defaults.get("fused")
    )


# Names of Muon's state tensors. AdamW's are MOMENTS.
MOMENTUM: tuple[str, ...] = ("momentum_buffer",)


@dataclass
class Master:
    """A tensor that AdamW or Muon updates, and the model parameters that it represents.

    The moments are in `base_optimizer(engine).state[tensor]`. Without ZeRO, the tensor has the shape of its single
    parameter. With ZeRO, the tensor is 1-D and contains this rank's part of `parameters`. See `zero12_partition` (ZeRO
    1 and 2) and `zero3_partition` (ZeRO 3) in train/checkpoint/reshard.py.
    """

    tensor: torch.Tensor
    parameters: list[nn.Parameter]
    paddings: list[int]  # padding elements after each parameter; ZeRO 1 and 2
    moments: tuple[str, ...]  # MOMENTS or MOMENTUM


def masters(engine: Any) -> Iterator[Master]:
    """Yield the tensors that the optimizer of this rank updates, in the order of the optimizer."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    paddings = None
    if stage == 3:
        groups, tensors = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
    elif hasattr(optimizer, "bf16_groups"):
        groups, tensors = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    elif stage:
        groups, tensors = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        paddings = optimizer.round_robin_bit16_padding
    else:
        weights = getattr(optimizer, "fp16_groups", None) or [g["params"] for g in optimizer.param_groups]
        groups = [[weight] for weight in itertools.chain(*weights)]
        tensors = list(itertools.chain(*getattr(optimizer, "fp32_groups", weights)))
    base_groups = base_optimizer(engine).param_groups
    if stage == 3:  # the groups of the optimizer do not list their tensors
        own_groups = [base_groups[optimizer.sub_group_to_group_id[index]] for index in range(len(tensors))]
        muons = {
            id(tensor) for tensor, group in zip(tensors, own_groups, strict=True) if group.get("use_muon")
        }
    else:
        muons = {id(tensor) for group in base_groups if group.get("use_muon") for tensor in group["params"]}
    for index, (group, tensor) in enumerate(zip(groups, tensors, strict=True)):
        padding = paddings[index] if paddings else [0] * len(group)
        yield Master(tensor, list(group), padding, MOMENTUM if id(tensor) in muons else MOMENTS)


@contextlib.contextmanager
def edit_masters(engine: Any) -> Iterator[None]:
    """Allow edits to the optimizer's master weights (`masters`) inside a `with` block.

    Collective: all ranks must enter the block. On exit, the master weights are rounded and copied into the model
    weights.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    yield
    if stage == 3:
        for index, (weights, master) in enumerate(
            zip(optimizer.fp16_partitioned_groups_flat, masters(engine), strict=True)
        ):
            weights.data.copy_(master.tensor.data)
            optimizer._unflatten_partitioned_parameters(index)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer.update_lp_params()
    elif base_optimizer(engine) is not optimizer:
        for master in masters(engine):
            master.parameters[0].data.copy_(master.tensor)


@contextlib.contextmanager
def preserve_settings(engine: Any) -> Iterator[None]:
    """Keep the engine's optimizer settings when DeepSpeed loads a checkpoint in a `with` block.

    Without this function, DeepSpeed replaces the optimizer settings, the clipping norm and the choice of the AdamW
    kernel with the values in the checkpoint. A checkpoint written on a GPU would then select the wrong kernel on a CPU,
    and vice versa.
    """
    keys = {"lr", "betas", "eps", "weight_decay", "momentum", "fused", "foreach"}
    optimizer = base_optimizer(engine)
    settings = [{key: group[key] for key in keys & group.keys()} for group in optimizer.param_groups]
    is_fused = any(group.get("fused") for group in settings)
    clipping = getattr(engine.optimizer, "clip_grad", None)
    yield
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for weight, state in optimizer.state.items():  # with ZeRO 3, the groups do not list their weights
        if "step" in state:  # the kernel reads the step on this device
            state["step"] = state["step"].to(weight.device if is_fused else "cpu")
    if clipping is not None:
        engine.optimizer.clip_grad = clipping


def replace_loader(engine: Any, load: Callable[..., Any]) -> None:
    """Make DeepSpeed load checkpoint files with `load(path, map_location)`.

    DeepSpeed itself calls torch.load in a way that can execute code contained in the files (DeepSpeed #6751).
    """
    engine.checkpoint_engine.load = load


def unlink_moments(engine: Any) -> None:
    """Drop DeepSpeed's references from weights to optimizer moments after loading a checkpoint.

    The references would keep the replaced moments in memory. The next step creates new references.
    """
    engine.optimizer._hp_optimizer_states_linked = False


def release_module(engine: Any) -> None:
    """Drop DeepSpeed's references to the model of a destroyed engine, so that the memory of the model can be freed.

    ZeRO 3 keeps the model on a global stack of modules, and its submodules in the cache of a method.
    """
    stack, coordinator = parameter_offload.FWD_MODULE_STACK, parameter_offload.PartitionedParameterCoordinator
    stack[:] = [module for module in stack if module is not engine.module]
    for cell in coordinator._PartitionedParameterCoordinator__params_to_release.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def undo_initial_step(engine: Any) -> None:
    """Undo the step that DeepSpeed runs to allocate the optimizer state (DeepSpeed #5151, #5104).

    Without ZeRO, in bf16, DeepSpeed allocates AdamW's state by running a step with zero gradients. That step decays the
    weights and advances the bias correction, so the first real step would be too small (by 27 % with the default
    adam_beta1 of 0.9 and adam_beta2 of 0.95).
    """
    if engine.zero_optimization_stage() or base_optimizer(engine) is engine.optimizer:
        return  # with ZeRO or in float32 there is no such step
    base_optimizer(engine).state.clear()
    with torch.no_grad():
        for master in masters(engine):
            master.tensor.copy_(master.parameters[0])


def pack_states(engine: Any, moments: str) -> None:
    """Make DeepSpeed's BF16_Optimizer use PackedAdamW (train/engine/packed_adamw.py). Call this on a new engine.

    The optimizer then stores only the 16 bits of each float32 weight that the bf16 weight lacks.

    Args:
        moments: Storage type of the moments.
    """
    optimizer, plain = engine.optimizer, base_optimizer(engine)
    groups = []
    for index, group in enumerate(plain.param_groups):
        rank = dist.get_rank(group=optimizer.real_dp_process_group[index])
        weight = optimizer.bf16_partitioned_groups[index][rank].detach()
        groups.append({**group, "params": [weight]})
        optimizer.fp32_groups_flat_partition[index] = weight
        group["params"] = []  # frees the float32 weights
    gradients = optimizer.fp32_groups_gradient_flat_partition
    # otherwise a step would copy these gradients to `.grad` of the weights, in bf16
    optimizer.fp32_groups_gradient_flat_partition = []
    packed = PackedAdamW(groups, gradients, moments)
    optimizer.optimizer = engine.basic_optimizer = engine.client_optimizer = packed
    optimizer._link_all_hp_params()
    whole_state = optimizer.state_dict

    def state_dict() -> dict[str, Any]:
        # clone, because each part is a view, and torch.save would write its whole storage
        parts = [weight.clone() for weight in optimizer.fp32_groups_flat_partition]
        return whole_state() | {"single_partition_of_fp32_groups": parts}

    optimizer.state_dict = state_dict


# ---------------------------------------------------------------- a step

UNFINISHED_REDUCTIONS = 4  # buckets that may be unfinished when the host continues after a backward pass
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class MatrixPart:
    """This rank's part of a Muon matrix with ZeRO 2 or 3.

    Attributes:
        parameter: the whole matrix.
        flat: the 1-D tensor that stores this rank's part (see `Master`).
        of_flat: the range of this part in `flat`. Empty if this rank stores no part.
        sizes: number of elements that each rank stores. Ranks store consecutive parts.
        owner: the rank that computes the update of the matrix. It stores a largest part.
    """

    parameter: nn.Parameter
    flat: torch.Tensor
    of_flat: slice
    sizes: list[int]
    owner: int

    @property
    def is_split(self) -> bool:
        """Whether several ranks store parts of the matrix."""
        return max(self.sizes) < sum(self.sizes)


def matrix_parts(engine: Any) -> list[MatrixPart]:
    """Return this rank's parts of all Muon matrices with ZeRO 2 or 3, in the same order on all ranks.

    See `zero12_partition` and `zero3_partition` in train/checkpoint/reshard.py.
    """
    parts: list[MatrixPart] = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for master in masters(engine):
        if master.moments != MOMENTUM:
            continue
        position = 0  # of a parameter in its group (ZeRO 2) or in the flat tensor (ZeRO 3)
        for parameter, padding in zip(master.parameters, master.paddings, strict=True):
            size = full_shape(parameter).numel()
            if engine.zero_optimization_stage() == 3:
                length = parameter.ds_tensor.ds_numel
                bounds, first, advance = [r * length for r in range(ranks + 1)], position, length
            else:
                length = master.tensor.numel()
                bounds = [r * length - position for r in range(ranks + 1)]
                first, advance = max(-bounds[rank], 0), size + padding
            cuts = [min(max(bound, 0), size) for bound in bounds]
            sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
            owners = [r for r in range(ranks) if sizes[r] == max(sizes)]
            owner = owners[len(parts) % len(owners)]
            parts.append(
                MatrixPart(parameter, master.tensor, slice(first, first + sizes[rank]), sizes, owner)
            )
            position += advance
    return parts


def gather_together(
    parameters: list[Any], parts: list[torch.Tensor], gathered: list[torch.Tensor]
) -> MultipleAllGatherHandles:
    """Start gathering ZeRO 3 parameters in one communication call, each into memory of its own.

    DeepSpeed's function gathers several parameters into one buffer, and then copies each part to its place.

    Args:
        parameters: The parameters, in the same order on all ranks.
        parts: This rank's part of each parameter, 1-D.
        gathered: Memory for the parts of all ranks, for each parameter, 1-D.

    Returns:
        The handle that DeepSpeed waits for before it uses the parameters.
    """
    group = parameters[0].ds_process_group
    with dist._coalescing_manager(group, async_ops=True) as work:
        for part, whole in zip(parts, gathered, strict=True):
            dist.all_gather_into_tensor(whole, part, group=group)
    for parameter in parameters:
        parameter.ds_status = ZeroParamStatus.INFLIGHT
    return MultipleAllGatherHandles([AllGatherHandle(work, parameter) for parameter in parameters])


def communicate_in_place(engine: Any) -> None:
    """Make ZeRO 3 gather weights and reduce gradients without copies. Call this on a new engine.

    DeepSpeed copies gathered weights out of a buffer and gradients into buffers, and divides the gradients in a
    separate pass. Here, gradients are averaged in their own memory, still about `reduce_bucket_size` elements in one
    call. `contiguous_gradients` and `reduce_scatter` have no effect. With one rank, nothing changes.
    """
    optimizer, ranks = engine.optimizer, dist.get_world_size()
    if engine.zero_optimization_stage() != 3 or ranks == 1:
        return

    def gather(parameters: Iterable[Any], **_: Any) -> MultipleAllGatherHandles:
        ordered = sorted(parameters, key=lambda parameter: parameter.ds_id)
        parts = [parameter.ds_tensor.data for parameter in ordered]
        gathered = [part.new_empty(part.numel() * ranks) for part in parts]
        handle = gather_together(ordered, parts, gathered)
        for parameter, whole in zip(ordered, gathered, strict=True):
            parameter.data = whole[: parameter.ds_numel].view(parameter.ds_shape)
        return handle

    for parameter in engine.module.parameters():
        parameter.all_gather_coalesced = gather

    # NCCL multiplies by 1 / ranks, rounded to the data type, which is exact only for powers of two
    mean_is_exact = ranks & (ranks - 1) == 0

    def reduce_scatter_mean(parameters: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
        gradients = []
        for parameter in parameters:
            if parameter.grad.is_cuda:  # another stream allocated it, and DeepSpeed frees it
                parameter.grad.record_stream(torch.cuda.current_stream())
            gradient = parameter.grad.to(dtype).view(-1)
            padding = -gradient.numel() % ranks
            gradients.append(nn.functional.pad(gradient, (0, padding)) if padding else gradient)
        if not mean_is_exact:
            torch._foreach_div_(gradients, ranks)
        operation = dist.ReduceOp.AVG if mean_is_exact else dist.ReduceOp.SUM
        group = parameters[0].ds_process_group
        parts = [gradient.chunk(ranks)[dist.get_rank(group)] for gradient in gradients]
        with dist._coalescing_manager(group):
            for part, gradient in zip(parts, gradients, strict=True):
                dist.reduce_scatter_tensor(part, gradient, op=operation, group=group)
        # By default, DeepSpeed converts gradients to float32 in a separate pass before it adds them to the float32
        # sums. With their own type, nothing is converted, and the sums are the same.
        optimizer.gradient_accumulation_dtype = dtype
        return parts

    optimizer._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = reduce_scatter_mean
    optimizer.contiguous_gradients = False
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer = None
    # The host waits when more bucket reductions, or gathers of parameters, than this are unfinished.
    optimizer.max_param_reduce_events = 8
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = 8
    if torch.cuda.is_available():
        order_streams(optimizer)


def order_streams(optimizer: Any) -> None:
    """Make the streams of ZeRO 3 wait for each other where DeepSpeed's host waits, or where nothing waits.

    - Gathers wait for changes of the weights: optimizer steps and loaded checkpoints. DeepSpeed orders them only if it
      keeps some parameters on all ranks (`stage3_param_persistence_threshold`).
    - After a backward pass, the compute stream waits for the reductions. DeepSpeed's host waits instead, and the GPU is
      then idle until the next kernels arrive. At most UNFINISHED_REDUCTIONS buckets stay unfinished, because each keeps
      its gradients in memory.
    """
    gathers = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
    reductions, events = optimizer.reduce_and_partition_stream, optimizer.param_reduce_events

    def wait_after(change: Callable[..., None]) -> Callable[..., None]:
        def change_weights(*arguments: Any) -> None:
            change(*arguments)
            gathers.wait_stream(torch.cuda.current_stream())

        return change_weights

    def synchronize() -> None:
        while len(events) > UNFINISHED_REDUCTIONS:
            events.popleft().synchronize()
        torch.cuda.current_stream().wait_stream(reductions)

    optimizer._post_step = wait_after(optimizer._post_step)
    optimizer.checkpoint_event_epilogue = wait_after(optimizer.checkpoint_event_epilogue)
    if not optimizer.offload_optimizer:  # it copies gradients to host memory
        reductions.synchronize = synchronize


def muon_matrices(engine: Any) -> list[nn.Parameter]:
    """Return the parameters for which this rank calls DeepSpeed's `muon_update` in a step, in the order of the calls.

    With ZeRO, this rank calls `muon_update` only for some of the matrices. Without ZeRO, Muon calls it for all.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() > 1:
        return [part.parameter for part in matrix_parts(engine) if part.owner == dist.get_rank()]
    if not hasattr(optimizer, "bf16_groups"):
        return [master.parameters[0] for master in masters(engine) if master.moments == MOMENTUM]
    layouts = zip(optimizer.bf16_groups, optimizer._muon_exchange_layouts, strict=True)
    return [group[index] for group, layout in layouts if layout for index, *_ in layout["local_matrices"]]


@contextlib.contextmanager
def intercept_optimizer_step(engine: Any, take: Callable[[Master, torch.Tensor], None]) -> Iterator[None]:
    """Intercept each optimizer step during a `with` block, just before the optimizer updates the weights.

    Weights, moments and counters stay unchanged.

    Args:
        take: Function that is called with each tensor that the optimizer would update, and the gradient of the tensor.
            The gradient is reduced and clipped. With Muon, it is not orthogonalized yet.
    """
    wrapper, optimizer = engine.optimizer, base_optimizer(engine)
    updated = list(masters(engine))
    scalers = [getattr(wrapper, name, None) for name in ("loss_scaler", "loss_scale_config")]
    holders = [
        (engine, COUNTERS),
        (wrapper, ("_hp_optimizer_states_linked",)),
        *((scaler, LOSS_SCALE) for scaler in scalers),
    ]
    counters = [(h, name, getattr(h, name)) for h, names in holders for name in names if hasattr(h, name)]

    def take_gradients(
        *_: Any,
    ) -> None:  # DeepSpeed may step one group at a time, and sets only its gradients
        # offloaded tensors keep their gradients
        stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for master in updated:
            gradient = master.tensor.grad if id(master.tensor) in stepped else None
            if isinstance(optimizer, PackedAdamW):
                gradient = optimizer.gradients[master.tensor]
            if gradient is not None:
                take(master, gradient)

    with contextlib.ExitStack() as replaced:
        # skip_non_finite_steps keeps the original step in step_if_finite; replace it inside that check
        step = "step_if_finite" if hasattr(optimizer, "step_if_finite") else "step"
        replaced.enter_context(mock.patch.object(optimizer, step, take_gradients))
        if hasattr(wrapper, "_prepare_muon_updates"):
            replaced.enter_context(mock.patch.object(wrapper, "_prepare_muon_updates"))
        yield
    for holder, name, value in counters:
        setattr(holder, name, value)
    for tensor in [tensor for tensor, state in optimizer.state.items() if not state]:
        del optimizer.state[tensor]  # DeepSpeed creates an empty state when it reads a missing one


def skip_non_finite_steps(engine: Any) -> None:
    """Make ZeRO 0 in float32 skip steps with non-finite gradients, as DeepSpeed's other optimizers do.

    The other optimizers skip a step if the norm of the reduced gradients is not finite, which is the same on every
    rank. They store the norm and set `overflow`, and the engine then counts the step in `skipped_steps`. With ZeRO 0 in
    float32, DeepSpeed calls torch's AdamW without this check.
    """
    optimizer, clip = engine.optimizer, engine.clip_fp32_gradients
    if hasattr(optimizer, "overflow"):
        return

    def checked_step(closure: Any = None) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        optimizer._global_grad_norm = nn.utils.get_total_norm(gradients)
        # waits for the GPU, as DeepSpeed's other optimizers do
        optimizer.overflow = not math.isfinite(optimizer._global_grad_norm)
        if not optimizer.overflow:
            if engine.gradient_clipping():
                clip()
            optimizer.step_if_finite(closure)

    # checked_step clips the gradients itself, after it has computed the norm
    engine.clip_fp32_gradients = lambda: None
    optimizer.overflow, optimizer.step_if_finite, optimizer.step = False, optimizer.step, checked_step


def drop_skipped_gradients(engine: Any) -> None:
    """Make ZeRO 2 with offloading drop the accumulated gradients of a skipped step.

    DeepSpeed keeps the gradients of a skipped step, and adds the gradients of the next step to them. The sum would not
    be finite either, so DeepSpeed would skip every later step.
    """
    optimizer = engine.optimizer
    if not getattr(optimizer, "cpu_offload", False):
        return
    reset = optimizer.reset_cpu_buffers  # DeepSpeed calls it at the end of every step

    def reset_and_drop() -> None:
        reset()
        optimizer.averaged_gradients.clear()

    optimizer.reset_cpu_buffers = reset_and_drop


@dataclass(frozen=True)
class GradientBuffer:
    """Float32 gradient buffer of a parameter in DeepSpeed's BF16_Optimizer.

    The buffer is 1-D. DeepSpeed adds the bf16 `.grad` to it after each backward pass.
    """

    tensor: torch.Tensor
    optimizer: Any
    group: int
    index: int

    def mark(self) -> None:
        """Mark the gradient as present. With a single rank, DeepSpeed's gradient norm ignores unmarked gradients."""
        self.optimizer.fp32_groups_has_gradients[self.group][self.index] = True


def gradient_buffers(engine: Any) -> dict[int, GradientBuffer]:
    """Return the float32 gradient buffers, keyed by the `id` of their parameter, or {} if the optimizer has none."""
    optimizer = engine.optimizer
    buffers = getattr(optimizer, "fp32_groups_gradients", None)
    if buffers is None or optimizer.grad_acc_dtype != torch.float32:
        return {}
    return {
        id(parameter): GradientBuffer(buffers[i][j], optimizer, i, j)
        for i, group in enumerate(optimizer.bf16_groups)
        for j, parameter in enumerate(group)
    }


def scatter_gradients(engine: Any) -> None:
    """Make DeepSpeed's BF16_Optimizer reduce-scatter the float32 gradients instead of all-reducing them.

    Each rank then has the mean gradient of only its own part of a parameter group, which is all that AdamW reads. This
    halves the traffic, and each rank computes the norm of its own part and clips only this part. Muon orthogonalizes
    whole matrices, so the gradients of its parameter groups are still all-reduced. Call this on a new engine.
    """
    optimizer, ranks = engine.optimizer, dist.get_world_size()
    if ranks == 1 or not hasattr(optimizer, "bf16_groups"):
        return
    buffers = optimizer.fp32_groups_gradients_flat
    parts = [buffer.chunk(ranks)[dist.get_rank()] for buffer in buffers]
    # the reduced gradients that the optimizer of this rank reads, for each parameter group
    reduced = [
        buffer if layout else part
        for buffer, part, layout in zip(buffers, parts, optimizer._muon_exchange_layouts, strict=True)
    ]

    def reduce_gradients(**_: Any) -> None:
        for buffer, own in zip(buffers, reduced, strict=True):
            sent = received = buffer.to(engine.communication_data_type)
            if own is buffer:
                dist.all_reduce(sent)
            else:
                received = sent.chunk(ranks)[dist.get_rank()]
                dist.reduce_scatter_tensor(received, sent)
            own.copy_(received).div_(ranks)

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        return reduced if for_clipping else (parts, {})

    engine.buffered_allreduce_fallback, optimizer.get_grads_for_norm = reduce_gradients, get_grads_for_norm
    # DeepSpeed adds the squared norms of the ranks in this group
    optimizer.mpu = SimpleNamespace(get_model_parallel_group=lambda: optimizer.dp_process_group)


# ---------------------------------------------------------------- saving


def capture_checkpoint(engine: Any, path: Path, take: Callable[[str, Any], None]) -> Exception | None:
    """Call engine.save_checkpoint, but pass the content of each file to `take` instead of writing the file.

    DeepSpeed's conversion scripts are not copied to the checkpoint folder, because train/export.py replaces them.

    Args:
        take: Function that is called with the name and the content of each file.

    Returns:
        The first error that `take` raises, or None. The error is not raised, because the other ranks would then wait in
        DeepSpeed's barriers.
    """
    errors: list[Exception] = []

    def save(state_dict: Any, path: str) -> None:
        if not errors:  # otherwise the save has already failed
            try:
                take(Path(path).name, state_dict)
            except Exception as error:
                errors.append(error)

    with (
        mock.patch.object(engine.checkpoint_engine, "save", save),
        mock.patch.object(engine.checkpoint_engine, "makedirs"),
        mock.patch.object(engine, "_copy_recovery_script"),
    ):
        engine.save_checkpoint(str(path.parent), tag=path.name, save_latest=False)
    return errors[0] if errors else None
