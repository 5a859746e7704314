"""Model configurations, and models built from them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralForCausalLM

from model.config import (
    ARCHITECTURE,
    CONFIGS,
    MODEL_TYPES,
    POSITIVE,
    ModelConfigError,
    attention_pairs,
    flops_per_token,
    load_config,
    load_sizes,
    num_parameters,
    numeric_settings,
    rope_parameters,
    state_parts_gib,
)
from model.hf_folder import WeightsError, check_init_from
from model.keys import between
from tests.conftest import numbers, random_ids, refused, small_config
from tests.model.conftest import backward, gradients, model_of
from tests.published import LLAMA3_ROPE, PUBLISHED


def write_config(path: Path, **changes: Any) -> Path:
    """The configuration tiny with changes; ... removes a key."""
    values = {**json.loads((CONFIGS / "tiny.json").read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 64, "num_key_value_heads": 1}]
)
def test_num_parameters_equals_transformers(changes: dict) -> None:
    config = small_config(**changes)
    model = MistralForCausalLM(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_hare_1_1b_sizes() -> None:
    """22 layers of 2 x 2048 x 2048 + 2 x 2048 x 512 + 3 x 2048 x 5632 weights, a head of 32000 x 2048; 6 FLOPs each,
    and 6 x 2048 a token, layer and position for the causal half of attention."""
    matmul = 22 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 32000 * 2048
    assert flops_per_token(load_config("hare_1.1b"), 2048) == 6 * matmul + 22 * 6 * 2048 * 2048
    assert num_parameters(load_config("hare_1.1b")) == 1_123_117_056


def test_sliding_window_reduces_flops() -> None:
    """By the usual convention: T / 2 of T tokens, W - W^2 / 2T with a window of W that samples reach."""
    for window, pairs in ((None, 32), (4, 4 - 16 / 128), (48, 48 - 48**2 / 128), (64, 32), (100, 32)):
        assert attention_pairs(small_config(sliding_window=window), 64) == pairs


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ('{\n "a": 1, // one\n "b": 2}', "not_json", [2, 10]),
        ('{"a": NaN}', "not_json", []),
        ('{"a": 1, "a": 2}', "duplicate_key", []),
        ("[1]", "not_an_object", []),
        ("a: 1\n".encode("utf-16"), "not_json", []),
    ],
)
def test_non_object_json_raises(tmp_path: Path, text: str | bytes, code: str, place: list[int]) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    key = "a" if code == "duplicate_key" else str(path)
    for read in (load_sizes, load_config):
        with refused(ModelConfigError, code=code, key=key) as error:
            read(str(path))
        assert numbers(str(error.value).replace(str(path), ""))[: len(place)] == place


@pytest.mark.parametrize(
    ("zero_stage", "options", "bytes_per_parameter"),
    [
        (0, {"compute": "fp32"}, 4 + 4 + 8),
        (1, {"compute": "fp32"}, 4 + 4 + 8 / 8),
        (2, {"compute": "fp32"}, 4 + (4 + 8) / 8),
        (3, {"compute": "fp32"}, 16 / 8),
        (0, {"compute": "bf16"}, 2 + 2 + 12),
        (1, {"compute": "bf16"}, 2 + 4 + 12 / 8),  # gradients accumulate in float32
        (2, {"compute": "bf16"}, 2 + (4 + 12) / 8),
        (3, {"compute": "bf16"}, 18 / 8),
        (1, {"compute": "fp8"}, 2 + 4 + 12 / 8),
        (1, {"float32_gradients": False}, 2 + 2 + 12 / 8),
        (2, {"float32_gradients": False}, 2 + (2 + 12) / 8),
        (1, {"compute": "fp32", "float32_gradients": False}, 4 + 4 + 8 / 8),
        (1, {"optimizer_bytes": 6.0}, 2 + 4 + 6 / 8),
        (0, {"optimizer_bytes": 4.0}, 2 + 2 + 4),
    ],
)
def test_state_memory(zero_stage: int, options: dict, bytes_per_parameter: float) -> None:
    """Muon has one moment less of the matrices of the layers: all weights but embedding, head and norms."""
    config = load_config("hare_1.1b")
    parts = state_parts_gib(config, zero_stage, 8, **options)
    assert sum(parts.values()) == pytest.approx(bytes_per_parameter * num_parameters(config) / 2**30)
    muon = state_parts_gib(config, zero_stage, 8, optim="muon", **options)
    ranks = 8 if zero_stage else 1
    matrices = 22 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632)
    assert parts["optimizer"] - muon["optimizer"] == pytest.approx(4 * matrices / ranks / 2**30)
    assert {**parts, "optimizer": 0.0} == {**muon, "optimizer": 0.0}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_load_sizes_equals_load_config(path: Path, tmp_path: Path) -> None:
    whole = load_config(str(path))
    whole.save_pretrained(tmp_path)  # as transformers writes it
    for sizes in (load_sizes(path.stem), load_sizes(str(tmp_path))):
        assert isinstance(sizes, SimpleNamespace), "transformers was asked"
        assert [getattr(sizes, key) for key in POSITIVE] == [getattr(whole, key) for key in POSITIVE]
        assert num_parameters(sizes) == num_parameters(whole) and rope_parameters(sizes) == rope_parameters(
            whole
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str, tmp_path: Path) -> None:
    values, parameters, _ = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_config(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert [type(model).__name__] == values["architectures"]
    assert num_parameters(config) == parameters == sum(p.numel() for p in model.parameters())
    config.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path, tmp_path / "saved"):
        sizes = load_sizes(str(folder))
        assert num_parameters(sizes) == parameters and rope_parameters(sizes) == rope_parameters(config)
    check_init_from(str(tmp_path), config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_hiden_layers": 2}, "num_hiden_layers"),
        ({"num_layers": 2}, "num_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"vocab_size": 0, "num_hidden_layers": -1}, "vocab_size"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": 1}, "sliding_window"),
        ({"sliding_window": "4096"}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"head_dim": 20}, "head_dim"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"type": "longrope", "factor": 4.0, "rope_theta": 1e4}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}},
            "attention_factor",
        ),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"attention_factor": 1.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        *(({"attention_bias": True, "model_type": kind}, "attention_bias") for kind in MODEL_TYPES),
        ({"mlp_bias": True, "model_type": "llama"}, "mlp_bias"),
        ({"pretraining_tp": 2, "model_type": "llama"}, "pretraining_tp"),
        ({"rope_interleaved": True, "model_type": "llama"}, "rope_interleaved"),
        ({"sliding_window": 64, "model_type": "llama"}, "sliding_window"),
        ({"sliding_window": 64, "model_type": "qwen3"}, "sliding_window"),
        ({"use_sliding_window": True, "model_type": "qwen3"}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"] * 4, "model_type": "qwen3"}, "layer_types"),
        ({"head_dim": None, "model_type": "qwen3"}, "head_dim"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_parameters": {"rope_thetta": 1e6}}, "rope_parameters"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e6}, "rope_theta"),
        ({"rope_scaling": LLAMA3_ROPE | {"rope_theta": 5e5}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3_ROPE}, "rope_scaling"),
        ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": LLAMA3_ROPE | {"factor": 8.0}}, "rope_scaling"),
        ({"a_key_of_nobody": 1}, "a_key_of_nobody"),
        ({"query_norm_eps": 1e-5, "model_type": "llama"}, "query_norm_eps"),
        ({"use_qk_norm": True, "model_type": "llama"}, "use_qk_norm"),
        ({"no_rope_layers": [1, 1, 1, 0], "model_type": "llama"}, "no_rope_layers"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"model_type": ...}, "model_type"),
    ],
)
def test_invalid_configuration_names_the_key(changes: dict, key: str, tmp_path: Path) -> None:
    """transformers checks some types itself, and its errors have no key."""
    path = write_config(tmp_path / "bad.json", **changes)
    for load in (load_config, load_sizes):
        with refused(ModelConfigError) as error:
            load(str(path))
        assert error.value.key in (key, None)
        assert all(text in str(error.value) for text in (str(path), key))
        assert key != "num_layers" or "num_hidden_layers" in str(error.value), "the key that is meant"


@pytest.mark.parametrize(
    "changes",
    [
        *({key: ...} for key in ("sliding_window", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "vocab_size")),
        {"num_key_value_heads": ..., "num_attention_heads": 8},
        {"rope_scaling": {"rope_type": "default"}},
        {"model_type": "qwen3", "head_dim": ...},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_missing_keys_use_transformers_defaults(changes: dict, tmp_path: Path) -> None:
    """...: without the key, whose default is transformers'; its sliding window is 4096."""
    write_config(tmp_path / "config.json", **changes)
    sizes, whole = load_sizes(str(tmp_path)), load_config(str(tmp_path))
    assert not isinstance(sizes, SimpleNamespace) and sizes.to_dict() == whole.to_dict()
    if "sliding_window" in changes:
        assert sizes.sliding_window == 4096
    if "model_type" in changes:
        assert sizes.head_dim == 128
    if "num_key_value_heads" in changes:
        assert sizes.num_key_value_heads == 8


@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE])
def test_keys_that_change_nothing_are_accepted(scaling: dict | None, tmp_path: Path) -> None:
    """And RoPE in the keys of transformers 4 and 5 with the same values, as exports have it."""
    rope = {"rope_theta": 5e5, **({"rope_type": "default"} if scaling is None else scaling)}
    plain = write_config(tmp_path / "plain.json", rope_parameters=rope, rope_theta=...)
    changes = {"use_qk_norm": False, "num_experts": None, "logit_scale": 1.0, "unsloth_version": "2025.1"}
    changes |= {"quantization_config": {"quant_method": "fp8"}, "temperature": 0.7, "_mine": 1}
    changes |= {"torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "checkpointing": True}
    more = write_config(
        tmp_path / "more.json", rope_parameters=rope, rope_theta=5e5, rope_scaling=scaling, **changes
    )
    for load in (load_config, load_sizes):
        ours, theirs = load(str(more)), load(str(plain))
        assert rope_parameters(ours) == rope_parameters(theirs) == {"rope_type": "default", **rope}
        assert numeric_settings(ours) == numeric_settings(theirs)
    assert "quantization_config" not in load_config(str(more)).to_dict()  # of the weights beside it


def test_command_line_number_limits() -> None:
    part, count = between(0.5, 1, float), between(2)
    assert [part("0.5"), part("1"), count("2"), count("99999")] == [0.5, 1.0, 2, 99999]
    for kind, text in ((part, "0.499"), (part, "1.001"), (part, "nan"), (count, "1")):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


@pytest.mark.parametrize(
    "key", sorted({*ARCHITECTURE, "model_type", "rope_theta", "rope_scaling"} - {"rope_parameters"})
)
def test_init_from_other_architecture_raises(key: str, tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "tiny.json").read_text())
    others: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 64}
    others |= {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    write_config(tmp_path / "config.json", max_position_embeddings=64, initializer_range=0.1)
    check_init_from(str(tmp_path), load_sizes("tiny"))
    write_config(tmp_path / "config.json", **{key: others.get(key) or 2 * values[key]})
    key = {"rope_scaling": "rope_type", "model_type": "qk_norm"}.get(key, key)
    with refused(WeightsError, code="architecture", key=key):
        check_init_from(str(tmp_path), load_sizes("tiny"))


def test_model_folder_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what lies here comes before what is shipped."""
    for name in (str(tmp_path), "hare_9b"):
        with refused(ModelConfigError, code="not_found", key=name) as error:
            load_config(name)
        assert "hare_1.1b" in str(error.value)
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").num_hidden_layers == 4
    write_config(tmp_path / "tiny", num_hidden_layers=2)
    assert load_config("tiny").num_hidden_layers == 2


# a precision of each variant without FP8 state
UNSCALED = dict.fromkeys(("hf", "te_linear", "te_layer"), {"compute": "bf16"}) | {
    "torchao": {"recipe": "tensorwise"}
}


@pytest.mark.parametrize("variant", ["hf", "torchao"])
def test_recomputation_changes_no_gradient(variant: str) -> None:
    found, calls = [], []
    for recomputes in (False, True):
        model, _ = model_of(variant, UNSCALED[variant], gradient_checkpointing=recomputes)
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        next(model.model.layers[1].children()).register_forward_pre_hook(count)
        backward(model)
        found.append(gradients(model).values())
    assert calls == [1, 2]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("variant", UNSCALED)
def test_pad_token_embedding_is_trained(variant: str) -> None:
    """It is a token as any other; transformers would leave it as it began."""
    found = []
    for pad in (3, None):
        model, _ = model_of(variant, UNSCALED[variant], sizes={"pad_token_id": pad}, seed=2)
        ids = random_ids(model.config, 2, 65)
        ids[:, 5:9] = 3
        model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
        found.append(model.model.embed_tokens.weight.grad)
    assert float(found[0][3].norm()) > 0
    assert torch.equal(*found)
