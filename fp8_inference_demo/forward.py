"""Forward pass with a fixed-size KV cache, for whole prompts (prefill) or for one token per row (decode).

The operations are Triton kernels on a Hopper or later GPU, and plain torch elsewhere.
Shapes: B rows (samples), T tokens, S cache positions, H hidden, N query heads, K key/value heads, D head dimension, V
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from fp8_inference_demo import reference
from fp8_inference_demo.reference import LayerContext
from fp8_inference_demo.weights import Layer, Matrix, Weights
from model.config import head_dim, rope_frequencies

# Up to this number of rows, activations keep the precision of bf16. This costs almost no time, because reading the
# weights takes longer than the computation. With more rows, weights and activations are FP8.
FEW_ROWS = 16
# Maximum number of prompt tokens per prefill of several prompts. This limits the memory for activations.
PREFILL_TOKENS = 32768


class Cache:
    """KV cache for B rows. Keys are stored with RoPE applied.

    keys, values: [layers, B, K, S, D] with K key/value heads, S context length and D head dimension.
    """

    def __init__(self, weights: Weights, batch_size: int, max_length: int):
        c = weights.config
        shape = (c.num_hidden_layers, batch_size, c.num_key_value_heads, max_length, head_dim(c))
        self.keys = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        self.values = torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    @property
    def max_length(self) -> int:
        return self.keys.shape[3]


def choose_operations(weights: Weights) -> ModuleType:
    """Return the module with the operations for the forward pass.

    The result is `kernels` for bf16 or FP8 on a Hopper or later GPU, and `reference` otherwise.
    """
    if weights.device.type != "cuda" or weights.dtype == torch.float32:
        return reference
    if torch.cuda.get_device_capability(weights.device) < (9, 0):
        return reference
    from fp8_inference_demo import kernels

    return kernels


class Forward:
    """Forward pass of a model with its KV cache. `prefill` and `decode` do not synchronize with the GPU.

    ran: number of matrix products of each kind. The kinds are "fp8 weights" (bf16 activations, for few rows),
    "fp8 gemm" (FP8 activations, for many rows), and the dtype of an unquantized weight.
    """

    def __init__(self, weights: Weights, cache: Cache):
        config = weights.config
        self.weights, self.cache, self.config = weights, cache, config
        self.operations = choose_operations(weights)
        frequencies, factor = rope_frequencies(config, weights.device)
        positions = torch.arange(cache.max_length, dtype=torch.float32, device=weights.device)
        angles = positions[:, None] * frequencies
        layers, B, K = cache.keys.shape[:3]
        self.context = LayerContext(
            turns=(angles.cos() * factor, angles.sin() * factor),
            heads=config.num_attention_heads,
            window=config.sliding_window,
            eps=config.rms_norm_eps,
            arrived=torch.zeros(B, K, dtype=torch.int32, device=weights.device),
        )
        # per layer, the largest magnitude in each row of the outputs of attention and SwiGLU, written by the kernels
        self.largest = torch.zeros(layers, 2, B, dtype=torch.int32, device=weights.device)
        self.ran: Counter[str] = Counter()

    def decode(self, tokens_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Process one token per row, write its key and value into the KV cache, and return the logits [B, vocabulary].

        tokens_B: token ids. positions_B: positions of the tokens in the cache. Both are int64 [B] on the device.
        """
        x_BH, B, delta = F.embedding(tokens_B, self.weights.embedding), len(tokens_B), None
        do, context, few = self.operations, self.context, len(tokens_B) <= FEW_ROWS
        one = B == 1 and do is not reference
        if not one:
            self.largest.zero_()
        for index, layer in enumerate(self.weights.layers):
            keys, values = self.cache.keys[index, :B], self.cache.values[index, :B]
            if one:
                for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                    self._count_operation(matrix, few)
                x_BH = do.decode_layer(context, x_BH, layer, keys, values, positions_B)
                continue
            x_BH, qkv = self._start_layer(x_BH, delta, layer, few)
            noted, digits = self.largest[index, :, :B], _digits(layer.o, few)
            attended = do.attend_cache(
                context, qkv, layer.head_norms, positions_B, keys, values, digits, noted[0]
            )
            x_BH, delta = self._finish_layer(x_BH, attended, layer, few, noted[1])
        return do.head(self.weights, context.eps, x_BH, delta)

    def prefill(self, ids_BT: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Process B prompts and write their keys and values into the KV cache, starting at row `first_row`.

        ids_BT: token ids, int64 [B, T]. Shorter prompts are padded at the end. The padding also fills cache positions,
        but decoding overwrites each position before a token attends to it.
        Returns the hidden states [B, T, H] before the last norm.
        """
        (B, T), do, context = ids_BT.shape, self.operations, self.context
        x_MH, few = F.embedding(ids_BT.flatten(), self.weights.embedding), B * T <= FEW_ROWS
        positions_BT = torch.arange(T, device=ids_BT.device).expand(B, T).contiguous()
        rows, delta = slice(first_row, first_row + B), None
        for index, layer in enumerate(self.weights.layers):
            keys, values = self.cache.keys[index, rows], self.cache.values[index, rows]
            x_MH, qkv = self._start_layer(x_MH, delta, layer, few)
            q = do.rotate_into_cache(context, qkv, layer.head_norms, positions_BT, keys, values)
            out = reference.attend_prompt(q, keys[:, :, :T], values[:, :, :T], context.window)
            attended = do.rows(out.reshape(B * T, -1), _digits(layer.o, few))
            x_MH, delta = self._finish_layer(x_MH, attended, layer, few, None)
        return do.add(x_MH, delta).view(B, T, -1)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the last norm and the head to the hidden states of M tokens, [M, hidden size].

        Return the logits, float32 [M, vocabulary].
        """
        return self.operations.head(self.weights, self.context.eps, x, None).float()

    def _start_layer(
        self, x_MH: torch.Tensor, delta: torch.Tensor | None, layer: Layer, few: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the part of a layer before attention.

        x_MH: hidden states. delta: output of the previous layer, if it has not been added to x_MH yet, otherwise None.
        Returns x_MH + delta and the fused projection [q; k; v].
        """
        x_MH, rows = self.operations.add_norm_rows(
            x_MH, delta, layer.input_norm, self.context.eps, _digits(layer.qkv, few)
        )
        self._count_operation(layer.qkv, few)
        return x_MH, self.operations.gemm(rows, layer.qkv)

    def _finish_layer(
        self, x_MH: torch.Tensor, attended: Any, layer: Layer, few: bool, largest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the part of a layer after attention.

        attended: output of attention. few: whether there are at most FEW_ROWS rows. largest: buffer in which the
        kernels store the largest magnitude of each row. Returns the hidden states and the MLP output separately. The
        next operation adds them.
        """
        do = self.operations
        for matrix in (layer.o, layer.gate_up, layer.down):
            self._count_operation(matrix, few)
        delta = do.gemm(attended, layer.o)
        x_MH, rows = do.add_norm_rows(
            x_MH, delta, layer.post_norm, self.context.eps, _digits(layer.gate_up, few)
        )
        inner = do.swiglu_gemm(rows, layer.gate_up, _digits(layer.down, few), largest)
        return x_MH, do.gemm(inner, layer.down)

    def _count_operation(self, weight: Matrix, few: bool) -> None:
        kind = "fp8 weights" if few else "fp8 gemm"
        self.ran[kind if weight.fp8 else str(weight.values.dtype).removeprefix("torch.")] += 1


def _digits(weight: Matrix, few: bool) -> int:
    """Return the number of FP8 codes per activation (0 to 2) for a product with `weight`. See `reference.rows`.

    few: whether there are at most FEW_ROWS rows of activations.
    """
    if not weight.fp8:
        return 0
    return 2 if few else 1
