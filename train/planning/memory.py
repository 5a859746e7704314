"""Predict the GPU memory that a rank needs for training, and the host memory of a run with optimizer offload.

The prediction of GPU memory is a sum of several parts:

- weights, gradients and optimizer states, which ZeRO divides between ranks,
- activations that the model saves for the backward pass,
- temporary tensors in a step.

The bytes per token are derived from the source code of Transformer Engine 2.20.2 (`prepare_for_saving` in
LayerNormLinear, LayerNormMLP and Linear) and DeepSpeed 0.19.8. In the formulas, H is the hidden size, I the
intermediate size, q and kv the total widths of all query heads and all key heads, and V the vocabulary size. An element
takes 2 bytes unless it is FP8. tests/train/planning compares the predictions with the peaks measured in
test_fp8/results/.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from model.config import GIB, has_qk_norm, layer_matrix_parameters, num_parameters, state_parts_gib
from model.fp8.recipes import FULL_STATES, HEAD_ROWS, STATE_CHUNK
from train.config.arguments import MUON_GRAPH_ELEMENTS
from train.planning.setting import MOST_LIVE_PARAMETERS, REDUCE_BUCKET, PlanError, Setting, layer_widths

# Transformer Engine and torch each have a cuBLAS workspace, with 32 MiB on Hopper.
WORKSPACES_GIB = 2 * 32 / 1024
# Assumed memory for the CUDA context with cuDNN, assumed memory for NCCL, and assumed fraction lost to fragmentation.
CONTEXT_GIB, NCCL_GIB, FRAGMENTATION = 1.0, 0.8, 0.04
# Bytes per FP8 element with block scaling, which stores a float32 scale for every 128 elements.
BLOCK_SCALES = 1 + 4 / 128
# Bytes per element of a parameter that Muon updates. The gradient, two momentum tensors and the update are float32, and
# three more tensors have 16 bits per element.
MUON_BYTES = 4 * 4 + 3 * 2
MAX_MICRO_BATCH = 2**24
# Assumed host memory of a rank with optimizer offload in addition to offloaded tensors and saves: Python, torch, CUDA.
PROCESS_GIB = 4.0
# Bytes per parameter of the tensors that optimizer offload keeps in host memory, by ZeRO stage. DeepSpeed pins float32
# weights, gradients and 16-bit weights (ZeRO 2), or accumulated gradients and those of the step (ZeRO 3). It does not
# pin the two moments and, with ZeRO 3, the float32 weights.
PINNED_BYTES, PAGEABLE_BYTES = {2: (4, 4, 2), 3: (4, 4)}, {2: 8, 3: 12}
# Number of temporary float32 tensors with STATE_CHUNK elements in a step with packed optimizer states
# (train/engine/packed_adamw.py).
STEP_TENSORS = 6


@dataclass(frozen=True)
class Memory:
    """The predicted peak of a rank's GPU memory.

    Attributes:
        parts: Maps each purpose to its memory at the peak, in GiB.
        moment: The part of a step in which the peak occurs.
        measured_as_gib: The peak as torch.cuda.max_memory_allocated would report it, in GiB. With CUDA graphs, torch
            does not count all memory.
    """

    parts: dict[str, float]
    moment: str
    measured_as_gib: float

    @property
    def peak_gib(self) -> float:
        """Return the peak memory used by tensors, in GiB."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Format the memory for each purpose as text, in GiB. Amounts below 0.05 GiB are omitted."""
        return ", ".join(f"{name} {gib:,.1f}" for name, gib in self.parts.items() if gib >= 0.05)

    def needed_gib(self, ranks: int) -> float:
        """Return the GPU memory that each rank needs, in GiB.

        In addition to tensors, this includes fragmentation, the CUDA context and, with several ranks, NCCL.
        """
        return self.peak_gib * (1 + FRAGMENTATION) + CONTEXT_GIB + (NCCL_GIB if ranks > 1 else 0)


# ---------------------------------------------------------------- activations, bytes per token


def saved_by_layer(s: Setting, fp8: bool) -> float:
    """Return the size of the activations that a layer saves for the backward pass, in bytes per token.

    Args:
        fp8: Whether the layer computes its GEMMs in FP8.
    """
    H, I, q, kv, _ = layer_widths(s.sizes)  # noqa: E741
    by_block = s.recipe in ("block", "mxfp8")
    scaled = BLOCK_SCALES if by_block else 1.0
    # q, k, v and the attention output; log-sum-exp; 1/rms of two norms
    attention = 2 * (2 * q + 2 * kv) + 4 * s.sizes.num_attention_heads + 2 * 4
    if has_qk_norm(s.sizes):  # q and k before the norms, which te_layer saves together with v
        attention += 2 * (q + (2 * kv if s.args.model.variant == "te_layer" else kv))
    inputs = 2 * 2 * H  # inputs of the two norms: the residual stream
    # gate and up, and silu(gate) unless the backward pass recomputes it
    swiglu = (2 if s.args.model.variant == "te_layer" or s.args.speed.fused_swiglu else 3) * 2 * I
    packs = fp8 and s.recompute == "mlp" and s.recipe == "delayed"
    if not fp8:
        # outputs of the norms and of SwiGLU; the input of o_proj is the attention output, counted above
        return attention + inputs + 2 * 2 * H + swiglu + 2 * I
    if s.args.model.variant == "te_layer":
        # transposed copies for the weight gradients; with block scaling, LayerNormMLP also keeps the row-wise copies
        copies = 2 if by_block else 1
        if packs:  # gate and up in 8 bits with their scales; the output is recomputed
            return attention + inputs + 2 * H + q + BLOCK_SCALES * 2 * I
        return attention + inputs + scaled * (H + q + copies * (H + I)) + swiglu
    # te_linear: q_proj, k_proj, v_proj, gate_proj and up_proj each quantize their input
    return attention + inputs + scaled * (5 * H + q + I) + swiglu


def head_bytes(s: Setting) -> float:
    """Return the size of the tensors of lm_head and the loss at the start of the backward pass, in bytes per token.

    The logits take most of this memory.
    """
    H, _, _, _, V = layer_widths(s.sizes)
    if not s.args.speed.fused_cross_entropy:
        # three float32 tensors: log_softmax, its gradient and the gradient of the loss; the norm is as in a layer
        return 12 * V + 6 * H
    # input of the norm, input of lm_head with its gradient, and the logits, which are overwritten by their gradient
    if s.fp8_head:
        return 4 * V + 5 * H
    # the gradient of the logits also has a row-wise and a column-wise FP8 copy
    return 2 * V + 6 * H + (BLOCK_SCALES * 2 * V if s.fp8_head_gradients else 0)


# ---------------------------------------------------------------- ZeRO, bytes


def _buckets(s: Setting) -> float:
    """Return the size of DeepSpeed's communication buffers during a micro-batch, in bytes."""
    H, I, _, _, V = layer_widths(s.sizes)  # noqa: E741
    if s.zero_stage == 3:
        # On one rank, DeepSpeed uses the stored weights without copying them.
        gathered = min(s.parameters, MOST_LIVE_PARAMETERS) if s.ranks > 1 else 0
        return s.gathered_bytes * gathered + 2 * s.reduce_bucket
    if s.zero_stage == 2 or (s.zero_stage == 1 and not s.bf16_optimizer):
        # offloading has a buffer for the largest parameter, the embedding or te_layer's fused gate and up
        largest = 2 * H * max(V, 2 * I) if s.offloads else 0
        return 2 * s.reduce_bucket * (2 if s.overlap_comm else 1) + largest
    return 0


def _muon_elements(s: Setting) -> list[int]:
    """Return the sizes of the weight matrices in a layer that Muon updates, in elements, or [] without Muon.

    The size of several matrices with the same shape is listed once.
    """
    if s.args.optim != "muon":
        return []
    H, I, q, kv, _ = layer_widths(s.sizes)  # noqa: E741
    # te_layer fuses q, k and v, and gate and up. In te_linear, gate and up have the same shape, and down has another.
    rows = (q + 2 * kv, q, 2 * I, I) if s.args.model.variant == "te_layer" else (q, kv, I, I)
    return [H * count for count in rows]


def _in_the_step(s: Setting) -> float:
    """Return the size of temporary tensors during the optimizer step, in bytes."""
    muon = MUON_BYTES * max(_muon_elements(s), default=0)
    if s.zero_stage == 0:
        return 4 * s.parameters + muon
    if s.offloads:
        return 0
    if s.zero_stage == 3:
        return 4 * min(s.parameters / s.ranks, MOST_LIVE_PARAMETERS) + muon
    if s.bf16_optimizer:
        # On one rank, DeepSpeed copies all gradients that fit into a bucket to one tensor before it casts them.
        joined = 4 * s.parameters if s.ranks == 1 and s.parameters < REDUCE_BUCKET else 0
        reduced = joined + (0 if s.reduces_in_float32 else 2 * s.parameters)
        decoded = STEP_TENSORS * 4 * min(STATE_CHUNK, s.parameters / s.ranks) if s.packs else 0
        # Muon later exchanges matrices that are split between two ranks, which needs less memory.
        return max(reduced, decoded, muon)
    # a flat 16-bit copy and a float32 copy of the gradients; with ZeRO 2, float32 gradients are already flat
    return muon if s.float32_gradients else (4 + 2) * s.parameters / s.ranks


# ---------------------------------------------------------------- peak


def predict_memory(s: Setting) -> Memory:
    """Predict the peak GPU memory of a run, in the phase of precision.schedule that needs the most memory.

    Raises:
        PlanError: Memory cannot be predicted for the model variant or the precision of the run.
    """
    if not s.is_planned:
        raise PlanError(
            f"memory and speed cannot be predicted for model.variant {s.args.model.variant} with precision.compute "
            f"{s.compute}. Set model.variant to te_layer or te_linear, and precision.compute to fp8 or bf16",
            key="model.variant",
        )
    return max((_predict_phase_memory(its) for _, its in s.phases), key=lambda memory: memory.peak_gib)


def _predict_phase_memory(s: Setting) -> Memory:
    """Predict the peak GPU memory in one phase of precision.schedule.

    The peak occurs at the start of the backward pass, in the backward pass of the last layer, in the optimizer step,
    or, for small models, in an evaluation.

    CUDA graphs are captured before the optimizer moments, the 16-bit gradients and Muon's graphs are allocated. After
    the capture, torch does not count the graphs' memory as allocated.
    """
    H, I, _, _, V = layer_widths(s.sizes)  # noqa: E741
    layers, per_token = s.sizes.num_hidden_layers, s.tokens / GIB
    fp8_layer, other_layer = saved_by_layer(s, True), saved_by_layer(s, False)
    of_layers = s.fp8_layers * fp8_layer + (layers - s.fp8_layers) * other_layer
    one_layer = max(fp8_layer if s.fp8_layers else 0, other_layer if s.fp8_layers < layers else 0)
    state = _state_gib(s, s.zero_stage, s.float32_gradients)
    # number of parameters that have both a 16-bit gradient and the float32 gradient to which it is added
    twice = 0 if not s.bf16_optimizer else H * V if s.main_grad else s.parameters
    state["gradients"] += 2 * twice / GIB
    # without copies for the whole step, recomputation makes those of one layer at a time; "mlp" does so with ZeRO 3
    of_layer = not s.keeps_fp8_weights and (
        s.recompute is True or s.gathers_fp8 or (s.recompute == "mlp" and s.zero_stage == 3)
    )
    copies = replace(s, fp8_layers=min(s.fp8_layers, 1)) if of_layer else s
    copied = {"FP8 copies of weights": 2 * copies.fp8_parameters / GIB}
    if s.gathers_fp8:  # this rank's part, which it keeps for the whole step
        state["weights"] += s.fp8_parameters / s.ranks / GIB
    # captured in the first step
    muon_graphs = MUON_BYTES * sum(n for n in _muon_elements(s) if n <= MUON_GRAPH_ELEMENTS) / GIB
    always = state | {"cuBLAS workspaces": WORKSPACES_GIB, "CUDA graphs of Muon": muon_graphs}
    running = always | copied | {"communication buffers": _buckets(s) / GIB}
    if s.cuda_graphs and not s.main_grad:
        # each captured graph after the first allocates its own gradients
        running["CUDA graphs"] = (s.keeps_fp8_weights + s.health) * 2 * s.parameters / GIB
    kept = layers * 2 * H if s.recompute is True else of_layers
    of_head = per_token * head_bytes(s)
    if s.fp8_head_gradients:
        # lm_head makes FP8 copies of the logits' gradient for HEAD_ROWS tokens at a time. It computes its input
        # gradient with an FP8 copy of the weight, then its weight gradient with an FP8 copy of the input.
        chunked = s.args.speed.fused_cross_entropy and s.tokens > HEAD_ROWS
        rows = HEAD_ROWS if chunked else s.tokens
        of_head += (H * max(V, rows) - BLOCK_SCALES * 2 * V * (s.tokens - rows)) / GIB
        if chunked and not s.main_grad:  # the gradient of the weight in float32, and then also in 16 bits
            of_head += 6 * H * V / GIB
    head = {"activations": per_token * kept, "logits": of_head}
    # Gradients of the MLP's output and input, of SwiGLU's output, and of gate and up, each with a row-wise and a
    # column-wise FP8 copy. SwiGLU's output is already freed.
    of_mlp = 4 * H + (3 if s.fp8 and s.recipe == "delayed" else 4) * I
    backward = {
        "activations": per_token * (kept + (one_layer if s.recompute is True else 0)),
        "backward of a layer": per_token * of_mlp,
    }
    # An evaluation saves no activations. It needs the logits, their float32 copy and log_softmax.
    eval_tokens = s.seq_length * (s.micro_batch if s.eval_batch is None else s.eval_batch)
    logits = eval_tokens / GIB * (10 * V + 4 * H)
    after = always | copied if s.keeps_fp8_weights else always
    passes = {
        "start of the backward pass": running | head,
        "backward pass of the last layer": running | backward,
    }
    later = {
        "evaluation": after | {"logits": logits},
        "optimizer": after | {"gradients of the step": _in_the_step(s) / GIB},
    }
    of_passes, of_later = (max(sum(p.values()) for p in moments.values()) for moments in (passes, later))
    shown = max(of_passes, of_later)
    if s.cuda_graphs:
        # unpacked float32 weights are allocated before the capture, all other optimizer states after it
        early = 0 if s.packs or s.offloads else 4 * s.parameters / (s.ranks if s.zero_stage else 1) / GIB
        late = state["optimizer"] - early + muon_graphs
        shown = max(of_passes - late - 2 * twice / GIB, of_later)
        for parts in later.values():
            parts["CUDA graphs"] = of_passes - sum(after.values())
    moment, parts = max((passes | later).items(), key=lambda item: sum(item[1].values()))
    return Memory({name: part for name, part in parts.items() if part}, moment, shown)


# ---------------------------------------------------------------- bounds and checkpoints


def largest_micro_batch(s: Setting, device_gib: float) -> int:
    """Return the largest micro-batch size that fits into GPU memory, in samples, or 0 if no size fits."""
    largest = bisect_left(
        range(1, MAX_MICRO_BATCH),
        True,
        key=lambda units: (
            predict_memory(replace(s, micro_batch=units * s.micro_batch_unit)).needed_gib(s.ranks)
            > device_gib
        ),
    )
    return largest * s.micro_batch_unit


def least_memory_gib(s: Setting) -> float:
    """Return a lower bound for the GPU memory that a rank needs, in GiB.

    The bound includes weights, gradients in the data type of the weights, and optimizer states. ZeRO 0 is treated like
    ZeRO 1, because DeepSpeed partitions the optimizer states of 16-bit weights in both stages.
    """
    return sum(_state_gib(s, max(s.zero_stage, 1), False).values())


def _state_gib(s: Setting, zero_stage: int, float32_gradients: bool) -> dict[str, float]:
    """Return the memory per rank for "weights", "gradients" and "optimizer" in GiB (see `state_parts_gib`).

    Args:
        zero_stage, float32_gradients: used instead of the values in `s`.
    """
    return state_parts_gib(
        s.sizes,
        zero_stage,
        s.ranks,
        s.compute,
        float32_gradients,
        s.optimizer_bytes,
        s.args.optim,
        s.offloads,
    )


def offload_host_gib(s: Setting, node_ranks: int) -> float:
    """Return the host memory that the ranks of a node need with optimizer offload, in GiB.

    torch rounds the size of each pinned tensor up to a power of two. With save_async, a copy of the checkpoint is
    included.
    """
    part = s.parameters / s.ranks
    pinned = [part * size for size in PINNED_BYTES[s.zero_stage]]
    if s.pins:
        pinned = [2.0 ** math.ceil(math.log2(size)) for size in pinned]
    saved = 0.0
    if s.args.save_async and s.args.save_strategy != "no":
        saved = checkpoint_bytes(s.sizes, s.zero_stage, s.compute) / s.ranks
    return node_ranks * ((PAGEABLE_BYTES[s.zero_stage] * part + sum(pinned) + saved) / GIB + PROCESS_GIB)


def weight_bytes(compute: str) -> int:
    """Return the size of a model weight in bytes, for a value of precision.compute."""
    return 4 if compute == "fp32" else 2


def checkpoint_bytes(
    sizes: Any, zero_stage: int, compute: str, optimizer_bytes: float = FULL_STATES, optim: str = "adamw"
) -> int:
    """Return the size of a checkpoint in bytes, without FP8 state and small files.

    Float32 weights and moments take 12 bytes per parameter, or 8 bytes for parameters that Muon trains. The weights in
    the model's data type are saved in addition, with two exceptions: ZeRO 3 saves only the float32 weights, and float32
    models without ZeRO have a single copy. With packed optimizer states (train/engine/packed_adamw.py), the bf16
    weights are saved twice.

    Args:
        optimizer_bytes: Size of AdamW's states in bytes per parameter. Packed states take less than FULL_STATES.
    """
    once = zero_stage == 3 or (compute == "fp32" and zero_stage == 0)
    is_packed = compute != "fp32" and optimizer_bytes < FULL_STATES
    of_optimizer = optimizer_bytes + weight_bytes(compute) if is_packed else FULL_STATES
    less = 4 * layer_matrix_parameters(sizes) if optim == "muon" else 0
    return int(num_parameters(sizes) * (of_optimizer + (0 if once else weight_bytes(compute)))) - less
