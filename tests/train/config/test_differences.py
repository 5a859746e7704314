"""train/checkpoint/resume.py: which differences of two configurations a resume has to allow. Each key by itself:
tests/train/checkpoint/test_resume_changes.py."""

from typing import Any

import pytest

from tests.train.config.test_load import arguments
from train.checkpoint.resume import Difference, resume_differences
from train.config.load import load_arguments, resolve_arguments

ZERO_1 = {"zero_optimization": {"stage": 1}}
TWO = {"data__sources": {"a": "data/a", "b": "data/b"}}
MIXTURE = {"a": 0.7, "b": 0.3}
PHASES = [{"weights": {"a": 1.0}, "until_tokens": 4096}, {"weights": {"b": 1.0}, "until_tokens": None}]
BLOCK_THEN_CURRENT = [{"until_step": 5, "recipe": "block"}, {"recipe": "current"}]
BF16_THEN_FP8 = {"precision__compute": "bf16", "precision__schedule": [{"until_step": 5}, {"compute": "fp8"}]}


def resolved(**changes: Any) -> dict[str, Any]:
    return resolve_arguments(arguments(**changes), 1).to_dict()


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({}, {}, {}),
        ({}, {"learning_rate": 1e-3}, {"learning_rate": (3e-4, 1e-3)}),
        ({}, {"max_steps": 200}, {"max_steps": (100, 200)}),
        ({}, {"data__sources": {"b": "data/a"}}, {"data.sources": (["a"], ["b"])}),
        ({}, {"data__sources": {"a": "moved"}}, {}),
        ({}, {"precision__backend": "reference"}, {"precision.backend": ("auto", "reference")}),
        (TWO | {"data__weights": MIXTURE}, TWO | {"data__weights": PHASES}, {"data.weights": (MIXTURE, PHASES)}),
        (TWO | {"data__weights": PHASES}, TWO, {"data.weights": (PHASES, None)}),
        # DeepSpeed's keys
        (
            {"deepspeed": ZERO_1},
            {"deepspeed": {"zero_optimization": {"stage": 2}}},
            {"deepspeed.zero_optimization.stage": (1, 2)},
        ),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"bf16": {"enabled": True}, "train_batch_size": "auto"}}, {}),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"optimizer": {"type": "AdamW"}, "dump_state": True}}, {}),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"timers": {"throughput": {"enabled": True}}}}, {}),
        ({}, {"deepspeed": ZERO_1}, {"deepspeed.data_types.grad_accum_dtype": ("fp32", None)}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            {"deepspeed": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["A"]}}}},
            {},
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            {"deepspeed": {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}},
            {"deepspeed.zero_optimization.reduce_bucket_size": (None, 1000)},
        ),
    ],
)  # fmt: skip
def test_differences_that_change_a_step(old: dict, new: dict, found: dict) -> None:
    expected = [Difference(key, *values) for key, values in found.items()]
    assert resume_differences(resolved(**old), resolved(**new)) == expected


def test_shipped_baseline_differs_only_in_precision() -> None:
    fp8, bf16 = (load_arguments([f"train_config_{kind}"]).to_dict() for kind in ("fp8", "bf16"))
    assert {key for key in fp8 if fp8[key] != bf16[key]} == {"precision", "output_dir"}
    assert resume_differences(fp8, bf16) == [Difference("precision.compute", "fp8", "bf16")]


@pytest.mark.parametrize(
    ("key", "before", "own", "counts"),
    [
        # only FP8 recipes with a history read it
        ("amax_history_len", 1024, {}, True),
        ("amax_history_len", 1024, {"precision__recipe": "current"}, False),
        ("amax_history_len", 1024, {"precision__compute": "bf16"}, False),
        ("amax_history_len", 1024, BF16_THEN_FP8, True),
        ("amax_history_len", 1024, {"precision__schedule": BLOCK_THEN_CURRENT}, False),
        # a module of delayed scaling may have fallen back to block scaling
        ("amax_epsilon", 1e-3, {"precision__on_trouble": "escalate"}, True),
        # None: a version without the key wrote it, and did not compute these gradients in FP8
        ("fp8_head_gradients", None, {}, True),
        ("fp8_head_gradients", None, BF16_THEN_FP8, True),
        ("fp8_head_gradients", None, {"precision__compute": "bf16"}, False),
        ("fp8_head_gradients", None, {"model__variant": "torchao", "precision__recipe": "tensorwise"}, False),
        ("margin", None, {}, False),
    ],
)  # fmt: skip
def test_precision_keys_are_compared_if_read(key: str, before: Any, own: dict, counts: bool) -> None:
    new = resolved(**own)
    old = {**new, "precision": {**new["precision"], key: before}}
    if before is None:
        del old["precision"][key]
        before = False
    expected = [Difference(f"precision.{key}", before, new["precision"][key])] if counts else []
    assert resume_differences(old, new) == expected
