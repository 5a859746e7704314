"""Predict the time of a training step.

The prediction divides the work of a step by fitted rates and multiplies the result by a correction factor. The rates
and factors are fitted to steps measured on one H200 (test_fp8/results/hare_*_step.json). Predictions for other GPUs and
for links between GPUs use data sheets. tests/train/planning compares the predictions with the measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.config import attention_pairs
from train.planning.memory import head_bytes, saved_by_layer
from train.planning.setting import GPUS_OF_A_NODE, Setting, layer_widths


@dataclass(frozen=True)
class Gpu:
    """Memory size and bandwidths of a GPU model.

    Attributes:
        memory_gib: GPU memory as reported by torch, in GiB.
        memory_tb_s: Memory bandwidth from the data sheet, in TB/s.
        nvlink_gb_s: NVLink bandwidth per direction from the data sheet, in GB/s.
    """

    name: str
    memory_gib: float
    memory_tb_s: float
    nvlink_gb_s: float
    capability: tuple[int, int] = (9, 0)


GPUS = {
    "h100": Gpu("NVIDIA H100 SXM", 79.1, 3.35, 450),
    "h200": Gpu("NVIDIA H200", 139.8, 4.8, 450),
    "h800": Gpu("NVIDIA H800 SXM", 79.1, 3.35, 200),
}
MEASURED_ON = GPUS["h200"]

# Rates fitted to measured steps with te_layer: FLOP/s for matrix products and causal attention, and bytes/s for saved
# activations. SAVED_BYTES is below the memory bandwidth because activations are written and read several times.
BF16_FLOPS, FP8_FLOPS, ATTENTION_FLOPS, SAVED_BYTES = 700e12, 1300e12, 350e12, 0.5e12
# Bytes moved per parameter in a micro-batch: EACH_BYTES always, GRADIENT_BYTES more without main_grad, and
# QUANTIZE_BYTES more if weights are quantized. COPIED_BYTES is the rate at which these bytes move, in bytes/s.
EACH_BYTES, GRADIENT_BYTES, QUANTIZE_BYTES, COPIED_BYTES = 28, 24, 4, 4e12
ADAMW_S = 1.5e-11  # seconds per parameter
PACKING_S = {"bf16_remainder": 2.8e-11, "fp8": 5.8e-11, "int8": 8.9e-11}  # seconds per parameter in addition
MUON_FLOP_S = 3.5e-15  # seconds per FLOP of Muon's update
# Step time of each FP8 recipe relative to delayed scaling.
RECIPE_FACTOR = {"delayed": 1.0, "current": 1.047, "block": 1.116}
MLP_FACTOR = 1.02  # time of the layers with gradient_checkpointing "mlp"
LINK_SHARE = 0.5  # assumed fraction of a link's bandwidth that a collective or a copy reaches
# Bandwidths for optimizer offload, according to data sheets, in bytes/s: a GPU's link to the host (PCIe 5.0 x16, per
# direction), and the host memory of a node (two processors with eight channels of DDR5-4800).
PCIE_BYTES, HOST_BYTES = 63e9, 614e9
# Bytes of host memory that AdamW reads and writes per parameter: 28 for the update, 8 for clipping the gradient, and 6
# for rounding the weight to 16 bits.
HOST_ADAMW_BYTES = 28 + 8 + 6
ZERO_3_LAYER_S = 7e-4  # seconds that ZeRO 3 adds to the passes of a layer, measured on two and four GPUs

# Measured step time divided by the uncorrected prediction. SIZES are the numbers of parameters of the measured models,
# hare_0.4b, hare_1.1b and hare_2.0b.
SIZES = (88.6e6, 1.123e9, 1.749e9)
CORRECTION = {
    ("te_layer", "fp8"): (0.926, 0.940, 1.019),
    ("te_layer", "bf16"): (0.954, 0.916, 1.002),
    ("te_linear", "fp8"): (0.972, 0.987, 1.033),
    ("te_linear", "bf16"): (1.020, 0.927, 1.024),
}
# Host time to launch the kernels of a micro-batch, in ms per layer.
LAUNCH_MS = {
    ("te_layer", "fp8"): 3.6,
    ("te_layer", "bf16"): 3.1,
    ("te_linear", "fp8"): 6.7,
    ("te_linear", "bf16"): 5.3,
}


@dataclass(frozen=True)
class Estimate:
    """The predicted training speed of a run.

    Attributes:
        step_s: Time of a training step in seconds.
        tokens_per_second: Training speed of all ranks together.
        basis: Description of the measurements and data sheets on which the prediction is based.
        within: Relative uncertainty of the prediction, such as 0.06 for 6 %.
    """

    step_s: float
    tokens_per_second: float
    basis: str
    within: float


def estimate(s: Setting, gpu: Gpu, network_gbit_s: float = 400) -> Estimate:
    """Predict the training speed of a run, averaged over the phases of precision.schedule.

    Args:
        network_gbit_s: Network bandwidth between nodes, in Gbit/s per GPU.
    """
    step_s = sum(share * _step_s(phase, gpu, network_gbit_s) for share, phase in s.phases)
    near = min(abs(math.log(s.parameters / size)) for size in SIZES)
    reasons = [
        ("steps measured on an H200", 0.06, True),
        ("this model size was not measured", 0.06, near > 0.1),
        ("models this small were not measured", 0.5, s.parameters < SIZES[0] / 2),
        (f"{gpu.name} according to its data sheet", 0.08, gpu is not MEASURED_ON),
        ("links between GPUs according to data sheets", 0.04, s.ranks > 1),
        ("the network between nodes was not measured", 0.15, s.ranks > GPUS_OF_A_NODE),
        ("ZeRO 3 was measured on at most 4 GPUs", 0.1, s.zero_stage == 3 and s.ranks > 4),
        ("optimizer offload was measured with one model", 0.2, s.offloads),
        ("a Qwen3 model ran 17 % faster than predicted on an H200", 0.12, s.sizes.model_type == "qwen3"),
    ]
    found = [(text, share) for text, share, holds in reasons if holds]
    basis, within = "; ".join(text for text, _ in found), round(sum(share for _, share in found), 2)
    return Estimate(step_s, s.step_tokens / step_s, basis, within)


def _step_s(s: Setting, gpu: Gpu, network_gbit_s: float) -> float:
    """Return the predicted time of a step in one phase of precision.schedule, in seconds."""
    computing = s.accumulation * _micro_batch_s(s, gpu) + _optimizer_s(s, gpu)
    corrections = CORRECTION[s.args.model.variant, s.compute]
    correction = float(np.interp(math.log(s.parameters), np.log(SIZES), corrections))
    return computing * correction + _communication_s(s, gpu, network_gbit_s) + _offload_s(s)


def _micro_batch_s(s: Setting, gpu: Gpu) -> float:
    """Return the predicted time for the forward and backward pass of a micro-batch, in seconds."""
    H, _, q, _, V = layer_widths(s.sizes)
    layers = s.sizes.num_hidden_layers
    # The square root assumes that the GPU waits for memory in half of this time.
    faster = math.sqrt(gpu.memory_tb_s / MEASURED_ON.memory_tb_s)
    products = 6 * s.layer_matrices
    of_layers = products * (s.fp8_layers / FP8_FLOPS + (layers - s.fp8_layers) / BF16_FLOPS)
    of_layers += 12 * layers * q * attention_pairs(s.sizes, s.seq_length) / ATTENTION_FLOPS
    plain = replace(s, recompute=False)
    saved = s.fp8_layers * saved_by_layer(plain, True) + (layers - s.fp8_layers) * saved_by_layer(
        plain, False
    )
    of_layers += saved / (SAVED_BYTES * faster)
    forward, gradients = (
        FP8_FLOPS if fp8 else BF16_FLOPS for fp8 in (s.fp8_head, s.fp8_head or s.fp8_head_gradients)
    )
    head = 2 * H * V / forward + 4 * H * V / gradients + head_bytes(s) / (SAVED_BYTES * faster)
    recomputed = {True: 4 / 3, "mlp": MLP_FACTOR, False: 1}[s.recompute]
    of_layers *= recomputed * (RECIPE_FACTOR[s.recipe] if s.fp8 else 1)
    quantized = QUANTIZE_BYTES if s.fp8 and not s.keeps_fp8_weights else 0
    copied = (EACH_BYTES + (0 if s.main_grad else GRADIENT_BYTES) + quantized) * s.parameters
    launch_s = (
        0.0 if s.cuda_graphs else LAUNCH_MS[s.args.model.variant, s.compute] / 1e3 * layers * recomputed
    )
    return max(s.tokens * (of_layers + head) + copied / (COPIED_BYTES * faster), launch_s)


def _optimizer_s(s: Setting, gpu: Gpu) -> float:
    """Return the predicted time of the optimizer step including gradient clipping, in seconds.

    With ZeRO, the time is divided by the number of ranks.
    """
    if s.offloads:
        return 0
    each = ADAMW_S + (PACKING_S[s.optimizer_states] if s.packs else 0)
    seconds = each * s.parameters * MEASURED_ON.memory_tb_s / gpu.memory_tb_s
    if s.args.optim == "muon":
        seconds += newton_schulz_flops(s.sizes) * MUON_FLOP_S
    return seconds / (s.ranks if s.zero_stage else 1)


def _offload_s(s: Setting) -> float:
    """Return the predicted time that optimizer offload adds to a step, in seconds.

    A step copies float32 gradients to the host and 16-bit weights to the GPU. With ZeRO 3, gradients accumulate on the
    host, so each micro-batch also copies them to the GPU and back. No copy is assumed to overlap with computation.
    AdamW is limited by the memory of the host, which the ranks of a node share.
    """
    if not s.offloads:
        return 0
    copied = 4 + 2 + (8 * s.accumulation if s.zero_stage == 3 else 0)
    part = s.parameters / s.ranks
    return part * (copied / PCIE_BYTES + HOST_ADAMW_BYTES * s.node_ranks / HOST_BYTES) / LINK_SHARE


def newton_schulz_flops(sizes: Any) -> float:
    """Return the number of FLOPs that Muon needs per step to orthogonalize the matrices of the decoder layers.

    For an m x n matrix with m < n, DeepSpeed 0.19.8 (zeropower_via_gram_newtonschulz) computes 14 products of two m x m
    matrices and 4 products of an m x m and an m x n matrix. For m = n it computes 15 products.
    """
    H, I, q, kv, _ = layer_widths(sizes)  # noqa: E741
    flops = 0.0
    for rows, count in ((q, 2), (kv, 2), (I, 3)):
        m, n = sorted((rows, H))
        flops += count * (30 * m**3 if m == n else 28 * m**3 + 8 * m * m * n)
    return sizes.num_hidden_layers * flops


def _communication_s(s: Setting, gpu: Gpu, network_gbit_s: float) -> float:
    """Return the predicted time that all collectives add to a step, in seconds.

    The collectives use rings, so the slowest link determines the time. GPUs are linked by NVLink within a node and by
    one network card per GPU between nodes.
    """
    if s.ranks == 1:
        return 0
    network = GPUS_OF_A_NODE * network_gbit_s / 8 if s.ranks > GPUS_OF_A_NODE else math.inf
    link = min(gpu.nvlink_gb_s, network) * 1e9
    # seconds to send one byte per parameter once around the ring
    passes = (s.ranks - 1) / s.ranks * s.parameters / (link * LINK_SHARE)
    gradient = 4 if s.reduces_in_float32 else 2  # bytes per parameter
    # A reduce-scatter (train/engine/zero.py) sends half as much as an all-reduce. With Muon, only its own matrices are
    # all-reduced, so the predicted time is too long.
    scattered = s.bf16_optimizer and s.args.optim != "muon"
    at_end = passes * ((1 if scattered else 2) * gradient + (2 if s.zero_stage else 0))
    if s.zero_stage == 3:
        sent = s.accumulation * passes * (gradient + 2 * s.gathered_bytes)
        if s.ranks > GPUS_OF_A_NODE:
            return sent
        # Within a node, communication overlaps with computation. ZeRO 3 is not assumed to be faster than ZeRO 1.
        return min(sent, max(at_end, s.accumulation * s.sizes.num_hidden_layers * ZERO_3_LAYER_S))
    if s.zero_stage == 2:
        # DeepSpeed all-reduces each bucket, although a rank keeps only its own part.
        return s.accumulation * passes * 2 * gradient + passes * 2
    return at_end
