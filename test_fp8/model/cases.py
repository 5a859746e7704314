"""Define the benchmark cases for bench_model.py and their training configurations."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from typing import Any, NamedTuple

from model.fp8.hardware import HOPPER_RECIPES
from model.variants import VARIANTS, SpeedConfig
from test_fp8.common.cases import Case, CaseError, parse_cases, select
from train import rank_env
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, resolve_arguments

SDPA = (
    "auto",
    "cudnn",
    "flash",
    "efficient",
)  # SDPA backends of torch, for the cases with modules from transformers
LOSSES = ("torch", "compiled", "liger")
COMPUTED = ("bf16", "fp8")  # precisions for which same_model.py has tolerances
BASELINE = "hf_bf16"
SEED = 42  # seed for random weights and tokens
# Configuration keys that a benchmark case may override. They change how the model is computed, but not the model.
CASE_KEYS = [
    *("model.variant", "model.compile", "model.attention_backend", "precision", "speed"),
    *("gradient_checkpointing", "optim", "deepspeed"),
]
MEGATRON_SWITCHES: dict[str, dict[str, Any]] = {
    "": {},
    "_graph": {"cuda_graph_impl": "local"},
    "_fp8_params": {"fp8_param": True},
    "_op_fuser": {"use_transformer_engine_op_fuser": True},
    "_op_fuser_graph": {"use_transformer_engine_op_fuser": True, "cuda_graph_impl": "local"},
    "_op_fuser_fp8_params": {"use_transformer_engine_op_fuser": True, "fp8_param": True},
    "_op_fuser_qkv_rope": {"use_transformer_engine_op_fuser": True, "fused_single_qkv_rope": True},
}
# The default cases are the most important comparisons. They take several minutes.
DEFAULT_ROWS = (
    "hf_bf16* torchao_tensorwise te_linear_bf16 te_linear_fp8_delayed te_layer_bf16* te_layer_fp8_delayed "
    "te_layer_fp8_delayed_graph megatron_core_bf16 megatron_core_fp8_delayed*"
).split()
CPU_ROWS = ["hf_bf16", "te_linear_bf16", "te_layer_bf16", "te_layer_fp8_delayed"]

_DELAYED = {"recipe": "delayed", "fp8_format": "e4m3"}
# The cases of compare_gradients.py, with keys of the section "precision", gradient_checkpointing and main_grad.
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "delayed_hybrid": {"recipe": "delayed", "fp8_format": "hybrid"},
    "delayed_e4m3": _DELAYED,
    "delayed_e4m3_bf16_head": {**_DELAYED, "fp8_head_gradients": False},
    "delayed_e4m3_fp8_head": {**_DELAYED, "bf16_modules": []},
    "delayed_e4m3_mlp": {**_DELAYED, "gradient_checkpointing": "mlp"},
    "delayed_e4m3_main_grad": {**_DELAYED, "main_grad": True},
    "delayed_e4m3_fast_wgrad": {**_DELAYED, "fast_accumulation_wgrad": True},
    "current_hybrid": {"recipe": "current", "fp8_format": "hybrid"},
    "current_e4m3": {"recipe": "current", "fp8_format": "e4m3"},
    "block": {"recipe": "block"},
}


class Setting(NamedTuple):
    """A combination of micro-batch size, attention backend and loss implementation to try for a benchmark case."""

    micro_batch: int
    attention: str  # the requested backend
    loss: str = "own"  # one of LOSSES for the cases hf_* and torchao_*


def _fp8(recipe: str, **more: Any) -> dict[str, Any]:
    return {"precision.compute": "fp8", "precision.recipe": recipe} | {
        f"precision.{k}": v for k, v in more.items()
    }


def _presets() -> dict[str, Case]:
    bf16 = {"precision.compute": "bf16"}
    overrides: dict[str, dict[str, Any]] = {
        BASELINE: {"model.variant": "hf", "model.compile": False, **bf16},
        "hf_bf16_compiled": {"model.variant": "hf", "model.compile": True, **bf16},
    }
    for recipe in VARIANTS["torchao"].recipes:
        overrides[f"torchao_{recipe}"] = {"model.variant": "torchao", **_fp8(recipe)}
    for variant in (v.name for v in VARIANTS.values() if v.te):
        kinds = {"bf16": bf16, **{f"fp8_{recipe}": _fp8(recipe) for recipe in HOPPER_RECIPES}}
        kinds["fp8_delayed_exact_head"] = _fp8("delayed", fp8_head_gradients=False)
        kinds["fp8_delayed_fp8_head"] = _fp8("delayed", bf16_modules=[])
        if variant == "te_layer":
            kinds["fp8_delayed_fast_wgrad"] = _fp8("delayed", fast_accumulation_wgrad=True)
        for kind, suffix in itertools.product(kinds, ("", "_graph")):
            how = {"model.variant": variant, **kinds[kind], "speed.cuda_graphs": bool(suffix)}
            overrides[f"{variant}_{kind}{suffix}"] = how
            if variant == "te_layer" and suffix and kind in ("bf16", "fp8_delayed"):
                overrides[f"muon_te_layer_{kind}_graph"] = {**how, "optim": "muon"}
    off = {f"speed.{key}": value for key, value in asdict(SpeedConfig.off()).items()}
    overrides["te_layer_fp8_delayed_off"] = {"model.variant": "te_layer", **_fp8("delayed"), **off}
    packs = {"model.variant": "te_layer", **_fp8("delayed"), "gradient_checkpointing": "mlp"}
    overrides["te_layer_fp8_delayed_mlp"] = packs
    cases = {name: Case(name, how) for name, how in overrides.items()}
    for kind, how in (("bf16", bf16), ("fp8_delayed", _fp8("delayed")), ("fp8_current", _fp8("current"))):
        for suffix, switches in MEGATRON_SWITCHES.items():
            if "fp8_param" not in switches or how is not bf16:
                name = f"megatron_core_{kind}{suffix}"
                cases[name] = Case(name, {"model.variant": "te_layer", **how}, switches)
    return cases


PRESETS = _presets()


def chosen_cases(options: argparse.Namespace) -> list[tuple[Case, dict[Setting, TrainingArguments]]]:
    """Return the benchmark cases that the command line selects.

    Each entry contains the case and the settings to try with their training arguments. Raises CaseError or
    ConfigurationError if a case is invalid.
    """
    added = parse_cases(options.row, PRESETS, CASE_KEYS)
    cases = PRESETS | added
    selected = select([*options.rows, *added], cases)
    found = [(case, candidate_settings(case, options)) for case in selected]
    if rank_env.world_size() > 1:
        for case, settings in found:
            if case.megatron is not None or len(settings) > 1:
                raise CaseError(
                    f"case {case.name}: runs with several ranks do not support megatron_core_* cases, and accept "
                    "only one value each for --micro_batch, --attention, --sdpa and --loss"
                )
    return found


def candidate_settings(case: Case, options: argparse.Namespace) -> dict[Setting, TrainingArguments]:
    """Return all settings to try for a benchmark case, with their training arguments.

    The settings combine every micro-batch size, starting with the smallest, with every attention backend and loss
    implementation.
    """
    sizes, ranks = sorted(options.micro_batch), rank_env.world_size()
    te = VARIANTS[training_arguments(case, options, "auto", sizes[0], ranks).model.variant].te
    losses, attentions = (["own"], options.attention) if te else (options.loss, options.sdpa)
    return {
        Setting(size, attention, loss): training_arguments(
            case, options, attention if te else "auto", size, ranks
        )
        for loss, attention, size in itertools.product(losses, attentions, sizes)
    }


def training_arguments(
    case: Case, options: argparse.Namespace, attention: str, micro_batch: int, ranks: int
) -> TrainingArguments:
    """Return the resolved training arguments for a benchmark case.

    Raises CaseError or ConfigurationError if the case is invalid.
    """
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
        "seed": SEED,
        "output_dir": "nowhere",
        "resume_from_checkpoint": "never",
    }
    arguments = resolve_arguments(build_arguments(case.configured(base), f"case {case.name}"), ranks)
    if arguments.precision.compute not in COMPUTED or arguments.precision.auto:
        raise CaseError(
            f"case {case.name}: the benchmark does not support precision.compute "
            f"{arguments.precision.compute} with precision.auto {str(arguments.precision.auto).lower()}; set "
            f"precision.compute to {' or '.join(COMPUTED)}, and precision.auto to false"
        )
    return arguments
