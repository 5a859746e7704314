"""The te_layer variant: each layer is one te.TransformerLayer (norm + fused qkv, attention, norm + fused SwiGLU MLP).

It computes the same model as modeling_mistral_fp8.py with fewer, larger kernels, so it is the variant to train with.
conversion.py maps its parameters to Hugging Face's.

With `speed.fused_rope` this file assembles the layer from the same TE modules, so that one kernel replaces the copies
and rotations between the qkv projection and attention. Parameters and their names do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MistralConfig

from model.config import head_dim, window_size
from model.documents import Documents, attend, reached
from model.fp8.precision import Precision
from model.mistral_base import MistralBase, causal_attention
from model.variants import SpeedConfig


def _transformer_layer(
    config: MistralConfig, precision: Precision, index: int, document_mask: bool
) -> nn.Module:
    return precision.te.TransformerLayer(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        num_gqa_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        # TE's default is a dropout of 0.1
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="padding_causal" if document_mask else "causal",
        window_size=window_size(config),
        attn_input_format="thd" if document_mask else "bshd",
        layer_number=index + 1,
        fuse_qkv_params=True,
        # keep the rows in the order [q; k; v], see conversion.py
        qkv_weight_interleaved=False,
        params_dtype=precision.dtype,
        device=precision.device,
    )


class FusedAttention(nn.Module):
    """Norm and qkv projection, one kernel that splits and rotates, attention, output projection."""

    def __init__(self, config: MistralConfig, precision: Precision, index: int):
        super().__init__()
        te, placement = precision.te, {"params_dtype": precision.dtype, "device": precision.device}
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        D = head_dim(config)
        self.split_and_rotate = te.split_and_rotate
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
        q_BTND, k_BTKD, v_BTKD = self.split_and_rotate(packed, freqs, self.num_heads, self.num_kv_heads)
        out = attend(self.core_attention, q_BTND, k_BTKD, v_BTKD, documents)
        return self.proj(out, is_first_microbatch=is_first)


class FusedTransformerLayer(nn.Module):
    """A layer with te.TransformerLayer's modules and parameter names, around FusedAttention."""

    def __init__(self, config: MistralConfig, precision: Precision, index: int):
        super().__init__()
        self.self_attention = FusedAttention(config, precision, index)
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

    def forward(
        self,
        x_BTH: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        is_first_microbatch: bool | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        x_BTH = x_BTH + self.self_attention(x_BTH, rotary_pos_emb, is_first_microbatch, documents)
        return x_BTH + self.layernorm_mlp(x_BTH, is_first_microbatch=is_first_microbatch)


class MistralForCausalLM(MistralBase):
    variant = "te_layer"

    def make_layer(
        self, config: MistralConfig, precision: Precision, speed: SpeedConfig, index: int
    ) -> nn.Module:
        layer = (
            FusedTransformerLayer(config, precision, index)
            if speed.fused_rope
            else _transformer_layer(config, precision, index, self.document_mask)
        )
        if speed.fused_swiglu:
            layer.layernorm_mlp.activation = precision.te.fused_swiglu
        return layer

    def enter_layers(
        self, hidden_BTH: torch.Tensor, documents: Documents | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.speed.fused_rope:
            return super().enter_layers(hidden_BTH, documents)
        window = reached(window_size(self.config), hidden_BTH.shape[1])
        if documents is None:
            hidden_BTH, arguments = super().enter_layers(hidden_BTH, documents)
            return hidden_BTH, {**arguments, "window_size": window}
        # te.TransformerLayer itself restarts the positions in each document
        freqs = self.rope_freqs(hidden_BTH.shape[1], hidden_BTH.device)
        arguments = {"rotary_pos_emb": freqs, "window_size": window, **documents.attention_arguments()}
        return hidden_BTH.flatten(0, 1), arguments
