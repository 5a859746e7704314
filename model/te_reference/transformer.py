"""TransformerLayer: attention and SwiGLU MLP, each with a preceding norm and a residual connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.te_reference.attention import MASK_OF_FORMAT, MultiheadAttention
from model.te_reference.base import check_supported
from model.te_reference.linear import LayerNormMLP


class TransformerLayer(nn.Module):
    """te.TransformerLayer for a Llama-style decoder: RMSNorm, SwiGLU, no biases, one fused qkv weight.

    Parameters: self_attention.layernorm_qkv.{layer_norm_weight, weight}, self_attention.proj.weight,
    layernorm_mlp.{layer_norm_weight, fc1_weight, fc2_weight}.

    The defaults are Transformer Engine's. Values that the reference does not support raise an error that says which
    ones it does.

    Args:
        kv_channels: size of a head; default hidden_size / num_attention_heads.
        window_size: as in DotProductAttention.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        check_supported(
            "TransformerLayer",
            hidden_dropout=(hidden_dropout, 0.0),
            attention_dropout=(attention_dropout, 0.0),
            self_attn_mask_type=(self_attn_mask_type, MASK_OF_FORMAT.get(attn_input_format)),
            fuse_qkv_params=(fuse_qkv_params, True),
            qkv_weight_interleaved=(qkv_weight_interleaved, False),
            bias=(bias, False),
            activation=(activation, "swiglu"),
            normalization=(normalization, "RMSNorm"),
        )
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels or hidden_size // num_attention_heads,
            layernorm_epsilon=layernorm_epsilon,
            num_gqa_groups=num_gqa_groups,
            qkv_format=attn_input_format,
            window_size=window_size,
            params_dtype=params_dtype,
            device=device,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            bias=bias,
            normalization=normalization,
            activation=activation,
            params_dtype=params_dtype,
            device=device,
        )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Compute [B, S, hidden_size] (or [T, ...] for "thd") -> the same shape.

        Args:
            is_first_microbatch: as in Linear.
            rotary_pos_emb: angles [>= S, 1, 1, kv_channels] of RotaryPositionEmbedding.
            cu_seqlens_q: for "thd", as in DotProductAttention, for queries and keys; also max_seqlen_q.
            cu_seqlens_kv: for cross attention, which is not supported; no effect, as max_seqlen_kv.
            window_size: overrides the constructor's.
        """
        hidden_states = hidden_states + self.self_attention(
            hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            is_first_microbatch=is_first_microbatch,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_q,
            window_size=window_size,
        )
        return hidden_states + self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
