"""The te_linear variant: Hugging Face's Mistral architecture built from te.Linear modules, with the same parameter
names.

Read this variant first. te_layer.py contains the fused variant. decoder.py explains the shape suffixes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig

from model.config import has_qk_norm, head_dim
from model.decoder import MistralBase, causal_attention
from model.documents import Documents, attend
from model.fp8.precision import Precision
from model.variants import SpeedConfig


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _linear(precision: Precision, inputs: int, outputs: int) -> nn.Module:
    return precision.te.Linear(
        inputs, outputs, bias=False, params_dtype=precision.dtype, device=precision.device
    )


def _norm(config: MistralConfig, precision: Precision, features: int) -> nn.Module:
    return precision.te.RMSNorm(
        features, eps=config.rms_norm_eps, dtype=precision.dtype, device=precision.device
    )


class MistralAttention(nn.Module):
    """Grouped-query attention with rotary positions, and optionally a sliding window and norms for q and k."""

    def __init__(self, config: MistralConfig, precision: Precision, speed: SpeedConfig, index: int):
        super().__init__()
        te = precision.te
        self.head_dim = head_dim(config)
        self.apply_rotary_pos_emb = te.apply_rotary_pos_emb
        self.rotate = te.rotate if speed.fused_rope else None
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = _linear(precision, config.hidden_size, queries)
        self.k_proj = _linear(precision, config.hidden_size, keys)
        self.v_proj = _linear(precision, config.hidden_size, keys)
        has_norms = has_qk_norm(config)
        self.q_norm = _norm(config, precision, self.head_dim) if has_norms else nn.Identity()
        self.k_norm = _norm(config, precision, self.head_dim) if has_norms else nn.Identity()
        self.o_proj = _linear(precision, queries, config.hidden_size)
        self.core_attention = causal_attention(config, te, layer_number=index + 1)

    def _rotate(self, x_BTND: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        if self.rotate is not None and torch.is_grad_enabled():
            return self.rotate(x_BTND, freqs)
        return self.apply_rotary_pos_emb(x_BTND, freqs, tensor_format="bshd", fused=True)

    def forward(
        self, x_BTH: torch.Tensor, freqs: torch.Tensor, is_first: bool | None, documents: Documents | None
    ) -> torch.Tensor:
        heads = (*x_BTH.shape[:2], -1, self.head_dim)
        q_BTND = self.q_norm(self.q_proj(x_BTH, is_first_microbatch=is_first).view(heads))
        k_BTKD = self.k_norm(self.k_proj(x_BTH, is_first_microbatch=is_first).view(heads))
        q_BTND, k_BTKD = self._rotate(q_BTND, freqs), self._rotate(k_BTKD, freqs)
        v_BTKD = self.v_proj(x_BTH, is_first_microbatch=is_first).view(heads)
        out = attend(self.core_attention, q_BTND, k_BTKD, v_BTKD, documents)
        return self.o_proj(out, is_first_microbatch=is_first)


class MistralMLP(nn.Module):
    """Feed-forward block with SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: MistralConfig, precision: Precision, speed: SpeedConfig):
        super().__init__()
        self.swiglu = (precision.te.swiglu if speed.fused_swiglu else None) or _swiglu
        self.gate_proj = _linear(precision, config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(precision, config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(precision, config.intermediate_size, config.hidden_size)

    def forward(self, x_BTH: torch.Tensor, is_first: bool | None) -> torch.Tensor:
        gate = self.gate_proj(x_BTH, is_first_microbatch=is_first)
        up = self.up_proj(x_BTH, is_first_microbatch=is_first)
        return self.down_proj(self.swiglu(gate, up), is_first_microbatch=is_first)


class MistralDecoderLayer(nn.Module):
    def __init__(self, config: MistralConfig, precision: Precision, speed: SpeedConfig, index: int):
        super().__init__()
        self.self_attn = MistralAttention(config, precision, speed, index)
        self.mlp = MistralMLP(config, precision, speed)
        self.input_layernorm = _norm(config, precision, config.hidden_size)
        self.post_attention_layernorm = _norm(config, precision, config.hidden_size)

    def forward(
        self,
        x_BTH: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        is_first_microbatch: bool | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        x_BTH = x_BTH + self.self_attn(
            self.input_layernorm(x_BTH), rotary_pos_emb, is_first_microbatch, documents
        )
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH), is_first_microbatch)


class MistralForCausalLM(MistralBase):
    variant = "te_linear"
    layer_class = MistralDecoderLayer
