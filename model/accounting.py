"""Parameters, FLOPs a token and memory of a Mistral configuration, from its sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.config import head_dim

if TYPE_CHECKING:
    from transformers import MistralConfig

GIB = 2**30


def matmul_parameters(config: MistralConfig) -> int:
    """Weights that take part in matrix products for every token: all but the embedding and the norms."""
    q, kv = config.num_attention_heads * head_dim(config), config.num_key_value_heads * head_dim(config)
    attention = config.hidden_size * (2 * q + 2 * kv)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def num_parameters(config: MistralConfig) -> int:
    """All parameters; tied embeddings count once."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return matmul_parameters(config) + norms + embedding


def attention_pairs(config: MistralConfig, seq_length: int) -> float:
    """Mean number of earlier tokens, itself included, that a token attends to, counted as T / 2 for the causal half
    of a sequence (the usual convention), less with a sliding window W < T: W - W^2 / (2 T)."""
    window = min(config.sliding_window or seq_length, seq_length)
    return window - window**2 / (2 * seq_length)


def flops_per_token(config: MistralConfig, seq_length: int) -> float:
    """Floating-point operations of forward and backward for one token of a sequence of `seq_length`: 6 a matmul
    weight, and 12 x N x D a visible token and layer (Kaplan et al. 2020, appendix B of Chowdhery et al. 2022, with
    only the causal half counted). Recomputation does not count."""
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim(config)
    return 6 * matmul_parameters(config) + attention * attention_pairs(config, seq_length)


def state_memory_gib(config: MistralConfig, zero_stage: int, world_size: int, compute: str = "bf16") -> float:
    """GiB a rank of weights, gradients and AdamW state under a ZeRO stage (Rajbhandari et al. 2020, table 1);
    activations, buckets and FP8 copies of weights come on top.

    compute: precision.compute. fp32 has 4 + 4 bytes of weights and gradients a parameter and 8 of moments. The others
    (FP8 layers keep bf16 weights) have 2 + 2 and 12 of float32 master weights and moments; gradients are 4 at ZeRO 1,
    where the shipped DeepSpeed configuration accumulates them in float32.
    """
    if compute == "fp32":
        weight_bytes, gradient_bytes, optimizer_bytes = 4, 4, 8
    else:
        weight_bytes, gradient_bytes, optimizer_bytes = 2, 4 if zero_stage == 1 else 2, 12
    bytes_per_parameter = (
        weight_bytes / (world_size if zero_stage >= 3 else 1)
        + gradient_bytes / (world_size if zero_stage >= 2 else 1)
        + optimizer_bytes / (world_size if zero_stage >= 1 else 1)
    )
    return num_parameters(config) * bytes_per_parameter / GIB
