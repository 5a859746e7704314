"""The te_layer variant: decoder layers with the fused modules of te.TransformerLayer.

The layers have the same modules (norm + QKV projection, attention, norm + SwiGLU MLP), parameter names and results as
te.TransformerLayer, except that the norms of q and k (Qwen3) are parameters and not modules. The variant computes the
same model as te_linear.py with fewer, larger kernels, so prefer it for training. conversion.py maps its parameters to
Hugging Face names.

te.TransformerLayer itself is not used, because `speed.fused_rope` replaces the copies and rotations between the QKV
projection and attention with one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig

from model.config import has_qk_norm, head_dim
from model.decoder import MistralBase, causal_attention
from model.documents import Documents, attend
from model.fp8.precision import Precision
from model.fp8.te_backend import BackendError
from model.variants import SpeedConfig


def split_and_rotate(
    rotate: Callable[..., torch.Tensor],
    packed: torch.Tensor,
    freqs: torch.Tensor,
    N: int,
    K: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a packed QKV tensor into q, k and v, and apply rotary embeddings to q and k.

    If norm weights are given, RMSNorm is applied to each head of q and k before the rotation. model/fused/qkv_rope.py
    does the same in one kernel. Shapes: B batch, T tokens, N query heads, K key/value heads, D head dimension.

    Args:
        rotate: te.apply_rotary_pos_emb.
        packed: [B, T, (N + 2 K) D], ordered q, k, v.
        freqs: rotary angles, float32 [>= T, 1, 1, D].
        q_norm, k_norm: weights of RMSNorm [D], or both None.
        eps: epsilon of RMSNorm.

    Returns: q [B, T, N, D], k and v [B, T, K, D].
    """
    q, k, v = packed.unflatten(-1, (N + 2 * K, -1)).split([N, K, K], dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = F.rms_norm(q, q_norm.shape, q_norm, eps), F.rms_norm(k, k_norm.shape, k_norm, eps)
    q, k = (rotate(x, freqs, tensor_format="bshd", fused=True) for x in (q, k))
    return q, k, v.contiguous()


class FusedAttention(nn.Module):
    """Attention block: fused norm and QKV projection, optional norms of q and k, rotary embedding, attention and output
    projection.

    The weights of the q and k norms are parameters of this module, because a fused kernel applies these norms.
    """

    def __init__(self, config: MistralConfig, precision: Precision, speed: SpeedConfig, index: int):
        super().__init__()
        te, placement = precision.te, {"params_dtype": precision.dtype, "device": precision.device}
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        D = head_dim(config)
        self.eps = config.rms_norm_eps
        fused = te.split_and_rotate if speed.fused_rope else None
        for name in ("q_norm_weight", "k_norm_weight"):
            ones = torch.ones(D, dtype=precision.dtype, device=precision.device)
            self.register_parameter(name, nn.Parameter(ones) if has_qk_norm(config) else None)
        self.split_and_rotate = fused or partial(split_and_rotate, te.apply_rotary_pos_emb)
        self.layernorm_qkv = te.LayerNormLinear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * D,
            eps=config.rms_norm_eps,
            normalization="RMSNorm",
            bias=False,
            **placement,
        )
        self.core_attention = causal_attention(config, te, layer_number=index + 1)
        self.proj = te.Linear(self.num_heads * D, config.hidden_size, bias=False, **placement)

    def forward(
        self, x_BTH: torch.Tensor, freqs: torch.Tensor, is_first: bool | None, documents: Documents | None
    ) -> torch.Tensor:
        packed = self.layernorm_qkv(x_BTH, is_first_microbatch=is_first)
        q_BTND, k_BTKD, v_BTKD = self.split_and_rotate(
            packed,
            freqs,
            self.num_heads,
            self.num_kv_heads,
            self.q_norm_weight,
            self.k_norm_weight,
            self.eps,
        )
        out = attend(self.core_attention, q_BTND, k_BTKD, v_BTKD, documents)
        return self.proj(out, is_first_microbatch=is_first)


class FusedTransformerLayer(nn.Module):
    """Decoder layer with the same modules and parameter names as te.TransformerLayer."""

    def __init__(self, config: MistralConfig, precision: Precision, speed: SpeedConfig, index: int):
        super().__init__()
        self.self_attention = FusedAttention(config, precision, speed, index)
        self.layernorm_mlp = precision.te.LayerNormMLP(
            config.hidden_size,
            config.intermediate_size,
            eps=config.rms_norm_eps,
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            params_dtype=precision.dtype,
            device=precision.device,
        )
        if speed.fused_swiglu:
            self.layernorm_mlp.activation = precision.te.fused_swiglu
        self.add_residual = precision.te.add_residual

    def forward(
        self,
        x_BTH: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        is_first_microbatch: bool | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        attended = self.self_attention(x_BTH, rotary_pos_emb, is_first_microbatch, documents)
        x_BTH = self.add_residual(x_BTH, attended)
        return self.add_residual(x_BTH, self.layernorm_mlp(x_BTH, is_first_microbatch=is_first_microbatch))


class MistralForCausalLM(MistralBase):
    variant = "te_layer"
    layer_class = FusedTransformerLayer

    def pack_swiglu(self) -> None:
        """Reduce activation memory: store the input of SwiGLU in 8 bits, and recompute the output in the backward pass.

        This requires delayed scaling. It has no effect if `speed.fused_swiglu` is off, or in the CPU reference
        implementation.

        Raises BackendError if this GPU or the installed Transformer Engine does not support 8-bit inputs of SwiGLU.
        """
        activation = self.precision.te.packed_swiglu
        if activation is None:
            raise BackendError(
                "gradient_checkpointing mlp is not available with this GPU and Transformer Engine; set "
                "gradient_checkpointing to true or false",
                code="not_supported",
                key="gradient_checkpointing",
            )
        for layer in self.model.layers if self.speed.fused_swiglu else ():
            layer.layernorm_mlp.activation = activation
