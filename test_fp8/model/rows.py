"""The rows of `bench_model.py`: which there are, and the training configuration that each is measured with."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from model.variants import VARIANTS, SpeedConfig
from test_fp8.common.options import ByMachine
from test_fp8.common.rows import Row, RowError, parse_rows
from train.config.arguments import TrainingArguments
from train.engine import launchers

MEASURES = ("bare", "step")
COMPUTED = ("bf16", "fp8")  # what same_model.py has tolerances for
# What a row may change: how the same model is computed, and nothing else. --row takes these keys.
ROW_KEYS = (
    "model.variant model.compile model.attention_backend precision speed gradient_checkpointing optim "
    "deepspeed".split()
)

BASELINE = "hf_bf16"
BF16 = {"precision.compute": "bf16"}
ALL_OFF = {f"speed.{key}": value for key, value in asdict(SpeedConfig.off()).items()}
EAGER, GRAPH = {"speed.cuda_graphs": False}, {"speed.cuda_graphs": True}


# Of torch's SDPA, and of the loss, in the rows of transformers' modules; see baselines.py.
SDPA = ("auto", "cudnn", "flash", "efficient", "fa4")
LOSSES = ("torch", "compiled", "liger")
OWN_LOSS = "own"


class Setting(NamedTuple):
    """What the fastest of is chosen for each row."""

    micro_batch: int
    attention: str  # as asked for
    loss: str = OWN_LOSS  # one of LOSSES in the rows hf_* and torchao_*

    def __str__(self) -> str:
        loss = "" if self.loss == OWN_LOSS else f", loss {self.loss}"
        return f"micro-batch {self.micro_batch}, attention {self.attention}{loss}:"


def _fp8(recipe: str) -> dict[str, Any]:
    return {"precision.compute": "fp8", "precision.recipe": recipe}


def _presets() -> dict[str, Row]:
    settings: dict[str, dict[str, Any]] = {
        BASELINE: {"model.variant": "hf", "model.compile": False, **BF16},
        "hf_bf16_compiled": {"model.variant": "hf", "model.compile": True, **BF16},
    }
    for recipe in VARIANTS["torchao"].recipes:
        settings[f"torchao_{recipe}"] = {"model.variant": "torchao", **_fp8(recipe)}
    for variant in (v.name for v in VARIANTS.values() if v.te):
        kinds = {"bf16": BF16, **{f"fp8_{recipe}": _fp8(recipe) for recipe in VARIANTS[variant].recipes}}
        kinds["fp8_delayed_exact_head"] = {**_fp8("delayed"), "precision.fp8_head_gradients": False}
        # what changes numerics, and so is no default
        kinds["fp8_delayed_fp8_head"] = {**_fp8("delayed"), "precision.bf16_modules": []}
        if variant == "te_layer":
            kinds["fp8_delayed_fast_wgrad"] = {**_fp8("delayed"), "precision.fast_accumulation_wgrad": True}
        for kind, how in kinds.items():
            settings[f"{variant}_{kind}"] = {"model.variant": variant, **how, **EAGER}
            settings[f"{variant}_{kind}_graph"] = {"model.variant": variant, **how, **GRAPH}
        # chooses FP8 or bf16, graphs and attention by measurement: a minute more for each micro-batch
        settings[f"{variant}_auto"] = {"model.variant": variant, **_fp8("delayed"), "precision.auto": True}
        # the same passes within random documents (--document_length), next to the row without "documents_"
        for kind in ("bf16", "fp8_delayed"):
            how = {"model.variant": variant, **kinds[kind], "data.document_mask": True}
            settings[f"documents_{variant}_{kind}"] = {**how, **EAGER}
            settings[f"documents_{variant}_{kind}_graph"] = {**how, **GRAPH}
        if variant == "te_layer":  # beside the row without "muon_": what its step costs
            for kind in ("bf16", "fp8_delayed"):
                settings[f"muon_te_layer_{kind}_graph"] = {
                    **settings[f"te_layer_{kind}_graph"],
                    "optim": "muon",
                }
    settings["te_layer_fp8_delayed_off"] = {"model.variant": "te_layer", **_fp8("delayed"), **ALL_OFF}
    return {name: Row(name, how) for name, how in settings.items()} | _megatron_presets()


def _megatron_presets() -> dict[str, Row]:
    """Of Megatron-Core, where it is installed: FP8 and bf16, with what else its configuration offers one model."""
    kinds = {"bf16": BF16, "fp8_delayed": _fp8("delayed"), "fp8_current": _fp8("current")}
    rows = {}
    for kind, how in kinds.items():
        for suffix, switches in MEGATRON_SWITCHES.items():
            name = f"megatron_core_{kind}{suffix}"
            rows[name] = Row(name, {"model.variant": "te_layer", **how}, switches)
    return rows


# of the name -> of its TransformerConfig, on
MEGATRON_SWITCHES: dict[str, dict[str, bool]] = {
    "": {},
    "_op_fuser": {"use_transformer_engine_op_fuser": True},
    "_op_fuser_qkv_rope": {"use_transformer_engine_op_fuser": True, "fused_single_qkv_rope": True},
}
PRESETS = _presets()

# What is measured unless --rows, --step_rows say otherwise: enough for the comparisons that matter, in minutes.
DEFAULT_ROWS = (
    "hf_bf16* torchao_* te_linear_bf16* te_linear_fp8_delayed* te_layer_bf16* te_layer_fp8_delayed "
    "te_layer_fp8_delayed_graph te_layer_fp8_delayed_off te_layer_fp8_delayed_fp8_head "
    "te_layer_fp8_delayed_fast_wgrad te_layer_fp8_current te_layer_fp8_block megatron_core_*"
).split()
DEFAULT_STEP_ROWS = (
    "hf_bf16* torchao_tensorwise te_linear_bf16 te_linear_fp8_delayed te_layer_bf16* te_layer_fp8_delayed "
    "te_layer_fp8_delayed_graph megatron_core_*"
).split()
# The reference's rows take seconds at best; those of each kind show that everything runs.
CPU_ROWS = ["hf_bf16", "te_linear_bf16", "te_layer_bf16", "te_layer_fp8_delayed"]


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


def all_rows(options: argparse.Namespace) -> dict[str, Row]:
    """The rows of the table and of --row by name. Raises RowError: a bad --row; no such row in --rows, --step_rows."""
    added = parse_rows(options.row, PRESETS, ROW_KEYS, "another model or batch")
    rows = PRESETS | {row.name: row for row in added}
    for key in ("rows", "step_rows"):
        if not isinstance(patterns := getattr(options, key), ByMachine):
            select(patterns, rows, f"--{key}")
    return rows


Settings = dict[Setting, TrainingArguments]


def configured_rows(options: argparse.Namespace, rows: Mapping[str, Row]) -> list[tuple[str, Row, Settings]]:
    """(measure, row, its settings) of all that is measured; `rows` are `all_rows`.

    Raises ValueError (RowError, ConfigurationError): nothing is; what cannot be.
    """
    added = [name for name in rows if name not in PRESETS]
    named = select([*options.rows, *added], rows, "--rows")
    in_steps = select([*options.step_rows, *added], rows, "--step_rows")
    chosen = {
        # Megatron-Core's weight gradients go to its optimizer's buffers, which a step has
        "bare": [row for row in named if row.megatron is None],
        "step": [row for row in named if row in in_steps],
    }
    found = [(measure, row) for measure in MEASURES if measure in options.measure for row in chosen[measure]]
    if not found:
        raise RowError(
            "there is nothing to measure; name rows with --rows or --row, and with --step_rows some of them"
        )
    ready = [(measure, row, settings_of(row, options)) for measure, row in found]
    if (ranks := launchers.world_size()) > 1:
        for measure, row, settings in ready:
            if measure == "bare" or row.megatron or len(settings) > 1 or "precision.auto" in row.settings:
                raise RowError(
                    f"row {row.name}: on {ranks} ranks steps are measured (--measure step), of rows of this project, "
                    "with one --micro_batch, one --attention (--sdpa, --loss) and no precision.auto: each rank would "
                    "choose by its own clock"
                )
    return ready


def settings_of(row: Row, options: argparse.Namespace) -> Settings:
    """What the first round tries: every micro-batch, smallest first, with every attention that the row can have, and
    then every loss; with the resolved configuration of each. Raises RowError, ConfigurationError: it is not allowed."""
    settings, sizes, ranks = {}, sorted(options.micro_batch), launchers.world_size()
    if VARIANTS[arguments_of(row, options, "auto", sizes[0], ranks).model.variant].te:
        for attention, micro_batch in itertools.product(options.attention, sizes):
            arguments = arguments_of(row, options, attention, micro_batch, ranks)
            if arguments.precision.auto:
                arguments.model.attention_backend = "auto"
            settings[Setting(micro_batch, arguments.model.attention_backend)] = arguments
    else:
        for loss, attention, micro_batch in itertools.product(options.loss, options.sdpa, sizes):
            settings[Setting(micro_batch, attention, loss)] = arguments_of(
                row, options, "auto", micro_batch, ranks
            )
    return settings


def arguments_of(
    row: Row, options: argparse.Namespace, attention: str, micro_batch: int, ranks: int
) -> TrainingArguments:
    """What a row is measured with on so many `ranks`, resolved; of `options` the model, the length of a sample, the
    accumulation, the seed and whether kernels are deterministic. Raises RowError, ConfigurationError: it is not
    allowed."""
    base = {
        "model": {"config": options.config, "attention_backend": attention},
        "data": {"sources": {"random tokens": "none"}},
        "precision": {},
        "speed": {},
        "max_steps": 1000,
        "max_seq_length": options.seq_length,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "full_determinism": options.deterministic,
        "seed": options.seed,
        # where precision.auto looks for an earlier choice: nowhere
        "output_dir": "nowhere",
        "resume_from_checkpoint": "never",
    }
    arguments = TrainingArguments.from_dict(row.configured(base), f"row {row.name}")
    arguments = arguments.resolve(ranks)
    if (compute := arguments.precision.compute) not in COMPUTED:
        raise RowError(
            f"row {row.name}: precision.compute is {compute}; what is compared is {' and '.join(COMPUTED)}"
        )
    return arguments
