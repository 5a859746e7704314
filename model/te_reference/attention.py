"""Scaled dot-product attention and the attention block of TransformerLayer.

Shapes: B batch, S tokens, N query heads, K key/value heads, D head dimension, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.te_reference.base import check_arguments
from model.te_reference.layernorm_linear import LayerNormLinear
from model.te_reference.linear import Linear
from model.te_reference.rotary import apply_rotary_pos_emb
from model.te_reference.tensor_core import cudnn_attention, emulating

CAUSAL = ("causal", "causal_bottom_right")
"""Mask types: the diagonal starts at the top left, or ends at the bottom right; the same for equal lengths.

"""
PACKED_CAUSAL = "padding_causal"
"""The mask type of format "thd": causal within each sequence of cu_seqlens.

"""
FORMATS = ("bshd", "sbhd", "thd")


def causal_mask(queries: int, keys: int, window: int, mask_type: str, device: torch.device) -> Tensor:
    """bool [queries, keys], True where a query sees a key: not after it, and at most `window` before it (-1 =
    any).
    """
    offset = keys - queries if mask_type == "causal_bottom_right" else 0
    query = torch.arange(queries, device=device)[:, None] + offset
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= query
    return visible & (query - key <= window) if window >= 0 else visible


class DotProductAttention(nn.Module):
    """te.DotProductAttention for causal attention with grouped queries and a sliding window; never in FP8.

    window_size: (left, 0), a query sees itself and `left` keys before it; None and (-1, 0): all of them. A
    Hugging Face sliding_window W is (W - 1, 0). qkv_format "bshd" or "sbhd", or "thd" with attn_mask_type
    "padding_causal": the sequences of cu_seqlens one after the other. Inside
    `tensor_core.emulated()` it rounds where cuDNN's bfloat16 kernels do.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        layer_number: int | None = None,
        softmax_scale: float | None = None,
        name: str | None = None,
        **others: Any,
    ):
        super().__init__()
        check_arguments(
            "DotProductAttention",
            {"qkv_format": qkv_format, "attn_mask_type": attn_mask_type, **others},
            {
                "qkv_format": FORMATS,
                "attn_mask_type": (PACKED_CAUSAL,) if qkv_format == "thd" else CAUSAL,
                "attention_type": ("self",),
                "bottom_right_diagonal": (None,),
                "softcap": (0.0,),
                "sequence_parallel": (False,),
                "tp_size": (1,),
                "tp_group": (None,),
                "get_rng_state_tracker": (None,),
                "cp_group": (None,),
                "cp_global_ranks": (None,),
                "cp_stream": (None,),
                "cp_comm_type": ("p2p",),
                "softmax_type": ("vanilla",),
                "return_max_logit": (False,),
            },
        )
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"num_attention_heads {num_attention_heads} must be divisible by num_gqa_groups "
                f"{num_gqa_groups}."
            )
        self.attention_dropout, self.softmax_scale = attention_dropout, softmax_scale
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window = self._window(window_size)
        self.layer_number, self.name = layer_number, name

    @staticmethod
    def _window(window_size: tuple[int, int] | None) -> int:
        left, right = window_size or (-1, 0)
        if left < -1 or right not in ((-1, 0) if left == -1 else (0,)):
            raise ValueError(
                f"window_size must be None, (-1, 0) or (keys before the query, 0), not {window_size}."
            )
        return left

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
    ) -> Tensor:
        """[B, S, N, D], [B, S', K, D] twice -> [B, S, N * D] (with S and B swapped for "sbhd"); for "thd" [T, N, D],
        [T, K, D] twice -> [T, N * D].

        attn_mask_type, window_size, qkv_format: override the constructor's. cu_seqlens_q and cu_seqlens_kv, for "thd":
        the same int32 [sequences + 1], where each sequence begins and T. max_seqlen_q and max_seqlen_kv: None, or what
        no sequence is longer than.
        Raises ValueError: heads or head dimension that are not the module's, an unsupported mask, or cu_seqlens that
        do not fit.
        """
        expected = [
            (self.num_attention_heads, self.kv_channels),
            *[(self.num_gqa_groups, self.kv_channels)] * 2,
        ]
        given = [tuple(t.shape[-2:]) for t in (query_layer, key_layer, value_layer)]
        if given != expected:
            raise ValueError(f"DotProductAttention: (heads, channels) must be {expected}, but are {given}.")
        mask_type, layout = attn_mask_type or self.attn_mask_type, qkv_format or self.qkv_format
        masks = (PACKED_CAUSAL,) if layout == "thd" else CAUSAL
        if layout not in FORMATS or mask_type not in masks:
            raise ValueError(
                f"qkv_format must be one of {', '.join(FORMATS)}, not {layout!r}, and its attn_mask_type one of "
                f"{', '.join(masks)}, not {mask_type!r}."
            )
        window = self.window if window_size is None else self._window(window_size)
        if layout == "thd":
            ends = _sequence_ends(
                len(query_layer), (cu_seqlens_q, cu_seqlens_kv), (max_seqlen_q, max_seqlen_kv)
            )
            return self._attend_packed(query_layer, key_layer, value_layer, window, ends)
        to_heads_first = (0, 2, 1, 3) if layout == "bshd" else (1, 2, 0, 3)
        q, k, v = (t.permute(to_heads_first) for t in (query_layer, key_layer, value_layer))
        back = (0, 2, 1, 3) if layout == "bshd" else (2, 0, 1, 3)
        return self._attend(q, k, v, window, mask_type).permute(back).flatten(2)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, window: int, ends: list[int]) -> Tensor:
        """Each sequence by itself: [T, N, D], [T, K, D] twice -> [T, N * D]."""
        outputs = []
        for begin, end in zip([0, *ends], ends, strict=False):
            if begin < end:
                alone = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
                out = self._attend(alone[0], alone[1], alone[2], window, "causal")
                outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int, mask_type: str) -> Tensor:
        """[B, N, S, D], [B, K, S', D] twice -> [B, N, S, D]."""
        visible = causal_mask(q.shape[2], k.shape[2], window, mask_type, q.device)
        dropout = self.attention_dropout if self.training else 0.0
        if emulating() and q.dtype in (torch.bfloat16, torch.float16) and not dropout:
            return cudnn_attention(q, k, v, visible, self.softmax_scale)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            dropout_p=dropout,
            scale=self.softmax_scale,
            enable_gqa=self.num_gqa_groups != self.num_attention_heads,
        )


def _sequence_ends(
    tokens: int, cu_seqlens: tuple[Tensor | None, Tensor | None], longest: tuple[int | None, int | None]
) -> list[int]:
    """Where each sequence of queries, and of keys, ends. Raises ValueError: see DotProductAttention.forward."""
    of_queries, of_keys = cu_seqlens
    if of_queries is None or of_keys is None or not torch.equal(of_queries, of_keys):
        raise ValueError(
            "DotProductAttention: 'thd' needs cu_seqlens_q and cu_seqlens_kv, with the same values."
        )
    bounds = of_queries.tolist()
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    limit = min((n for n in longest if n is not None), default=tokens)
    if of_queries.dtype != torch.int32 or bounds[0] or bounds[-1] != tokens or min(lengths) < 0:
        raise ValueError(
            f"DotProductAttention: cu_seqlens must be int32 and rise from 0 to the {tokens} tokens, not {bounds}."
        )
    if max(lengths) > limit:
        raise ValueError(
            f"DotProductAttention: a sequence has {max(lengths)} tokens, and max_seqlen is {limit}."
        )
    return bounds[1:]


class MultiheadAttention(nn.Module):
    """The attention block of TransformerLayer: layernorm_qkv, rotary positions, core_attention, proj.

    The rows of `layernorm_qkv.weight` are [q; k; v], or with qkv_weight_interleaved [q of the group, k, v]
    for each key/value head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int,
        *,
        attention_dropout: float,
        layernorm_epsilon: float,
        init_method: Callable[[Tensor], Any] | None,
        output_layer_init_method: Callable[[Tensor], Any] | None,
        layer_number: int | None,
        num_gqa_groups: int | None,
        qkv_weight_interleaved: bool,
        qkv_format: str,
        attn_mask_type: str,
        window_size: tuple[int, int] | None,
        params_dtype: torch.dtype | None,
        device: torch.device | str,
    ):
        super().__init__()
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.qkv_weight_interleaved, self.qkv_format = qkv_weight_interleaved, qkv_format
        placement: dict[str, Any] = {"bias": False, "params_dtype": params_dtype, "device": device}
        self.layernorm_qkv = LayerNormLinear(
            hidden_size,
            (num_attention_heads + 2 * self.num_gqa_groups) * kv_channels,
            eps=layernorm_epsilon,
            init_method=init_method,
            normalization="RMSNorm",
            **placement,
        )
        self.core_attention = DotProductAttention(
            num_attention_heads,
            kv_channels,
            self.num_gqa_groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
            window_size,
            layer_number=layer_number,
        )
        self.proj = Linear(
            num_attention_heads * kv_channels, hidden_size, init_method=output_layer_init_method, **placement
        )

    def _split(self, qkv: Tensor) -> list[Tensor]:
        """[..., (N + 2 K) D] -> q [..., N, D], k and v [..., K, D]."""
        groups = self.num_gqa_groups
        per_group = self.num_attention_heads // groups
        if not self.qkv_weight_interleaved:
            qkv = qkv.unflatten(-1, (-1, self.kv_channels))
            return list(qkv.split((self.num_attention_heads, groups, groups), dim=-2))
        qkv = qkv.unflatten(-1, (groups, per_group + 2, self.kv_channels))
        return [part.flatten(-3, -2) for part in qkv.split((per_group, 1, 1), dim=-2)]

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        **sequences: Any,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H], or [T, H] -> [T, H], without the residual. sequences: for "thd", cu_seqlens_q and so
        on of DotProductAttention."""
        qkv = self.layernorm_qkv(hidden_states, is_first_microbatch=is_first_microbatch)
        q, k, v = self._split(qkv)
        if rotary_pos_emb is not None:
            cu_seqlens = sequences.get("cu_seqlens_q")
            q, k = (
                apply_rotary_pos_emb(t, rotary_pos_emb, self.qkv_format, fused=True, cu_seqlens=cu_seqlens)
                for t in (q, k)
            )
        context = self.core_attention(q, k, v, attn_mask_type, window_size, **sequences)
        return self.proj(context, is_first_microbatch=is_first_microbatch)
