"""CPU reference of the Transformer Engine modules used here: same classes, same parameters, same rounding, no GPU.

It is written from the behaviour of Transformer Engine 2.20.2 on a Hopper GPU, and
tests/model/te_reference/test_te_recorded.py compares it with tensors recorded there. Use it for development, tests and
checking numbers, not for speed.

FP8 GEMMs accumulate in float32, which is more precise than a Hopper GPU. So single output values of a layer round
differently, and FP8 rounding of these values enlarges the difference. With the GPU's sums instead
(tests/model/te_reference/tensor_core.py), whole layers, their gradients and FP8 state equal the GPU's bit for bit,
except for a rare rounding.

FP8 attention, biases, LayerNorm, other activations, tensor parallelism and MXFP8 or NVFP4 recipes are not implemented
and raise an error.
"""

from model.te_reference import recipe
from model.te_reference.attention import DotProductAttention
from model.te_reference.gemm import fp8_gradients, linear_in_float32
from model.te_reference.linear import LayerNormLinear, LayerNormMLP, Linear
from model.te_reference.norm import RMSNorm
from model.te_reference.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from model.te_reference.state import autocast

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
    "fp8_gradients",
    "linear_in_float32",
    "recipe",
]
