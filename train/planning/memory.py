"""GPU memory of a rank, part by part: weights, gradients and optimizer by ZeRO's rules, activations by what each
variant saves for its backward, and what a step has besides.

Bytes of a token are counted by walking through the modules: Transformer Engine 2.20.2 (LayerNormLinear, LayerNormMLP,
Linear, their `prepare_for_saving`) and DeepSpeed 0.19.8. Letters: H hidden, I intermediate, q and kv widths of all
query and key heads, V vocabulary. What is not FP8 has 2 bytes. tests/train/planning compares with the committed peaks
in test_fp8/results/.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from model.config import GIB, layer_matrix_parameters, num_parameters, state_parts_gib
from model.fp8.recipes import FULL_STATES, STATE_CHUNK
from train.planning.setting import MOST_LIVE_PARAMETERS, REDUCE_BUCKET, PlanError, Setting, widths_of

# cuBLAS workspaces of Transformer Engine and of torch, 32 MiB each on Hopper.
WORKSPACES_GIB = 2 * 32 / 1024
# What the driver, cuDNN, NCCL and the allocator's rounding take beside the tensors: an allowance, not measured here.
CONTEXT_GIB, NCCL_GIB, FRAGMENTATION = 1.0, 0.8, 0.04
# Scales of block scaling: a float32 for 128 elements.
BLOCK_SCALES = 1 + 4 / 128
# Of an element of the matrix that Muon orthogonalizes: gradient, two of momentum, the update in float32 and in halves.
MUON_BYTES = 4 * 4 + 3 * 2
MOST_MICRO_BATCH = 2**24
STEP_TENSORS = 6  # of a step of packed states (train/engine/states.py): float32, of STATE_CHUNK elements


@dataclass(frozen=True)
class Memory:
    """GiB of a rank. `parts` are there at the moment of the peak and sum to `peak_gib`."""

    parts: dict[str, float]
    moment: str  # when in a step the peak is
    measured_as_gib: float  # what torch.cuda.max_memory_allocated shows of it: less with CUDA graphs

    @property
    def peak_gib(self) -> float:
        return sum(self.parts.values())

    def described(self) -> str:
        """The parts that weigh something."""
        return ", ".join(f"{name} {gib:,.1f}" for name, gib in self.parts.items() if gib >= 0.05)

    def needed_gib(self, ranks: int) -> float:
        """Of a device: the peak with what is no tensor."""
        return self.peak_gib * (1 + FRAGMENTATION) + CONTEXT_GIB + (NCCL_GIB if ranks > 1 else 0)


# ---------------------------------------------------------------- activations, bytes of a token


def saved_by_layer(s: Setting, fp8: bool) -> float:
    """Bytes that a token leaves in a layer for its backward."""
    H, I, q, kv, _ = widths_of(s.sizes)  # noqa: E741
    scaled = BLOCK_SCALES if s.recipe == "block" else 1.0
    # q, k, v, out; log-sum-exp; 1/rms of two norms
    attention = 2 * (2 * q + 2 * kv) + 4 * s.sizes.num_attention_heads + 2 * 4
    inputs = 2 * 2 * H  # of the two norms: the residual stream
    # gate and up; silu(gate), but where it is computed again
    swiglu = (2 if s.args.model.variant == "te_layer" or s.args.speed.fused_swiglu else 3) * 2 * I
    if not fp8:
        # outputs of the norms; out is o_proj's input too; SwiGLU's output
        return attention + inputs + 2 * 2 * H + swiglu + 2 * I
    if s.args.model.variant == "te_layer":
        # transposed copies for the weight gradients; LayerNormMLP keeps the rows of its norm's output as well
        of_swiglu = 2 * I if s.recipe == "block" else I
        return attention + inputs + scaled * (H + 2 * H + q + of_swiglu) + swiglu
    # te_linear: q_proj, k_proj, v_proj, gate_proj and up_proj each quantize their input
    return attention + inputs + scaled * (5 * H + q + I) + swiglu


def head_bytes(s: Setting) -> float:
    """Bytes of a token from the last layer to the begin of lm_head's backward, where logits weigh most."""
    H, _, _, _, V = widths_of(s.sizes)
    if not s.args.speed.fused_cross_entropy:
        # float32: log_softmax, its gradient and that of the loss; norm as in a layer
        return 12 * V + 6 * H
    # norm's input, lm_head's input and its gradient; logits, which become their gradient
    if s.fp8_head:
        return 4 * V + 5 * H
    # rows and columns of the logits' gradient
    return 2 * V + 6 * H + (BLOCK_SCALES * 2 * V if s.fp8_head_gradients else 0)


# ---------------------------------------------------------------- what ZeRO adds


def _buckets(s: Setting) -> float:
    """Bytes that DeepSpeed has for communication while a micro-batch runs."""
    if s.zero_stage == 3:
        return 2 * (min(s.parameters, MOST_LIVE_PARAMETERS) + s.reduce_bucket)
    if s.zero_stage == 2 or (s.zero_stage == 1 and not s.bf16_optimizer):
        return 2 * s.reduce_bucket * (2 if s.overlap_comm else 1)
    return 0


def _in_the_step(s: Setting) -> float:
    """Bytes of the optimizer's step itself, when no activation is left."""
    H, I, q, _, _ = widths_of(s.sizes)  # noqa: E741
    muon = MUON_BYTES * H * max(q, I) if s.args.optim == "muon" else 0
    if s.zero_stage == 0:
        return 4 * s.parameters + muon
    if s.zero_stage == 3:
        return 4 * min(s.parameters / s.ranks, MOST_LIVE_PARAMETERS)
    if s.bf16_optimizer:
        # for their reduction, on one rank too, in one tensor: what joins those of less than a bucket, and a cast
        joined = 4 * s.parameters if s.parameters < REDUCE_BUCKET else 0
        reduced = joined + (0 if s.reduces_in_float32 else 2 * s.parameters)
        decoded = STEP_TENSORS * 4 * min(STATE_CHUNK, s.parameters / s.ranks) if s.packs else 0
        # what ranks exchange of matrices that two of them have in part is less, and follows it
        return max(reduced, decoded, muon)
    # a flat copy in 16 bits and its cast; float32 gradients of ZeRO 2 are flat already
    return 0 if s.float32_gradients else (4 + 2) * s.parameters / s.ranks


# ---------------------------------------------------------------- the sum


def memory_of(s: Setting) -> Memory:
    """The peak of the phase of precision.schedule that takes most. Raises PlanError: not `is_planned`."""
    if not s.is_planned:
        raise PlanError(
            f"model.variant {s.args.model.variant} with precision.compute {s.compute} cannot be planned. Use te_layer "
            "or te_linear, and fp8 or bf16",
            key="model.variant",
        )
    return max((_memory_of(its) for _, its in s.phases), key=lambda memory: memory.peak_gib)


def _memory_of(s: Setting) -> Memory:
    """The peak of a step: at the begin of the backward, in the backward of the last layer, or in the optimizer; or that
    of an evaluation, which small models have.

    CUDA graphs are captured before the optimizer has its moments and there are gradients in 16 bits, and what they hold
    later is not what torch calls allocated.
    """
    H, I, _, _, V = widths_of(s.sizes)  # noqa: E741
    layers, per_token = s.sizes.num_hidden_layers, s.tokens / GIB
    fp8_layer, other_layer = saved_by_layer(s, True), saved_by_layer(s, False)
    of_layers = s.fp8_layers * fp8_layer + (layers - s.fp8_layers) * other_layer
    one_layer = max(fp8_layer if s.fp8_layers else 0, other_layer if s.fp8_layers < layers else 0)
    state = state_parts_gib(
        s.sizes, s.zero_stage, s.ranks, s.compute, s.float32_gradients, s.optimizer_bytes, s.args.optim
    )
    # parameters whose 16-bit gradient stays beside the float32 one that it was added to
    twice = 0 if not s.bf16_optimizer else H * V if s.main_grad else s.parameters
    state["gradients"] += 2 * twice / GIB
    copied_layers = s.fp8_layers if s.keeps_fp8_weights or not s.recompute else min(s.fp8_layers, 1)
    copied = {"FP8 copies of weights": 2 * (s.layer_matrices * copied_layers + H * V * s.fp8_head) / GIB}
    always = state | {"cuBLAS workspaces": WORKSPACES_GIB}
    running = always | copied | {"communication buffers": _buckets(s) / GIB}
    if s.cuda_graphs and not s.main_grad:
        # captures besides one, each of which keeps its gradients
        running["CUDA graphs"] = (s.keeps_fp8_weights + s.health) * 2 * s.parameters / GIB
    kept = layers * 2 * H if s.recompute else of_layers
    # of the head's gradients, one after the other: the weight in FP8, then the input
    of_head = H * max(V, s.tokens) / GIB if s.fp8_head_gradients else 0
    head = {"activations": per_token * kept, "logits": per_token * head_bytes(s) + of_head}
    # gradients of the MLP's output and input, of SwiGLU's output and of gate and up, with their FP8 rows and columns;
    # SwiGLU's output is freed before
    of_mlp = 4 * H + (3 if s.fp8 and s.recipe == "delayed" else 4) * I
    backward = {
        "activations": per_token * (kept + (one_layer if s.recompute else 0)),
        "backward of a layer": per_token * of_mlp,
    }
    # an evaluation keeps nothing for a backward: logits, these in float32, log_softmax
    eval_tokens = s.seq_length * (s.micro_batch if s.eval_batch is None else s.eval_batch)
    logits = eval_tokens / GIB * (10 * V + 4 * H)
    after = always | copied if s.keeps_fp8_weights else always
    passes = {"begin of the backward": running | head, "backward of the last layer": running | backward}
    later = {
        "evaluation": after | {"logits": logits},
        "optimizer": after | {"gradients of the step": _in_the_step(s) / GIB},
    }
    of_passes, of_later = (max(sum(p.values()) for p in moments.values()) for moments in (passes, later))
    shown = max(of_passes, of_later)
    if s.cuda_graphs:
        # all of the states but a whole float32 weight, which is there from the start
        early = 0 if s.packs else 4 * s.parameters / (s.ranks if s.zero_stage else 1) / GIB
        late = state["optimizer"] - early
        shown = max(of_passes - late - 2 * twice / GIB, of_later)
        for parts in later.values():
            parts["CUDA graphs"] = of_passes - sum(after.values())
    moment, parts = max((passes | later).items(), key=lambda item: sum(item[1].values()))
    return Memory({name: part for name, part in parts.items() if part}, moment, shown)


# ---------------------------------------------------------------- bounds and files


def largest_micro_batch(s: Setting, device_gib: float) -> int:
    """The largest micro-batch that fits into a GPU, samples; 0 if not even the smallest does."""
    largest = bisect_left(
        range(1, MOST_MICRO_BATCH),
        True,
        key=lambda units: (
            memory_of(replace(s, micro_batch=units * s.micro_batch_unit)).needed_gib(s.ranks) > device_gib
        ),
    )
    return largest * s.micro_batch_unit


def least_memory_gib(s: Setting) -> float:
    """GiB a rank that a run cannot do without: weights, gradients in the weights' type, the optimizer's state. Of
    ZeRO 0 as if the optimizer were shared, which DeepSpeed does in 16 bits."""
    parts = state_parts_gib(
        s.sizes, max(s.zero_stage, 1), s.ranks, s.compute, False, s.optimizer_bytes, s.args.optim
    )
    return sum(parts.values())


def weight_bytes(compute: str) -> int:
    return 4 if compute == "fp32" else 2


def checkpoint_bytes(
    sizes: Any, zero_stage: int, compute: str, optimizer_bytes: float = FULL_STATES, optim: str = "adamw"
) -> int:
    """What the files of a checkpoint hold of weights and optimizer; FP8 histories and the like come on top.

    12 bytes a parameter of float32 weights and moments (8 of Muon's), and the weights in their own type. ZeRO 3 saves
    the float32 ones alone, and float32 without ZeRO has no second copy. optimizer_bytes: of packed
    states (train/engine/states.py), beside which the bf16 weights are saved once more.
    """
    once = zero_stage == 3 or (compute == "fp32" and zero_stage == 0)
    is_packed = compute != "fp32" and optimizer_bytes < FULL_STATES
    of_optimizer = optimizer_bytes + weight_bytes(compute) if is_packed else FULL_STATES
    less = 4 * layer_matrix_parameters(sizes) if optim == "muon" else 0
    return int(num_parameters(sizes) * (of_optimizer + (0 if once else weight_bytes(compute)))) - less
