"""config.json files of published Llama and Qwen3 models, and smaller models of the same kind."""

from __future__ import annotations

from typing import Any

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.02, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "transformers.js_config": {"dtype": "q4"}, "vocab_size": 49152,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen3", "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads}  # fmt: skip


# (config.json, published number of parameters, changes for a model of the same kind that fits into a test)
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "SmolLM2-135M": (SMOLLM2 | sizes(576, 1536, 30, 9, 3), 134_515_008, sizes(144, 384, 2, 9, 3)),
    "SmolLM2-360M": (SMOLLM2 | sizes(960, 2560, 32, 15, 5), 361_821_120, sizes(240, 640, 2, 15, 5)),
    "SmolLM2-1.7B": (
        SMOLLM2 | sizes(2048, 8192, 24, 32, 32) | {"rope_theta": 130000},
        1_711_376_384,
        sizes(128, 512, 2, 8, 8),
    ),
    "TinyLlama-1.1B": (
        SMOLLM2
        | sizes(2048, 5632, 22, 32, 4)
        | {"max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32000},
        1_100_048_384,
        sizes(256, 704, 2, 16, 2),
    ),
    "Llama-3.2-1B": (
        SMOLLM2
        | sizes(2048, 8192, 16, 32, 8)
        | {"eos_token_id": [128001, 128008], "head_dim": 64, "max_position_embeddings": 131072, "vocab_size": 128256}
        | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        1_235_814_400,
        sizes(128, 512, 2, 8, 2)
        | {"head_dim": 16, "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 32}},
    ),
    "Qwen3-0.6B": (
        QWEN3 | sizes(1024, 3072, 28, 16, 8), 596_049_920, sizes(128, 384, 2, 4, 2) | {"head_dim": 64}
    ),
    "Qwen3-4B": (
        QWEN3 | sizes(2560, 9728, 36, 32, 8), 4_022_468_096, sizes(128, 384, 2, 8, 2) | {"head_dim": 32}
    ),
}  # fmt: skip


def small_model(name: str) -> dict[str, Any]:
    """Return the config.json of a model like the published one, with 512 tokens and positions."""
    values, _, smaller = PUBLISHED[name]
    return values | smaller | {"vocab_size": 512, "eos_token_id": 2, "max_position_embeddings": 512}
