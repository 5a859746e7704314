"""The cells of `zero_matrix.py`: how each is configured, whether a run with it is refused, and how far its trainings on
one rank and on several are apart."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import UserError
from model.variants import VARIANTS
from test_fp8.common.folders import make_folder
from test_fp8.common.options import ROOT
from test_fp8.common.report import Result
from test_fp8.common.rows import is_under
from train.config.arguments import TrainingArguments
from train.preflight.check import check

SEQ_LENGTH, MICRO_BATCH = 64, 2
ACCUMULATION = 2  # on several ranks; on one as many times more
VOCAB = 512

# What DeepSpeed could move to host memory, by stage.
OFFLOADS = {1: ["offload_optimizer"], 2: ["offload_optimizer"], 3: ["offload_optimizer", "offload_param"]}
STATES = ("bf16_remainder", "int8", "fp8")
HANG_TIMEOUT_S = 180  # of the first step too, which torch.compile may compile for


@dataclass(frozen=True)
class Cell:
    """more: dotted keys of the training configuration, or of DeepSpeed's zero_optimization, that it has besides; of an
    offload the device."""

    stage: int
    variant: str
    precision: str
    recomputes: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        more = [f"{key.rpartition('.')[2]}_{value}" for key, value in self.more.items()]
        parts = [f"zero{self.stage}", self.variant, self.precision, *["recompute"] * self.recomputes, *more]
        return "-".join(parts)

    def settings(self, options: Any, data: Path, output: Path) -> dict[str, Any]:
        """Of a run on any number of ranks: tokens of a step and their micro-batches are the same."""
        zero = json.loads((ROOT / f"train_args/ds_config_zero{self.stage}.json").read_text(encoding="utf-8"))
        precision: dict[str, Any] = {"compute": self.precision}
        if self.recipe:
            precision["recipe"] = self.recipe
        model: dict[str, Any] = {"config": options.config, "variant": self.variant}
        found: dict[str, Any] = {}
        sections = {"": found, "model": model, "precision": precision} | zero
        for key, value in self.more.items():
            section, _, name = key.rpartition(".")
            sections[section][name] = {"device": value} if name.startswith("offload") else value
        return found | {
            "model": model,
            "precision": precision,
            "data": {"sources": {"made": str(data)}},
            "max_steps": options.steps,
            "max_seq_length": SEQ_LENGTH,
            "per_device_train_batch_size": MICRO_BATCH,
            "train_batch_size_tokens": ACCUMULATION * options.ranks * MICRO_BATCH * SEQ_LENGTH,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.recomputes,
            "deepspeed": zero,
            "output_dir": str(output / self.name),
            "logging_steps": 1,
            "max_eval_samples": 2,
            "save_strategy": "no",
            "hang_timeout_s": HANG_TIMEOUT_S,
            "resume_from_checkpoint": "never",
        }

    @property
    def recipe(self) -> str | None:
        """Of FP8; None of a variant that has none, or in bf16."""
        recipes = VARIANTS[self.variant].recipes if self.precision == "fp8" else ()
        return self.more.get("precision.recipe", recipes[0]) if recipes else None

    def own_keys(self) -> list[str]:
        """What a refusal of it has to be about."""
        return ["model", "precision", "zero_optimization", "gradient_checkpointing", *self.more]


def cells(stages: Sequence[int], variants: Sequence[str], precisions: Sequence[str]) -> Iterator[Cell]:
    """In the order in which somebody would miss them: each variant of Transformer Engine's in each precision; with the
    last of these the optimizers, their states, the reduction of gradients and what could be offloaded; recomputation;
    the other recipes; then transformers' variants in the same way, of which torch.compile takes longest to start."""
    of_te, others = ([v for v in variants if VARIANTS[v].te == te] for te in (True, False))
    for group in (of_te, others):
        plain = [Cell(stage, v, precision) for stage in stages for v in group for precision in precisions]
        yield from plain
        if group is (of_te or others):
            yield from optimizers(stages, group[-1], precisions[-1])
        yield from (replace(cell, recomputes=True) for cell in plain)
        for cell in plain:
            if cell.precision != "fp8":
                continue
            recipes = VARIANTS[cell.variant].recipes[1:]
            more: list[dict[str, Any]] = [{"precision.recipe": recipe} for recipe in recipes]
            if cell.stage == 3 and cell.variant == "torchao":  # on a GPU it is compiled, and that refused
                more.append({"model.compile": False})
            for keys in more:
                yield from (replace(cell, more=keys, recomputes=recomputes) for recomputes in (False, True))


def optimizers(stages: Sequence[int], variant: str, precision: str) -> Iterator[Cell]:
    for stage in stages:
        more: list[dict[str, Any]] = [{"precision.optimizer_states": states} for states in STATES]
        more += [{"optim": "muon"}]
        more += [{"precision.gradient_communication": dtype} for dtype in ("fp32", "bf16")]
        more += [{"zero_optimization.zero_quantized_gradients": True}]
        more += [{f"zero_optimization.{key}": "cpu"} for key in OFFLOADS.get(stage, [])]
        yield from (Cell(stage, variant, precision, more=keys) for keys in more)


def make_data(folder: Path) -> Path:
    """Prepared tokens of which each follows mostly from the one before: there is something to learn."""
    random = np.random.default_rng(1)
    tokens = np.zeros(40_000, dtype=np.int64)
    noise = random.integers(0, 4, len(tokens))
    for place in range(1, len(tokens)):
        tokens[place] = (tokens[place - 1] * 5 + 1 + noise[place]) % VOCAB
    return make_folder(folder, {"train": [tokens[:36_000]], "eval": [tokens[36_000:]]}, vocab_size=VOCAB)


def refusal(cell: Cell, settings: dict[str, Any], ranks: int, devices: list[int] | None) -> str | None:
    """Why train/launch.py would start no rank; None if it would start them."""
    try:
        check(TrainingArguments.from_dict(settings), ranks, ranks, devices)
    except (ValueError, UserError) as error:
        return str(error)
    return None


def is_about(cell: Cell, reason: str) -> bool:
    """Whether each problem of a refusal is one of the cell's own keys, and not of the data or the machine."""
    lines = [line.strip() for line in reason.splitlines() if not line.endswith(":")]
    keys = [line.partition(":")[0].partition(" ")[0] for line in lines]
    return all(is_under(key, cell.own_keys()) for key in keys)


def records(output: Path) -> list[Result]:
    """What metrics.jsonl has of each step."""
    file = output / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def compared(several: Sequence[Result], one: Sequence[Result], tolerance: Mapping[str, float]) -> Result:
    """`loss` and `grad_norm` of each step on several ranks and on one, the largest relative differences, also of the
    first step's gradient norm, and a "reason" if they are beyond `tolerance`. AdamW and clipping hide a factor of the
    gradient; its norm shows it."""
    steps = [(r["step"], r["tokens"]) for r in several]
    if not steps or steps != [(r["step"], r["tokens"]) for r in one]:
        return {"reason": f"{len(several)} steps on several ranks, {len(one)} on one, or of other tokens"}
    result: Result = {}
    apart = {}
    for key in ("loss", "grad_norm"):
        pairs = [(a[key], b[key]) for a, b in zip(several, one, strict=True)]
        result[key], result[f"{key}_one_rank"] = [a for a, _ in pairs], [b for _, b in pairs]
        relative = [math.inf if None in (a, b) else abs(a - b) / abs(b) for a, b in pairs]
        apart[key] = math.inf if any(map(math.isnan, relative)) else max(relative)
        apart[f"first_{key}"] = relative[0]
    result |= {f"{key}_difference": apart[key] for key in tolerance}
    beyond = [key for key, allowed in tolerance.items() if not apart[key] <= allowed]
    if beyond:
        words = [
            f"{key} {apart[key]:.1e} from one rank's, allowed are {tolerance[key]:.0e}" for key in beyond
        ]
        result["reason"] = "; ".join(words)
    return result
