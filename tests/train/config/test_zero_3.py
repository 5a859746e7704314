"""What ZeRO 3 does not go with, and what it needs."""

import json

import pytest

from tests.train.config.test_ds_config import arguments, refusal
from train.config.arguments import CONFIG_FOLDER
from train.config.ds_config import resolve_ds_config


def test_compiled_layers_exclude_zero_3():
    changes = dict(model={"config": "tiny", "variant": "hf", "compile": True}, precision={"compute": "bf16"})
    assert "model.compile" in refusal("ds_config_zero3.json", "zero_optimization.stage", **changes)
    resolve_ds_config(arguments("ds_config_zero2.json", **changes), 2)
    changes["model"]["compile"] = False
    resolve_ds_config(arguments("ds_config_zero3.json", **changes), 2)


@pytest.mark.parametrize(
    ("variant", "fused_rope", "layer"),
    [
        ("te_linear", True, "MistralDecoderLayer"),
        ("te_layer", True, "FusedTransformerLayer"),
        ("te_layer", False, "TransformerLayer"),
    ],
)
def test_recomputation_needs_the_layer_as_a_leaf(variant: str, fused_rope: bool, layer: str) -> None:
    """Seen on two H200s without it: the backward finds a weight of no elements."""
    shipped = json.loads((CONFIG_FOLDER / "ds_config_zero3.json").read_text())
    zero = shipped["zero_optimization"]
    changes = dict(model={"config": "tiny", "variant": variant}, speed={"fused_rope": fused_rope})
    for leaf in ({}, {"classes": ["Other"]}, {"classes": "MistralAttention"}):
        own = shipped | {"zero_optimization": zero | {"leaf_module": leaf}}
        message = refusal(own, "zero_optimization.leaf_module", gradient_checkpointing=True, **changes)
        assert f'leaf_module": {{"classes": ["{layer}"]}}' in message
        resolve_ds_config(arguments(own, **changes), 2)
    for leaf in (zero["leaf_module"], {"classes": f"model.somewhere.{layer}"}, {"name_suffixes": ["layers"]}):
        own = shipped | {"zero_optimization": zero | {"leaf_module": leaf}}
        resolve_ds_config(arguments(own, gradient_checkpointing=True, **changes), 2)


def test_other_recomputations_need_none() -> None:
    own = {"zero_optimization": {"stage": 3}}
    hf = dict(model={"config": "tiny", "variant": "hf"})
    resolve_ds_config(arguments(own, gradient_checkpointing=True, **hf), 2)
    resolve_ds_config(arguments({"zero_optimization": {"stage": 2}}, gradient_checkpointing=True), 2)
