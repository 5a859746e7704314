"""AdamW and Muon, their parameter groups, and the learning-rate schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from model.conversion import hf_parts
from train.config.arguments import MUON_GRAPH_ELEMENTS, LrScales, TrainingArguments
from train.engine.zero import (
    MatrixPart,
    base_optimizer,
    full_shape,
    matrix_parts,
    muon_matrices,
    parameter_name,
)

# DeepSpeed's Muon decorates functions with torch.compile, which imports torch's compiler (1 s per start) and compiles
# for each shape. This is disabled here. The speedup of torch.compile on a GPU has not been measured.
with mock.patch.object(torch, "compile", lambda function, **_: function):
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

MUON_UPDATE = original_muon.muon_update

# Root mean square of the elements of Muon's update. For AdamW it is 0.2 to 0.4.
MUON_RMS = 0.2


NO_SCALES = LrScales()


def lr_scale(name: str, parameter: nn.Parameter, config: Any, scales: LrScales) -> float:
    """Return the factor for the learning rate of the parameter `name` of a model."""
    shape = full_shape(parameter)
    if len(shape) < 2:
        return scales.norms
    (part, _), *_ = hf_parts(name, shape, config)  # all parts of a fused parameter have the factor 1
    outputs = dict.fromkeys(("o_proj", "down_proj"), scales.output_projections)
    return {"embed_tokens": scales.embedding, "lm_head": scales.lm_head, **outputs}.get(
        part.split(".")[-2], 1.0
    )


def parameter_groups(
    model: nn.Module, weight_decay: float, optim: str = "adamw", scales: LrScales = NO_SCALES
) -> list[dict[str, Any]]:
    """Return the parameter groups for the optimizer.

    AdamW has two groups: matrices, including embeddings, with weight decay, and vectors (norms and biases) without
    weight decay. With `optim` "muon", the matrices of the decoder layers are in additional groups, which come first.
    There is one such group for each number of columns. Parameters whose factor in `scales` is not 1 are in separate
    groups, which come last.

    If a group has an `lr_scale`, the learning rate of the group is multiplied by this factor. The weight decay is
    divided by the same factor, because the optimizer multiplies the weight decay by the learning rate of the group.

    DeepSpeed's Muon multiplies the orthogonal matrix by sqrt(max(1, rows / columns)). With `lr_scale`, the total factor
    is 0.2 sqrt(max(rows, columns)) (Liu et al., arXiv:2502.16982, section 2.2; "match_rms_adamw" in torch.optim.Muon).
    The elements of the update are then as large as in AdamW, so the learning rate and weight decay of AdamW can be
    used.

    Fused weights decay like their parts. A tied weight appears once. Parameters without a gradient and empty groups are
    omitted.
    """
    layers: Any = model.model.layers.parameters() if optim == "muon" else ()
    of_muon = {id(p) for p in layers if p.requires_grad and len(full_shape(p)) == 2}
    by_key: dict[tuple[bool, float, bool, int, bool], list[nn.Parameter]] = {}  # in the order of the groups
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = full_shape(parameter)
            scale = lr_scale(name, parameter, model.config, scales)
            columns = shape[1] if id(parameter) in of_muon else 0
            key = scale != 1, scale, columns == 0, columns, len(shape) < 2
            by_key.setdefault(key, []).append(parameter)
    groups = []
    for (_, scale, _, columns, is_vector), parameters in sorted(by_key.items(), key=itemgetter(0)):
        group: dict[str, Any] = {"params": parameters}
        if optim == "muon":
            group["use_muon"] = columns > 0
        if columns:
            # DeepSpeed's Muon uses this order
            parameters.sort(key=full_shape, reverse=True)
            scale *= MUON_RMS * math.sqrt(columns)
        group["weight_decay"] = 0.0 if is_vector else weight_decay / scale
        groups.append(group if scale == 1 else group | {"lr_scale": scale})
    return groups


def build_optimizer(
    model: nn.Module, arguments: TrainingArguments, offloads: bool = False
) -> torch.optim.Optimizer:
    """Build the AdamW or Muon optimizer.

    AdamW is torch's implementation (Loshchilov and Hutter, arXiv:1711.05101), fused if the parameters are on CUDA. Muon
    is DeepSpeed's implementation (Jordan et al., kellerjordan.github.io/posts/muon), which uses AdamW for all
    parameters except the matrices of the decoder layers. DeepSpeed's ZeRO accepts only these classes without
    `zero_allow_untested_optimizer`.

    Args:
        offloads: Whether AdamW runs on the CPU. The fused kernel is then used, which reads and writes the states only
            once.
    """
    groups = parameter_groups(model, arguments.weight_decay, arguments.optim, arguments.lr_scales)
    adamw = {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "fused": offloads or all(parameter.is_cuda for group in groups for parameter in group["params"]),
    }
    if arguments.optim == "adamw":
        return torch.optim.AdamW(groups, **adamw)
    for group in groups:
        is_muon, of_adamw = group["use_muon"], {"betas": adamw["betas"], "eps": adamw["eps"]}
        own = {"momentum": arguments.muon_momentum} if is_muon else of_adamw
        group.update(own, lr=arguments.learning_rate * group.get("lr_scale", 1.0))
    # DeepSpeed's initial step (zero.undo_initial_step) needs the original function. orthogonalize_each_matrix then
    # replaces it.
    original_muon.muon_update = muon_optimizer.muon_update = MUON_UPDATE
    return muon_optimizer.MuonWithAuxAdam(
        groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs=adamw
    )


def orthogonalize_each_matrix(engine: Any) -> None:
    """Make Muon orthogonalize the matrices in fused parameters separately: q, k and v, and gate and up.

    The function replaces DeepSpeed's `muon_update`, which receives fused parameters without their names. The
    replacement identifies each parameter by its position in the sequence of calls, which is the same in every step.
    Therefore, call this function before the first step of an engine. Checkpoints still contain the fused parameters.

    An update launches about a hundred kernels. Neighboring matrices of the same shape in a parameter therefore share
    one update. On a GPU, a CUDA graph launches the updates of a parameter, and parameters of the same shape share
    this graph.
    """
    matrices = [
        (parameter_name(engine, p), full_shape(p), engine.module.config) for p in muon_matrices(engine)
    ]
    calls = itertools.cycle(tuple(rows for _, rows in hf_parts(*matrix)) for matrix in matrices)
    graphs: dict[Any, _CapturedUpdate] = {}

    def update(gradient: torch.Tensor, momentum: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = next(calls)
        run = partial(_update_parts, rows=rows, options=options)
        if not gradient.is_cuda or gradient.numel() > MUON_GRAPH_ELEMENTS:
            return run(gradient, momentum)
        key = *gradient.shape, *rows
        if key not in graphs:
            graphs[key] = _CapturedUpdate(run, gradient, momentum)
        return graphs[key](gradient, momentum)

    original_muon.muon_update = muon_optimizer.muon_update = update
    if engine.zero_optimization_stage() > 1:
        orthogonalize_flat_gradients(engine)


def orthogonalize_flat_gradients(engine: Any) -> None:
    """Make Muon orthogonalize whole matrices with ZeRO 2 and 3, which store weights and gradients in flat tensors.

    Without this function, Muon would use flat gradients as updates without orthogonalizing them. Gradients are already
    reduced and clipped at this point. Each matrix has an owner, which receives the parts of the other ranks, computes
    the update and returns its parts.
    """
    optimizer, parts = base_optimizer(engine), matrix_parts(engine)
    if not parts:
        return
    step = optimizer.step

    @torch.no_grad()
    def orthogonalized_step(closure: Any = None) -> Any:
        # DeepSpeed steps one group at a time, and sets only its gradients
        steps = {id(flat): group for group in optimizer.param_groups for flat in group["params"]}
        now = [part for part in parts if id(part.flat) in steps]
        for flat in {id(part.flat): part.flat for part in now}.values():
            state, beta = optimizer.state[flat], steps[id(flat)]["momentum"]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(flat)
            flat.grad.lerp_(state["momentum_buffer"].lerp_(flat.grad, 1 - beta), beta)  # Nesterov momentum
        owned = [[part for part in now if part.owner == rank] for rank in range(dist.get_world_size())]
        for matrices in itertools.zip_longest(*owned):
            _orthogonalize(matrices)
        return step(closure)

    optimizer.step = orthogonalized_step  # type: ignore[method-assign]


def _orthogonalize(matrices: Sequence[MatrixPart | None]) -> None:
    """Orthogonalize the gradients of matrices in place. Rank i is the owner of the i-th matrix.

    Collective if a matrix is split.
    """
    rank, own = dist.get_rank(), matrices[dist.get_rank()]
    some = [matrix for matrix in matrices if matrix is not None]
    of_owners = [0 if matrix is None else matrix.sizes[rank] for matrix in matrices]
    of_ranks = [0] * len(matrices) if own is None else own.sizes
    parts = torch.cat([matrix.flat.grad[matrix.of_flat] for matrix in some])  # type: ignore[index]
    whole, is_split = parts.new_empty(sum(of_ranks)), any(matrix.is_split for matrix in some)
    if is_split:
        dist.all_to_all_single(whole, parts, of_ranks, of_owners)
    else:
        whole = parts
    if own is not None:
        gradient = whole.view(full_shape(own.parameter))
        whole = original_muon.muon_update(gradient, torch.zeros_like(gradient), beta=0.0).flatten()
    if is_split:
        dist.all_to_all_single(parts, whole, of_owners, of_ranks)
    else:
        parts = whole
    for matrix, part in zip(some, parts.split([m.sizes[rank] for m in some]), strict=True):
        matrix.flat.grad[matrix.of_flat] = part  # type: ignore[index]


def _update_parts(
    gradient: torch.Tensor, momentum: torch.Tensor, rows: Sequence[int], options: dict[str, Any]
) -> torch.Tensor:
    """Update the momentum in place, and return Muon's update of a parameter.

    Neighboring matrices of the same shape form a batch.

    Args:
        rows: number of rows of each matrix in the parameter.
    """
    updates, first = [], 0
    for size, same in itertools.groupby(rows):
        count = len(list(same))
        batch = [t.narrow(0, first, count * size).view(count, size, -1) for t in (gradient, momentum)]
        # is_expert_group: the first dimension counts matrices
        updates.append(MUON_UPDATE(*batch, **{**options, "is_expert_group": True}).flatten(0, 1))
        first += count * size
    return torch.cat(updates)


class _CapturedUpdate:
    """CUDA graph of Muon's update for parameters of the same shape.

    Each graph keeps float32 copies of a gradient and a momentum, and the temporary tensors of an update. Each replay
    overwrites the result of the previous replay. DeepSpeed copies each result before it requests the next one.
    """

    def __init__(self, update: Callable[..., torch.Tensor], gradient: torch.Tensor, momentum: torch.Tensor):
        update(gradient.clone(), momentum.clone())  # cuBLAS allocates its workspace outside of the graph
        self.inputs = [torch.empty_like(gradient), torch.empty_like(momentum)]
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (data, NCCL's watchdog) may continue to call CUDA
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.update = update(*self.inputs)

    def __call__(self, gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        torch._foreach_copy_(self.inputs, [gradient, momentum])
        self.graph.replay()
        momentum.copy_(self.inputs[1])
        return self.update


def learning_rate_at(step: int, arguments: TrainingArguments) -> float:
    """Return the learning rate at `step`, counted from 0.

    The learning rate depends only on the step, so a resume needs no scheduler state.

    During warmup, the learning rate rises linearly from learning_rate / warmup_steps at step 0 to the peak,
    learning_rate, at step warmup_steps - 1. After warmup, it follows lr_scheduler_type. The floor,
    min_lr_ratio * learning_rate, is reached at max_steps:

        cosine                 cosine from the peak to the floor (Loshchilov and Hutter, arXiv:1608.03983)
        linear                 linear from the peak to the floor
        constant               constant at the peak
        warmup_stable_decay    constant at the peak, then linear to the floor during the last decay_steps (Hu et al.,
                               arXiv:2404.06395)
    """
    peak, kind, end = arguments.learning_rate, arguments.lr_scheduler_type, arguments.max_steps
    if step < arguments.warmup_steps:
        return peak * (step + 1) / arguments.warmup_steps
    if kind == "constant":
        return peak
    decay = arguments.decay_steps if kind == "warmup_stable_decay" else end - arguments.warmup_steps
    if not decay:  # warmup fills the whole run
        return peak
    progress = min(max(step - (end - decay), 0) / decay, 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * (arguments.min_lr_ratio + (1 - arguments.min_lr_ratio) * falling)
