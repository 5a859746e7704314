"""The forward pass of the engine: a prompt at once, or one token of each row, over a cache of fixed size.

What ran is counted where it runs, by the operands.
Shapes: B rows (samples), T tokens, S cache, H hidden, N query heads, K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import torch

from fp8_inference_demo import reference
from fp8_inference_demo.weights import Layer, Matrix, Weights
from model.config import head_dim, rope_theta

# Up to here each weight is read once, as it is, and activations stay bf16; above both operands of an FP8 GEMM are FP8.
# Measured: test_fp8/results/decode.json.
FEW_ROWS = 64
# Tokens of prompts that go through the layers at once: what bounds the memory of activations.
PREFILL_TOKENS = 32768


class Cache:
    """Keys and values of B rows: [layers, B, K, S, D], rotated."""

    def __init__(self, weights: Weights, batch_size: int, max_length: int):
        c = weights.config
        shape = (c.num_hidden_layers, batch_size, c.num_key_value_heads, max_length, head_dim(c))
        self.keys = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        self.values = torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    @property
    def max_length(self) -> int:
        return self.keys.shape[3]


class Forward:
    """The model: `prefill` and `decode`, neither of which waits for the device.

    ran: matrix products by what they read, "fp8 weights" (few rows), "fp8 gemm" (many rows) or the dtype.
    """

    def __init__(self, weights: Weights, cache: Cache):
        config = weights.config
        self.weights, self.cache, self.config = weights, cache, config
        self.kernels: ModuleType | None = None  # plain torch
        self.window, self.eps = config.sliding_window, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        half = torch.arange(0, head_dim(config), 2, dtype=torch.float32, device=weights.device)
        frequencies = 1.0 / rope_theta(config) ** (half / head_dim(config))
        positions = torch.arange(cache.max_length, dtype=torch.float32, device=weights.device)
        self.angles = positions[:, None] * frequencies
        self.ran: Counter[str] = Counter()

    # ------------------------------------------------------------ one token a row

    def decode(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Logits float32 [B, V] after one more token a row, which goes into the cache at its position.

        tokens, positions: int64 [B], on the device, below V and S.
        """
        x_BH = self.weights.embedding[tokens_B]
        for index, layer in enumerate(self.weights.layers):
            x_BH = self._decode_layer(x_BH, layer, index, positions_B)
        return self._head(x_BH)

    def _decode_layer(
        self, x_BH: torch.Tensor, layer: Layer, index: int, positions_B: torch.Tensor
    ) -> torch.Tensor:
        B = x_BH.shape[0]
        keys, values = self.cache.keys[index, :B], self.cache.values[index, :B]
        if self.kernels is not None and B <= FEW_ROWS:
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                self._note(matrix, few=True)
            return self.kernels.decode_layer(self, x_BH, layer, keys, values, positions_B)
        qkv = self._linear(reference.norm(x_BH, layer.input_norm, self.eps), layer.qkv)
        q, k, v = self._split(qkv[:, None], positions_B[:, None])
        rows = torch.arange(B, device=x_BH.device)
        keys[rows, :, positions_B], values[rows, :, positions_B] = k[:, :, 0], v[:, :, 0]
        attend = reference.attend_cache if self.kernels is None else self.kernels.attend_cache
        x_BH = x_BH + self._linear(attend(q[:, :, 0], keys, values, positions_B, self.window), layer.o)
        gate_up = self._linear(reference.norm(x_BH, layer.post_norm, self.eps), layer.gate_up)
        return x_BH + self._linear(reference.swiglu(gate_up), layer.down)

    # ------------------------------------------------------------ whole prompts

    def prefill(self, ids_BT: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Hidden states [B, T, H] before the last norm, and the cache of rows first_row to first_row + B filled.

        ids: int64 [B, T], shorter prompts padded at their ends: what is computed there is overwritten later, position
        by position, before anything attends to it.
        """
        B, T = ids_BT.shape
        x_BTH = self.weights.embedding[ids_BT]
        positions = torch.arange(T, device=ids_BT.device).expand(B, T)
        for index, layer in enumerate(self.weights.layers):
            qkv = self._rows_of(x_BTH, layer.input_norm, layer.qkv)
            q, k, v = self._split(qkv, positions)
            self.cache.keys[index, first_row : first_row + B, :, :T] = k
            self.cache.values[index, first_row : first_row + B, :, :T] = v
            out = reference.attend_prompt(q, k, v, self.window).reshape(B, T, -1)
            x_BTH = x_BTH + self._linear(out.flatten(0, 1), layer.o, few=False).view_as(x_BTH)
            gate_up = self._rows_of(x_BTH, layer.post_norm, layer.gate_up).flatten(0, 1)
            x_BTH = x_BTH + self._swiglu_linear(gate_up, layer.down).view_as(x_BTH)
        return x_BTH

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [M, H] -> logits float32 [M, V]."""
        return self._head(x)

    # ------------------------------------------------------------ pieces

    def _rows_of(self, x_BTH: torch.Tensor, norm: torch.Tensor, weight: Matrix) -> torch.Tensor:
        x = x_BTH.flatten(0, 1)
        if self.kernels is not None and weight.scale is not None:
            self._note(weight, few=False)
            out = self.kernels.gemm(self.kernels.norm_quantize(x, norm, self.eps), weight)
        else:
            out = self._linear(reference.norm(x, norm, self.eps), weight, few=False)
        return out.view(*x_BTH.shape[:2], -1)

    def _swiglu_linear(self, gate_up: torch.Tensor, weight: Matrix) -> torch.Tensor:
        if self.kernels is not None and weight.scale is not None:
            self._note(weight, few=False)
            return self.kernels.gemm(self.kernels.swiglu_quantize(gate_up), weight)
        return self._linear(reference.swiglu(gate_up), weight, few=False)

    def _split(
        self, qkv_BTR: torch.Tensor, positions_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q [B, N, T, D], rotated k and v [B, K, T, D] of the fused projection's rows [q; k; v]."""
        heads = qkv_BTR.unflatten(-1, (-1, head_dim(self.config)))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 2)
        q, k = (reference.rotate(x, positions_BT, self.angles) for x in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _linear(self, x: torch.Tensor, weight: Matrix, few: bool | None = None) -> torch.Tensor:
        few = x.shape[0] <= FEW_ROWS if few is None else few
        self._note(weight, few)
        if few:
            return reference.few_rows(x, weight)
        if self.kernels is not None and weight.scale is not None:
            return self.kernels.gemm(self.kernels.quantize_rows(x), weight)
        return reference.many_rows(x, weight)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        x = reference.norm(x, self.weights.norm, self.eps)
        return reference.few_rows(x, self.weights.head).float()

    def _note(self, weight: Matrix, few: bool) -> None:
        if weight.values.dtype == torch.float8_e4m3fn:
            self.ran["fp8 weights" if few else "fp8 gemm"] += 1
        else:
            self.ran[str(weight.values.dtype).removeprefix("torch.")] += 1
