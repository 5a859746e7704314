"""The te.TransformerLayer variant: norm + fused qkv, attention and norm + fused SwiGLU MLP in one TE module a layer.

The same model as modeling_mistral_fp8.py with fewer, larger kernels: the one to train with. conversion.py has the map
between its parameters and Hugging Face's.
"""

from __future__ import annotations

from torch import nn
from transformers import MistralConfig

from model.mistral_base import KVCache, MistralBase, head_dim, window_size
from model.precision import Precision


def _transformer_layer(config: MistralConfig, precision: Precision, index: int) -> nn.Module:
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
        # TE's defaults are 0.1: a model that silently drops out is another model
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        window_size=window_size(config),
        attn_input_format="bshd",
        layer_number=index + 1,
        fuse_qkv_params=True,
        # rows in the plain order [q; k; v], see conversion.py
        qkv_weight_interleaved=False,
        params_dtype=precision.dtype,
        device=precision.device,
    )


class MistralForCausalLM(MistralBase):
    variant = "te_layer"
    make_layer = staticmethod(_transformer_layer)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Raises ValueError: this variant does not decode."""
        raise ValueError(
            "the te_layer variant does not decode; load the same weights as te_linear, which has a cache"
        )
