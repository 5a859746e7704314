"""CPU reference of the Transformer Engine modules used here: same classes, same parameters, same rounding, no
GPU.

Written from what Transformer Engine 2.20.2 does on a Hopper GPU; tests/model/test_te_recorded.py compares it
with tensors recorded there. It is for development, tests and checking numbers, not for speed.

Everything quantized is computed in float32 from exact FP8 values, so a result differs from the GPU's only by
the order of float32 sums. FP8 attention, biases, LayerNorm, other activations, tensor parallelism and MXFP8
or NVFP4 recipes are
not here: asking for them raises an error.
"""

from model.te_reference import recipe
from model.te_reference.attention import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from model.te_reference.layernorm_linear import LayerNormLinear
from model.te_reference.layernorm_mlp import LayerNormMLP
from model.te_reference.linear import Linear
from model.te_reference.norm import RMSNorm
from model.te_reference.recompute import checkpoint
from model.te_reference.state import autocast
from model.te_reference.transformer import TransformerLayer

REFERENCE_OF = "Transformer Engine 2.20.2"

__all__ = [
    "REFERENCE_OF",
    "DotProductAttention",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "recipe",
]
