from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import MistralForCausalLM

from model.config import (
    ARCHITECTURE,
    CONFIGS,
    POSITIVE,
    attention_pairs,
    flops_per_token,
    load_config,
    load_sizes,
    num_parameters,
    read_json_file,
    rope_theta,
    state_memory_gib,
    state_parts_gib,
)
from model.hf_folder import check_init_from
from model.keys import between
from tests.conftest import small_config


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 64, "num_key_value_heads": 1}]
)
def test_parameters_are_what_transformers_has(changes: dict) -> None:
    config = small_config(**changes)
    model = MistralForCausalLM(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_hare_1_1b_by_hand() -> None:
    """22 layers of 2 x 2048 x 2048 + 2 x 2048 x 512 + 3 x 2048 x 5632 weights, a head of 32000 x 2048; 6 FLOPs each,
    and 6 x 2048 a token, layer and position for the causal half of attention."""
    matmul = 22 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 32000 * 2048
    assert flops_per_token(load_config("hare_1.1b"), 2048) == 6 * matmul + 22 * 6 * 2048 * 2048
    assert num_parameters(load_config("hare_1.1b")) == 1_123_117_056


def test_a_window_saves_attention() -> None:
    config = small_config(sliding_window=4)
    seen = [min(i + 1, 4) for i in range(64)]
    # the usual convention counts T/2 for a causal row of T, not (T + 1)/2
    assert attention_pairs(config, 64) == pytest.approx(sum(seen) / 64, rel=0.15)
    assert attention_pairs(small_config(), 64) == 32
    # W - W^2 / 2T, and no saving where no sample reaches the window
    for window, pairs in ((4, 4 - 16 / 128), (48, 48 - 48**2 / 128), (64, 32), (100, 32)):
        assert attention_pairs(small_config(sliding_window=window), 64) == pairs


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1 column 1: not valid JSON: there is nothing in it"),
        ('{\n "a": 1, // one\n "b": 2}', "line 2 column 10: not valid JSON: a comment, of which JSON has none"),
        ('# of mine\n{"a": 1}', "line 1 column 1: not valid JSON: a comment"),
        ('{"a": 1 /* one */}', "not valid JSON: a comment"),
        ('{"a": 1,\n}', "not valid JSON: there is a comma behind the last entry; remove it"),
        ('{"a": [1, 2, ]}', "not valid JSON: there is a comma behind the last entry"),
        ("{'a': 1}", "not valid JSON: text and keys stand in \", and not in '"),
        ('{"a": \u201cb\u201d}', 'not valid JSON: text and keys stand in ", and not in \u201c'),
        ('{"a": False}', "line 1 column 7: not valid JSON: False is false in JSON"),
        ('{"a": [None]}', "not valid JSON: None is null in JSON"),
        ('{"a": 1 "b": 2}', "not valid JSON: Expecting ',' delimiter"),
        ('{"a": 1, "a": 2}', "the key a is given twice in one object"),
        ("[" * 100_000, "not valid JSON: it is nested too deep"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_json_is_told_with_what_to_do(tmp_path: Path, text: str, told: str) -> None:
    """A model's configuration, too, of which the last of two equal keys was taken without a word."""
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    for read, name in ((read_json_file, ""), (load_sizes, "model.config: "), (load_config, "model.config: ")):
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value).startswith(f"{name}{path}") and told in str(error.value)


def test_how_a_configuration_is_encoded(tmp_path: Path) -> None:
    """Some editors put a byte order mark first."""
    path, values = tmp_path / "mine.json", (CONFIGS / "tiny.json").read_text()
    path.write_text(values, encoding="utf-8-sig")
    assert load_config(str(path)).to_dict() == load_config("tiny").to_dict()
    assert load_sizes(str(path)) == load_sizes("tiny")
    path.write_text(values, encoding="utf-16")
    with pytest.raises(ValueError, match=f"model.config: {path}: cannot be read: .*; save it as UTF-8$"):
        load_sizes(str(path))


@pytest.mark.parametrize(
    ("compute", "zero_stage", "bytes_per_parameter"),
    [
        ("fp32", 0, 4 + 4 + 8),
        ("fp32", 1, 4 + 4 + 8 / 8),
        ("fp32", 2, 4 + (4 + 8) / 8),
        ("fp32", 3, 16 / 8),
        ("bf16", 0, 2 + 2 + 12),
        ("bf16", 1, 2 + 4 + 12 / 8),  # gradients accumulate in float32
        ("bf16", 2, 2 + (4 + 12) / 8),
        ("bf16", 3, 18 / 8),
        ("fp8", 1, 2 + 4 + 12 / 8),
    ],
)
def test_zero_stages_share_state(compute: str, zero_stage: int, bytes_per_parameter: float) -> None:
    config = load_config("hare_1.1b")
    expected = bytes_per_parameter * num_parameters(config) / 2**30
    assert state_memory_gib(config, zero_stage, 8, compute) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({"zero_stage": 1, "float32_gradients": False}, 2 + 2 + 12 / 8),
        ({"zero_stage": 2, "float32_gradients": False}, 2 + (2 + 12) / 8),
        ({"zero_stage": 1, "compute": "fp32", "float32_gradients": False}, 4 + 4 + 8 / 8),
        ({"zero_stage": 1, "optimizer_bytes": 6.0}, 2 + 4 + 6 / 8),
        ({"zero_stage": 0, "optimizer_bytes": 4.0}, 2 + 2 + 4),
    ],
)
def test_what_the_state_depends_on(options: dict, bytes_per_parameter: float) -> None:
    """Muon has one moment less of the matrices of the layers: all weights but embedding, head and norms."""
    config = load_config("hare_1.1b")
    parts = state_parts_gib(config, world_size=8, **options)
    assert sum(parts.values()) == pytest.approx(bytes_per_parameter * num_parameters(config) / 2**30)
    muon = state_parts_gib(config, world_size=8, optim="muon", **options)
    ranks = 8 if options["zero_stage"] else 1
    matrices = 22 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632)
    assert parts["optimizer"] - muon["optimizer"] == pytest.approx(4 * matrices / ranks / 2**30)
    assert {**parts, "optimizer": 0.0} == {**muon, "optimizer": 0.0}
    if "float32_gradients" not in options:
        assert state_memory_gib(config, world_size=8, optim="muon", **options) == sum(muon.values())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_sizes_are_those_of_the_whole_configuration(path: Path, tmp_path: Path) -> None:
    whole = load_config(str(path))
    whole.save_pretrained(tmp_path)  # as transformers writes it
    for sizes in (load_sizes(path.stem), load_sizes(str(tmp_path))):
        assert isinstance(sizes, SimpleNamespace), "transformers was asked"
        assert [getattr(sizes, key) for key in POSITIVE] == [getattr(whole, key) for key in POSITIVE]
        assert num_parameters(sizes) == num_parameters(whole) and rope_theta(sizes) == rope_theta(whole)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hiden_layers": 3}, "did you mean num_hidden_layers"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0 must be positive"),
        ({"sliding_window": 0}, "sliding_window: 0 must be positive, or null for none"),
        (
            {"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 1e4}},
            "rope_type 'linear': only",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"model_type": "llama"}, "only mistral"),
        ({"rope_parameters": {"rope_thetta": 1e6}}, "rope_parameters has rope_thetta"),
        ({"sliding_window": "4096"}, "sliding_window"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps.*expected float, got str"),
        ({"rope_theta": None}, "rope_theta None is no positive number"),
        ({"rope_theta": "1e4"}, "rope_theta '1e4' is no positive number"),
    ],
)
def test_sizes_of_what_is_no_mistral_are_refused(changes: dict, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((CONFIGS / "tiny.json").read_text()) | changes))
    with pytest.raises(ValueError, match=problem):
        load_sizes(str(path))


def test_what_a_file_leaves_to_transformers_is_asked_there(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "tiny.json").read_text())
    del values["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_attention_heads": 8}))
    assert load_sizes(str(tmp_path)).num_key_value_heads == 8


@pytest.mark.parametrize(
    "changes",
    [
        *({key: ...} for key in ("sliding_window", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "vocab_size")),
        {"rope_scaling": {"rope_type": "default"}},
        {"a_key_of_nobody": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_file_that_is_not_whole_is_the_configuration_that_transformers_makes_of_it(
    changes: dict, tmp_path: Path
) -> None:
    """...: without the key, whose default is transformers'; its sliding window is 4096."""
    values = {**json.loads((CONFIGS / "tiny.json").read_text()), **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    sizes, whole = load_sizes(str(tmp_path)), load_config(str(tmp_path))
    assert not isinstance(sizes, SimpleNamespace) and sizes.to_dict() == whole.to_dict()
    if "sliding_window" in changes:
        assert sizes.sliding_window == 4096


def test_head_dim_follows_from_the_others_where_a_file_has_none(tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "tiny.json").read_text())
    values.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_attention_heads": 2}))
    sizes = load_sizes(str(tmp_path))
    assert isinstance(sizes, SimpleNamespace)
    assert num_parameters(sizes) == num_parameters(load_config(str(tmp_path)))


def test_how_weights_are_stored_is_no_part_of_a_configuration(tmp_path: Path) -> None:
    """Of a folder in FP8: what is trained anew from it, and exported, has weights of its own."""
    values = json.loads((CONFIGS / "tiny.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert "quantization_config" not in load_config(str(tmp_path)).to_dict()


def test_numbers_of_a_command_line_are_within_their_limits() -> None:
    part, count = between(0.5, 1, float), between(2)
    assert [part("0.5"), part("1"), count("2"), count("99999")] == [0.5, 1.0, 2, 99999]
    for kind, text, allowed in (
        (part, "0.499", "0.5 to 1"),
        (part, "1.001", "0.5 to 1"),
        (part, "nan", "0.5 to 1"),
        (count, "1", "2 or more"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text}: allowed is {allowed}$"):
            kind(text)


OF_ANOTHER_MODEL = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("key", sorted({*ARCHITECTURE, "rope_theta"} - {"rope_parameters"}))
def test_weights_of_another_architecture_are_refused_by_each_key_of_it(key: str, tmp_path: Path) -> None:
    values = json.loads((CONFIGS / "tiny.json").read_text())
    theirs, file = OF_ANOTHER_MODEL.get(key, 2 * (values[key] or 0)), tmp_path / "config.json"
    file.write_text(json.dumps(values | {"max_position_embeddings": 64, "initializer_range": 0.1}))
    check_init_from(str(tmp_path), load_sizes("tiny"))
    file.write_text(json.dumps(values | {key: theirs}))
    with pytest.raises(
        ValueError, match=f"another model: {key}: {theirs} there, {values[key]} in model.conf"
    ):
        check_init_from(str(tmp_path), load_sizes("tiny"))
