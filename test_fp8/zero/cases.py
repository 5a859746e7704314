"""The cases of zero_matrix.py, and whether a run refuses one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from model.variants import VARIANTS
from test_fp8.common.cases import Case, is_under
from test_fp8.common.folders import make_folder
from test_fp8.common.options import ROOT
from train.config.arguments import TrainingArguments
from train.preflight.check import check

SEQ_LENGTH, MICRO_BATCH = 64, 2
ACCUMULATION = 2  # on several ranks; on one it is as many times larger
VOCAB = 512
# What DeepSpeed could move to host memory, by stage.
OFFLOADS = {
    0: [],
    1: ["offload_optimizer"],
    2: ["offload_optimizer"],
    3: ["offload_optimizer", "offload_param"],
}
# The refusal of a case must be about these keys.
CASE_KEYS = ("model", "precision", "zero_optimization", "gradient_checkpointing", "optim")


def case_of(stage: int, variant: str, precision: str, recompute: bool = False, /, **more: Any) -> Case:
    """`more`: other keys, "__" for the dots; zero_optimization__NAME is one of DeepSpeed's."""
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


def matrix(stages: Sequence[int], variants: Sequence[str], precisions: Sequence[str]) -> Iterator[Case]:
    """All cases, the most important first: Transformer Engine's variants before transformers', of each the plain cases,
    then optimizers, states, gradients and offloading with one of them, recomputation, and the other recipes."""
    of_te, others = ([v for v in variants if VARIANTS[v].te == te] for te in (True, False))
    for group in (of_te, others):
        plain = list(product(stages, group, precisions))
        yield from (case_of(*sizes) for sizes in plain)
        for stage in stages if group is (of_te or others) else ():
            sizes = stage, group[-1], precisions[-1]
            for states in ("bf16_remainder", "int8", "fp8"):
                yield case_of(*sizes, precision__optimizer_states=states)
            yield case_of(*sizes, optim="muon")
            for dtype in ("fp32", "bf16"):
                yield case_of(*sizes, precision__gradient_communication=dtype)
            yield case_of(*sizes, zero_optimization__zero_quantized_gradients=True)
            for offload in OFFLOADS[stage]:
                more = {f"zero_optimization__{offload}": "cpu"}
                yield case_of(*sizes, False, **more)
        yield from (case_of(*sizes, True) for sizes in plain)
        for stage, variant, precision in plain:
            recipes: list[dict[str, Any]] = [{"precision__recipe": r} for r in VARIANTS[variant].recipes[1:]]
            if stage == 3 and variant == "torchao":  # on a GPU it is compiled, which is refused
                recipes.append({"model__compile": False})
            for keys, recompute in product(recipes if precision == "fp8" else [], (False, True)):
                yield case_of(stage, variant, precision, recompute, **keys)


def settings_of(case: Case, config: str, steps: int, ranks: int, data: Path) -> dict[str, Any]:
    """The training configuration of a case; tokens of a step are the same on one rank and on `ranks`."""
    return case.configured(
        {
            "model": {"config": config},
            "precision": {},
            "data": {"sources": {"made": str(data)}},
            "max_steps": steps,
            "max_seq_length": SEQ_LENGTH,
            "per_device_train_batch_size": MICRO_BATCH,
            "train_batch_size_tokens": ACCUMULATION * ranks * MICRO_BATCH * SEQ_LENGTH,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "output_dir": "unused",
            "logging_steps": 1,
            "max_eval_samples": 2,
            "save_strategy": "no",
            "hang_timeout_s": 180,  # of the first step too, which torch.compile may compile for
            "resume_from_checkpoint": "never",
        }
    )


def make_data(folder: Path) -> Path:
    """Make prepared tokens of which each depends mostly on the one before: there is something to learn."""
    random = np.random.default_rng(1)
    tokens = np.zeros(40_000, dtype=np.int64)
    noise = random.integers(0, 4, len(tokens))
    for place in range(1, len(tokens)):
        tokens[place] = (tokens[place - 1] * 5 + 1 + noise[place]) % VOCAB
    return make_folder(folder, {"train": [tokens[:36_000]], "eval": [tokens[36_000:]]}, vocab_size=VOCAB)


def refusal(settings: dict[str, Any], ranks: int, devices: list[int] | None) -> str | None:
    """Why train/launch.py refuses to start this configuration, or None."""
    try:
        check(TrainingArguments.from_dict(settings), ranks, ranks, devices)
    except (ValueError, UserError) as error:
        return str(error)
    return None


def is_about_case(reason: str) -> bool:
    """Whether every problem of a refusal concerns keys of a case, not the data or the machine."""
    lines = [line.strip() for line in reason.splitlines() if not line.endswith(":")]
    return all(is_under(line.partition(":")[0].partition(" ")[0], CASE_KEYS) for line in lines)
