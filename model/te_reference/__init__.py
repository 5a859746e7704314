"""CPU reference implementation of the Transformer Engine modules used here: same classes, parameters and rounding, no
GPU.

The implementation follows the behavior of Transformer Engine 2.20.2 on a Hopper GPU.
tests/model/te_reference/test_te_recorded.py compares it with tensors recorded there. Use it for development, tests and
numerical checks. It is not optimized for speed.

FP8 GEMMs accumulate in float32, which is more precise than a Hopper GPU. Single outputs of a layer therefore round
differently, and FP8 rounding enlarges the difference. With a simulation of the GPU's accumulation
(tests/model/te_reference/tensor_core.py), whole layers, their gradients and FP8 state equal the GPU's results bit for
bit, except for a rare rounding.

FP8 attention, biases, LayerNorm, other activations, tensor parallelism and the NVFP4 recipe are not implemented and
raise an error. MXFP8 follows the sources of Transformer Engine and has not been compared with a GPU.
"""

from model.te_reference import recipe
from model.te_reference.attention import DotProductAttention, RotaryPositionEmbedding, apply_rotary_pos_emb
from model.te_reference.base import autocast, cast_weight, read_weights
from model.te_reference.gemm import fp8_gradients, linear_in_float32
from model.te_reference.linear import LayerNormLinear, LayerNormMLP, Linear, RMSNorm

REFERENCE_OF = "Transformer Engine 2.20.2"

__all__ = [
    "REFERENCE_OF",
    "DotProductAttention",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "autocast",
    "cast_weight",
    "fp8_gradients",
    "linear_in_float32",
    "read_weights",
    "recipe",
]
