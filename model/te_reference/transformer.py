"""TransformerLayer: attention and SwiGLU MLP with norms before and residuals around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.te_reference.attention import CAUSAL, FORMATS, PACKED_CAUSAL, MultiheadAttention
from model.te_reference.base import PARALLELISM, check_arguments
from model.te_reference.layernorm_mlp import LayerNormMLP


class TransformerLayer(nn.Module):
    """te.TransformerLayer for a Llama-style decoder: RMSNorm, SwiGLU, no biases, one fused qkv weight.

    Parameters: self_attention.layernorm_qkv.{layer_norm_weight, weight}, self_attention.proj.weight,
    layernorm_mlp.{layer_norm_weight, fc1_weight, fc2_weight}. The defaults are Transformer Engine's, several
    of which
    the reference does not have: give bias=False, normalization="RMSNorm", activation="swiglu",
    fuse_qkv_params=True.

    hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, kv_channels: sizes; kv_channels is that
    of a head, default hidden_size / num_attention_heads. window_size: as in DotProductAttention.
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
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
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
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        device: torch.device | str = "cpu",
        name: str | None = None,
        **others: Any,
    ):
        super().__init__()
        _check_layer_arguments(
            {
                "self_attn_mask_type": self_attn_mask_type,
                "fuse_qkv_params": fuse_qkv_params,
                "bias": bias,
                "activation": activation,
                "normalization": normalization,
                "attn_input_format": attn_input_format,
                **others,
            }
        )
        self.hidden_dropout, self.layer_number, self.name = hidden_dropout, layer_number, name
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels or hidden_size // num_attention_heads,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            layer_number=layer_number,
            num_gqa_groups=num_gqa_groups,
            qkv_weight_interleaved=qkv_weight_interleaved,
            qkv_format=attn_input_format,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            params_dtype=params_dtype,
            device=device,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
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
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Tensor:
        """[B, S, hidden_size] (or [S, B, ...] for "sbhd", [T, ...] for "thd") -> the same shape.

        cu_seqlens_q, max_seqlen_q: for "thd", as in DotProductAttention, for queries and keys; cu_seqlens_kv,
        max_seqlen_kv: for cross attention, which is not here, without effect.
        rotary_pos_emb: angles [>= S, 1, 1, kv_channels] of RotaryPositionEmbedding. is_first_microbatch: as
        in Linear.
        """
        attention = self.self_attention(
            hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            is_first_microbatch=is_first_microbatch,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_q,
        )
        hidden_states = self._add(attention, hidden_states)
        mlp = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
        return self._add(mlp, hidden_states)

    def _add(self, block: Tensor, residual: Tensor) -> Tensor:
        return residual + F.dropout(block, self.hidden_dropout, self.training)


def _check_layer_arguments(given: dict[str, Any]) -> None:
    check_arguments(
        "TransformerLayer",
        given,
        {
            "self_attn_mask_type": (PACKED_CAUSAL,) if given["attn_input_format"] == "thd" else CAUSAL,
            "fuse_qkv_params": (True,),
            "bias": (False,),
            "activation": ("swiglu",),
            "activation_params": (None,),
            "normalization": ("RMSNorm",),
            "attn_input_format": FORMATS,
            "bottom_right_diagonal": (None,),
            "softcap": (0.0,),
            "enc_dec_attn_mask_type": ("no_mask",),
            "enc_dec_window_size": (None,),
            "enc_dec_bottom_right_diagonal": (None,),
            "apply_residual_connection_post_layernorm": (False,),
            "output_layernorm": (False,),
            "parallel_attention_mlp": (False,),
            "layer_type": ("encoder",),
            "drop_path_rate": (0.0,),
            "set_parallel_mode": (False,),
            "zero_centered_gamma": (False,),
            "rotary_pos_interleaved": (False,),
            "qk_norm_type": (None,),
            "qk_norm_before_rope": (False,),
            "softmax_type": ("vanilla",),
            **PARALLELISM,
        },
    )
