"""Model weights in the layout of the inference engine: fused q, k and v, fused gate and up, and FP8 codes with scales.

Shapes: R rows (output features), C columns (input features), G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import MistralConfig

from fp8_inference_demo import InferenceError
from model.config import has_qk_norm
from model.fp8.precision import DTYPES
from model.fp8.recipes import FP8_FEATURE_MULTIPLE
from model.te_reference.quantize import BLOCK, Quantized, quantize_rows

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass
class Matrix:
    """Weight matrix with R output and C input features.

    values: [R, C], float8_e4m3fn, bf16 or float32.
    scale: for FP8, float32 [R, G] with one scale for each of G groups of columns. None for bf16 and float32.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        return self.values.dtype == FP8

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values times their scales in `dtype`. The product is computed in float32."""
        if self.scale is None:
            return self.values.to(dtype)
        groups = self.values.float().unflatten(1, (self.scale.shape[1], -1))
        return (groups * self.scale[:, :, None]).flatten(1).to(dtype)


def stack(parts: list[Matrix]) -> Matrix:
    """Concatenate matrices with the same number of columns along their rows."""
    if len(parts) == 1:
        return parts[0]
    scales = [part.scale for part in parts if part.scale is not None]
    return Matrix(
        torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
        if scales
        else torch.cat([part.values for part in parts]),
        torch.cat(scales) if scales else None,
    )


@dataclass
class Layer:
    """Weights of one decoder layer.

    H hidden size, N query heads, K key/value heads, D head dimension, I intermediate size.
    """

    input_norm: torch.Tensor  # [H]
    qkv: Matrix  # [(N + 2 K) D, H]
    o: Matrix  # [H, N D]
    post_norm: torch.Tensor  # [H]
    gate_up: Matrix  # [2 I, H]
    down: Matrix  # [H, I]
    head_norms: torch.Tensor | None  # [2, D], weights of the norms of q and k in Qwen3


@dataclass
class Weights:
    """All weights of a model. V vocabulary size, H hidden size.

    If the model ties its embeddings, `embedding` and `head.values` are the same tensor.
    """

    config: MistralConfig
    embedding: torch.Tensor  # [V, H]
    layers: list[Layer]
    norm: torch.Tensor  # [H]
    head: Matrix  # [V, H], never FP8

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the activations."""
        return self.embedding.dtype

    def matrices(self) -> Iterator[Matrix]:
        """Yield the weight matrices of all layers."""
        for layer in self.layers:
            yield from (layer.qkv, layer.o, layer.gate_up, layer.down)

    @property
    def fp8(self) -> bool:
        return any(matrix.fp8 for matrix in self.matrices())

    @property
    def nbytes(self) -> int:
        tensors = [self.embedding, self.norm]
        for layer in self.layers:
            tensors += [part for part in vars(layer).values() if isinstance(part, torch.Tensor)]
        if self.head.values.data_ptr() != self.embedding.data_ptr():
            tensors.append(self.head.values)
        return sum(t.nbytes for t in tensors) + sum(m.nbytes for m in self.matrices())


def pack(
    tensors: dict[str, torch.Tensor | Quantized],
    config: MistralConfig,
    precision: str,
    device: torch.device | None = None,
) -> Weights:
    """Convert a Hugging Face state dict to the layout of the inference engine.

    tensors: weights by Hugging Face name. Each tensor is removed after its conversion to save memory.
    precision: "fp8", "bf16" or "fp32". With "fp8", weights are quantized unless some of them are already stored in FP8.
        In that case, the other weights stay in bf16. A fused matrix with both kinds becomes bf16.
    device: device of the result. None keeps each tensor on its device.

    Raises InferenceError if the size of a matrix is not supported by FP8 matrix products.
    """
    dtype = DTYPES[precision]
    stored = any(isinstance(tensor, Quantized) for tensor in tensors.values())

    def plain(name: str) -> torch.Tensor:
        tensor = tensors.pop(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor.to(device).to(dtype).contiguous()

    def part(name: str) -> Matrix:
        tensor = tensors.pop(name)
        if isinstance(tensor, Quantized):
            tensor = Quantized(tensor.codes.to(device), tensor.scale.to(device))
        else:
            tensor = tensor.to(device)
        if precision == "fp8" and isinstance(tensor, torch.Tensor) and not stored:
            tensor = quantize_rows(tensor)
        if isinstance(tensor, torch.Tensor):
            return Matrix(tensor.to(dtype).contiguous())
        if precision != "fp8":
            return Matrix(tensor.dequantize(dtype))
        rows, columns = tensor.codes.shape
        multiple = FP8_FEATURE_MULTIPLE if tensor.by_row else BLOCK
        if rows % FP8_FEATURE_MULTIPLE or columns % multiple:
            raise InferenceError(
                f"{name} has {rows} rows and {columns} columns. FP8 requires the number of rows to be divisible by "
                f"{FP8_FEATURE_MULTIPLE} and the number of columns by {multiple}. Use --precision bf16.",
                code="fp8_dimensions",
                key=name,
            )
        scale = tensor.scale if tensor.by_row else tensor.scale.repeat_interleave(BLOCK, 0)
        return Matrix(tensor.codes, scale[: len(tensor.codes)])

    def matrix(*names: str) -> Matrix:
        parts = [part(f"{name}.weight") for name in names]
        if len({of.fp8 for of in parts}) > 1:
            parts = [Matrix(of.dequantize(dtype)) for of in parts]
        return stack(parts)

    layers = []
    for index in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        layers.append(
            Layer(
                plain(f"model.layers.{index}.input_layernorm.weight"),
                matrix(*(f"{attention}.{letter}_proj" for letter in "qkv")),
                matrix(f"{attention}.o_proj"),
                plain(f"model.layers.{index}.post_attention_layernorm.weight"),
                matrix(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                matrix(f"{mlp}.down_proj"),
                torch.stack([plain(f"{attention}.{letter}_norm.weight") for letter in "qk"])
                if has_qk_norm(config)
                else None,
            )
        )
    embedding = plain("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else plain("lm_head.weight")
    return Weights(config, embedding, layers, plain("model.norm.weight"), Matrix(head))
