"""Check that training with any ZeRO stage on two ranks is equivalent to training on one rank.

The cases cover each ZeRO stage with each model variant, in bf16 and each FP8 recipe, with and without gradient
checkpointing. They also cover Muon, low-precision optimizer states and offloading. A case passes if losses and gradient
norms agree in all steps, or if the configuration is refused before the run starts.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from model.variants import VARIANTS
from test_fp8.common.cases import Case
from tests.reliability.launching import run_cases, training_case
from tests.train.runs import ROOT, metrics
from train.config.load import build_arguments
from train.preflight.check import check

RANKS, STEPS = 2, 4
MICRO_BATCH, ACCUMULATION, SEQ_LENGTH = (
    2,
    2,
    64,
)  # one rank accumulates as many micro-batches as two ranks together
SWITCHES: list[dict[str, Any]] = [
    *({"precision__optimizer_states": states} for states in ("bf16_remainder", "int8", "fp8")),
    {"optim": "muon"},
    {"precision__fp8_weight_gather": True},
    *({"precision__gradient_communication": dtype} for dtype in ("fp32", "bf16")),
    {"zero_optimization__zero_quantized_gradients": True},
    *({f"zero_optimization__{name}": "cpu"} for name in ("offload_optimizer", "offload_param")),
]
# Largest allowed relative differences over all steps, and in the first step, in which the weights are still equal.
# The tolerance for FP8 is wider, because a different rounding of a sum can change an FP8 number. Also, delayed scaling
# updates its scales in each micro-batch, and with several ranks each rank has fewer micro-batches.
TOLERANCE = {
    "bf16": {"loss": 1e-4, "grad_norm": 5e-3, "first_grad_norm": 1e-3},
    "fp8": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-3},
    "delayed": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-2},
}


def make_case(stage: int, variant: str, precision: str, recompute: bool = False, /, **more: Any) -> Case:
    """Return a test case for a ZeRO stage, a model variant and a precision.

    more: additional configuration keys, with "__" instead of dots. zero_optimization__NAME sets a DeepSpeed key.
    """
    deepspeed = json.loads((ROOT / f"train_args/ds_config_zero{stage}.json").read_text(encoding="utf-8"))
    overrides: dict[str, Any] = {"model.variant": variant, "precision.compute": precision}
    recipes = VARIANTS[variant].recipes
    if precision == "fp8" and recipes:
        overrides["precision.recipe"] = recipes[0]
    for key, value in more.items():
        section, _, name = key.partition("__")
        if section == "zero_optimization":
            deepspeed[section][name] = {"device": value} if name.startswith("offload") else value
        else:
            overrides[key.replace("__", ".")] = value
    words = [f"{key.rpartition('__')[2]}_{value}" for key, value in more.items()]
    name = "-".join([f"zero{stage}", variant, precision, *["recompute"] * recompute, *words])
    return Case(name, overrides | {"gradient_checkpointing": recompute, "deepspeed": deepspeed})


def make_matrix() -> dict[str, Case]:
    """Return all cases by name."""
    cases = []
    for stage, variant, precision, recompute in product(range(4), VARIANTS, ("bf16", "fp8"), (False, True)):
        cases.append(make_case(stage, variant, precision, recompute))
        for recipe in VARIANTS[variant].recipes[1:] if precision == "fp8" else ():
            if recipe != "mxfp8":
                cases.append(make_case(stage, variant, precision, recompute, precision__recipe=recipe))
    for recompute in (False, True):  # by default, torchao is compiled on a GPU, and ZeRO 3 is refused
        cases.append(make_case(3, "torchao", "fp8", recompute, model__compile=False))
    cases += [
        make_case(stage, "te_layer", "fp8", False, **switch) for stage, switch in product(range(4), SWITCHES)
    ]
    matrix = {case.name: case for case in cases}
    assert len(matrix) == len(cases)
    return matrix


MATRIX = make_matrix()


def configure(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case. A step uses the same samples on one rank as on two ranks."""
    base = {key: value for key, value in settings.items() if key != "gradient_accumulation_steps"}
    return case.configured(
        base
        | {
            "max_steps": STEPS,
            "max_seq_length": SEQ_LENGTH,
            "per_device_train_batch_size": MICRO_BATCH,
            "train_batch_size_tokens": ACCUMULATION * RANKS * MICRO_BATCH * SEQ_LENGTH,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
        }
    )


def is_refused(config: dict[str, Any]) -> bool:
    try:
        check(build_arguments(config), RANKS, RANKS, [])
    except UserError:
        return True
    return False


def test_refused_combinations(settings: dict[str, Any]) -> None:
    refused = [name for name, case in MATRIX.items() if is_refused(configure(case, settings))]
    plain = {name for name in refused if name.count("-") == 2 or name.endswith("-recompute")}
    kinds = [f"{kind}{again}" for kind in ("hf-fp8", "torchao-bf16") for again in ("", "-recompute")]
    assert plain == {f"zero{stage}-{kind}" for stage in range(4) for kind in kinds}
    stages = {
        key: "".join(sorted(name[4] for name in refused if key in name))
        for key in ("muon", "weight_gather", "states_int8", "offload", "quantized")
    }
    assert stages == {
        "muon": "",
        "weight_gather": "012",
        "states_int8": "023",
        "offload": "001123",
        "quantized": "0123",
    }


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == "zero3-te_linear-fp8" else pytest.mark.reliability
        )
        for name in MATRIX
    ],
)
def test_two_ranks_train_like_one(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    case = MATRIX[name]
    config = configure(case, settings)
    if is_refused(config):
        return
    folders = {ranks: tmp_path / f"on_{ranks}" for ranks in (RANKS, 1)}
    cases = [training_case(ranks, config, folder) for ranks, folder in folders.items()]
    found = run_cases(tmp_path / "results", cases)
    assert all(result["error"] is None for results in found for result in results)
    two, one = ([m for m in metrics(folder) if "loss" in m] for folder in folders.values())
    assert len(two) == STEPS and [m["tokens"] for m in two] == [m["tokens"] for m in one]
    kinds = case.overrides.get("precision.recipe"), case.overrides["precision.compute"]
    tolerance = next(TOLERANCE[kind] for kind in kinds if kind in TOLERANCE)
    # gradient norms are compared, because AdamW and clipping hide a gradient that is wrong by a constant factor
    for key in ("loss", "grad_norm"):
        assert [m[key] for m in two] == pytest.approx([m[key] for m in one], rel=tolerance[key])
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=tolerance["first_grad_norm"])
