"""The rows of `bench_model.py`: which there are, and how each is configured, in keys of the training configuration."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from model.speed import SpeedConfig
from train.config.arguments import TrainingArguments
from train.config.strict_json import set_override

# What a row may change: how the same model is computed, and nothing else. --row takes these keys.
ROW_KEYS = (
    "model.variant",
    "model.compile",
    "model.attention_backend",
    "precision.",
    "speed.",
    "gradient_checkpointing",
)

BASELINE = "hf_bf16"
BF16 = {"precision.compute": "bf16"}
ALL_OFF = {f"speed.{key}": value for key, value in asdict(SpeedConfig.off()).items()}
EAGER, GRAPH = {"speed.cuda_graphs": False}, {"speed.cuda_graphs": True}


class RowError(ValueError):
    """Rows that cannot be had; the message names them and what there is."""


@dataclass(frozen=True)
class Row:
    """`settings`: dotted keys of the training configuration -> JSON values. `texts`: the same as the command line gave
    them."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def configured(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The training configuration `base`, a JSON object, with this row's settings.

        Raises ValueError: a key that goes through something that is no object.
        """
        raw: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
        for key, value in self.settings.items():
            section, _, name = key.rpartition(".")
            (raw.setdefault(section, {}) if section else raw)[name] = value
        for key, text in self.texts.items():
            set_override(raw, TrainingArguments, key, text)
        return raw


def _fp8(recipe: str) -> dict[str, Any]:
    return {"precision.compute": "fp8", "precision.recipe": recipe}


def _presets() -> dict[str, Row]:
    settings: dict[str, dict[str, Any]] = {
        BASELINE: {"model.variant": "hf", "model.compile": False, **BF16},
        "hf_bf16_compiled": {"model.variant": "hf", "model.compile": True, **BF16},
    }
    for recipe in ("tensorwise", "rowwise"):
        settings[f"torchao_{recipe}"] = {"model.variant": "torchao", **_fp8(recipe)}
    for variant in ("te_linear", "te_layer"):
        kinds = {
            "bf16": BF16,
            **{f"fp8_{recipe}": _fp8(recipe) for recipe in ("delayed", "current", "block")},
        }
        # what changes numerics, and so is no default
        kinds["fp8_delayed_fp8_head"] = {**_fp8("delayed"), "precision.bf16_modules": []}
        if variant == "te_layer":
            kinds["fp8_delayed_fast_wgrad"] = {**_fp8("delayed"), "precision.fast_accumulation_wgrad": True}
        for kind, how in kinds.items():
            settings[f"{variant}_{kind}"] = {"model.variant": variant, **how, **EAGER}
            settings[f"{variant}_{kind}_graph"] = {"model.variant": variant, **how, **GRAPH}
        # chooses FP8 or bf16 for each module, graphs and attention by measurement: a minute more for each micro-batch
        settings[f"{variant}_auto"] = {"model.variant": variant, **_fp8("delayed"), "precision.auto": True}
        # the same passes within random documents (--document_length), next to the row without "documents_"
        for kind in ("bf16", "fp8_delayed"):
            how = {"model.variant": variant, **kinds[kind], "data.document_mask": True}
            settings[f"documents_{variant}_{kind}"] = {**how, **EAGER}
            settings[f"documents_{variant}_{kind}_graph"] = {**how, **GRAPH}
    settings["te_layer_fp8_delayed_off"] = {"model.variant": "te_layer", **_fp8("delayed"), **ALL_OFF}
    return {name: Row(name, how) for name, how in settings.items()}


PRESETS = _presets()

# What is measured unless --rows, --step_rows say otherwise: enough for the comparisons that matter, in minutes.
DEFAULT_ROWS = (
    "hf_bf16*",
    "torchao_*",
    "te_linear_bf16*",
    "te_linear_fp8_delayed*",
    "te_layer_bf16*",
    "te_layer_fp8_delayed",
    "te_layer_fp8_delayed_graph",
    "te_layer_fp8_delayed_off",
    "te_layer_fp8_delayed_fp8_head",
    "te_layer_fp8_delayed_fast_wgrad",
    "te_layer_fp8_current",
    "te_layer_fp8_block",
)
DEFAULT_STEP_ROWS = (
    "hf_bf16*",
    "torchao_tensorwise",
    "te_linear_bf16",
    "te_linear_fp8_delayed",
    "te_layer_bf16*",
    "te_layer_fp8_delayed",
    "te_layer_fp8_delayed_graph",
)
# The reference's rows take seconds at best; those of each kind show that everything runs.
CPU_ROWS = ("hf_bf16", "te_linear_bf16", "te_layer_bf16", "te_layer_fp8_delayed")


def select(patterns: Sequence[str], rows: Mapping[str, Row], option: str) -> list[Row]:
    """The `rows` that match one of `patterns` (* and ?), in the order of `rows`.

    Raises RowError: a pattern of `option` that matches nothing.
    """
    wanted: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(rows, pattern)
        if not matches:
            raise RowError(f"{option}: {pattern!r} matches no row; there are {', '.join(rows)}")
        wanted.update(matches)
    return [row for name, row in rows.items() if name in wanted]


def parse_row(name: str, pairs: Sequence[str]) -> Row:
    """The row of `--row NAME key=value ...`.

    Raises RowError: the name of another row or one with other characters than letters, digits and _ - .; what is no
    key=value; a key that a row may not change.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise RowError(f"--row {name}: a name has letters, digits and _ - . only")
    if name in PRESETS:
        raise RowError(f"--row {name}: there is such a row already; choose another name")
    for pair in pairs:
        key, equals, _ = pair.partition("=")
        if not equals:
            raise RowError(f"--row {name} {pair}: key=value is expected")
        if not any(
            key == allowed or (allowed[-1] == "." and key.startswith(allowed)) for allowed in ROW_KEYS
        ):
            raise RowError(
                f"--row {name} {pair}: a row may change {', '.join(ROW_KEYS)}; {key} would make another model or batch"
            )
    return Row(name, texts=dict(pair.split("=", 1) for pair in pairs))
