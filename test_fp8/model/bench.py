"""Measure all cases of bench_model.py in rounds, and make their results: the best setting, the speed, the ratios."""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.build import build_model
from model.config import flops_per_token, load_config, num_parameters
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE, PrecisionConfig
from model.startup_check import StartupCheckError
from test_fp8.common.cases import Case, Unavailable
from test_fp8.common.report import Outcome, Result, measured
from test_fp8.common.same_model import LOSS_TOLERANCE, DifferentModel, Reference
from test_fp8.model import megatron
from test_fp8.model.cases import BASELINE, MEASURES, Setting, chosen_cases
from test_fp8.model.measure import Conditions, free_memory, measure_case
from train.config.arguments import TrainingArguments
from train.data.stream import Batch
from train.engine.distributed import init_distributed, make_deterministic

OUT_OF_MEMORY = "out of memory"
# How torch's and Transformer Engine's errors begin when none of the allowed attentions takes the inputs.
NO_ATTENTION = ("No available kernel", "No dot product attention backend is available")
EXPLAINED = (DifferentModel, StartupCheckError, PrecisionError, Unavailable)  # their message says everything
CONDITION_KEYS = "seq_length accumulation rounds steps deterministic seed".split()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is a lack of GPU memory; a failed capture hides it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Series:
    """All measurements of `case`, by setting. `failed`: what is wrong with the case, which then has no speed."""

    case: Case
    measure: str
    settings: Mapping[Setting, TrainingArguments]
    found: dict[Setting, list[Result]] = field(default_factory=dict)
    reasons: dict[Setting, str] = field(default_factory=dict)
    failed: str = ""

    def candidates(self, turn: int) -> list[Setting]:
        """The settings to measure in round `turn`: at first all, later the fastest."""
        best = self.best()
        return list(self.settings) if not turn else [best] if best else []

    def refuse(self, setting: Setting, error: BaseException) -> None:
        """Note why a measurement failed: the machine's size or kind, or else a fault of the case."""
        text, is_fault = " ".join(str(error).split()), False
        if is_out_of_memory(error):
            text = OUT_OF_MEMORY
        elif not isinstance(error, Unavailable) and not text.startswith(NO_ATTENTION):
            is_fault = True
            if not isinstance(error, EXPLAINED):
                traceback.print_exception(error)
                text = f"{type(error).__name__}: {text[:300]}"
        self.reasons[setting] = text
        self.failed = text if is_fault else self.failed

    def best(self) -> Setting | None:
        return max(self.found, key=self.tokens_per_second, default=None)

    def speeds(self, setting: Setting) -> list[float]:
        """Tokens/s of each measurement of a setting."""
        arguments = self.settings[setting]
        tokens = arguments.train_batch_size_tokens or 0
        if self.measure == "bare":
            tokens = arguments.per_device_train_batch_size * arguments.max_seq_length
        return [tokens / one["ms"] * 1e3 for one in self.found[setting]]

    def tokens_per_second(self, setting: Setting) -> float:
        return statistics.median(self.speeds(setting))

    def result(self, flops_per_token: float) -> Result:
        setting = None if self.failed else self.best()
        arguments = self.settings[setting or next(iter(self.settings))]
        measured = [s._asdict() | {"tokens_per_second": self.tokens_per_second(s)} for s in self.found]
        result: Result = {
            "row": self.case.name,
            "measure": self.measure,
            "variant": "megatron_core" if self.case.megatron is not None else arguments.model.variant,
            "compute": arguments.precision.compute,
            "configuration": {**self.case.overrides, **(self.case.megatron or {})},
            "tried": measured + [s._asdict() | {"reason": why} for s, why in self.reasons.items()],
        }
        if setting is None:
            reason = self.failed or next(iter(self.reasons.values()), "not measured")
            return result | {"reason": reason, "failed": bool(self.failed)}
        each, speeds, speed = self.found[setting], self.speeds(setting), self.tokens_per_second(setting)
        largest = {
            key: max(one[key] for one in each) for key in ("allocated_gib", "reserved_gib", "loss_error")
        }
        figures = {
            "micro_batch": setting.micro_batch,
            "tokens_per_second": speed,
            "tflops": speed * flops_per_token / 1e12,
            f"{'step' if self.measure == 'step' else 'pass'}_ms": statistics.median(
                one["ms"] for one in each
            ),
            "rounds": speeds,
            "drift": max(speeds) / min(speeds) - 1,
        }
        return result | each[-1] | largest | figures


def measure(options: argparse.Namespace) -> Outcome:
    """Measure the cases of `options`. Raises ValueError: a size that the model or FP8 cannot take."""
    config = load_config(options.config)
    longest, parameters = config.max_position_embeddings, num_parameters(config)
    if options.seq_length % FP8_TRAIN_ROW_MULTIPLE or options.seq_length > longest:
        raise ValueError(
            f"--seq_length {options.seq_length}: expected a multiple of {FP8_TRAIN_ROW_MULTIPLE} up to {longest}"
        )
    series = [Series(case, name, settings) for name, case, settings in chosen_cases(options)]
    flops = flops_per_token(config, options.seq_length)
    if options.deterministic:
        make_deterministic()
    is_own_group = not dist.is_initialized()
    if is_own_group:
        init_distributed()
    conditions = conditions_of(options, config)
    tolerance = conditions.reference.logits_tolerance()
    print(
        f"{Path(options.config).name}: {parameters / 1e6:,.1f} M parameters, {flops / 1e9:.3f} GFLOP a token; ranks: "
        f"{dist.get_world_size()}\nthe same model: equal weights; relative errors up to {LOSS_TOLERANCE} in the loss, "
        f"{tolerance} in the logits",
        flush=True,
    )
    for name in MEASURES:
        chosen = [one for one in series if one.measure == name]
        for turn in range(options.rounds):
            for one in chosen if turn % 2 == 0 else reversed(chosen):
                measure_settings(one, turn, conditions)
    free_memory()
    results = [one.result(flops) for one in series]
    for name in MEASURES:
        add_ratios([r for r in measured(results) if r["measure"] == name])
    more = {
        "model": Path(options.config).name,
        "parameters": parameters,
        "gflop_per_token": flops / 1e9,
        **{key: getattr(options, key) for key in CONDITION_KEYS},
        "ranks": dist.get_world_size(),
        "loss_tolerance": LOSS_TOLERANCE,
        "logits_tolerance": tolerance,
    }
    if is_own_group:
        dist.destroy_process_group()
    failures = [f"{r['measure']} {r['row']}: {r['reason']}" for r in results if r.get("failed")]
    lines = ["* the fastest bf16 of its measure; x bf16: the ratio to it"]
    speeds = {
        name: {r["row"]: r["tokens_per_second"] for r in measured(results) if r["measure"] == name}
        for name in MEASURES
    }
    return Outcome(results, more, lines, failures, speeds, "tokens/s")


def conditions_of(options: argparse.Namespace, config: Any) -> Conditions:
    """A random batch, and what transformers' model in bf16 computes of it."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = max(options.micro_batch), options.seq_length + 1
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    ids = ids.to("cuda" if torch.cuda.is_available() else "cpu")
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model = build_model(config, "hf", Precision(PrecisionConfig(compute="bf16")), seed=options.seed)
    reference = Reference.of(model, batch.input_ids, batch.labels)
    return Conditions(config, reference, batch, options.seconds, options.steps)


def measure_settings(one: Series, turn: int, conditions: Conditions) -> None:
    """Measure what round `turn` has for a case. After a failure the other cases go on."""
    for setting in one.candidates(turn):
        if one.failed:
            return
        arguments, label = (
            one.settings[setting],
            f"{one.measure:<4} {one.case.name:<38} {' '.join(map(str, setting))}",
        )
        try:
            if one.case.megatron is not None:
                found = megatron.measure_case(arguments, one.case.megatron, conditions)
            else:
                found = measure_case(arguments, one.measure, setting, conditions)
        except Exception as error:
            if dist.get_world_size() > 1:  # the other ranks may wait for this one
                raise
            one.refuse(setting, error)
            print(f"{label}: {one.reasons[setting]}", flush=True)
            continue
        one.found.setdefault(setting, []).append(found)
        speed = one.speeds(setting)[-1]
        print(f"{label}: {speed:,.0f} tokens/s, loss {found['loss']:.5f}, {found['attention']}", flush=True)


def add_ratios(results: Sequence[Result]) -> None:
    """Compare the results of one measure with `BASELINE` and with the fastest bf16 case."""
    base = next((r["tokens_per_second"] for r in results if r["row"] == BASELINE), None)
    bf16 = [r for r in results if r["compute"] == "bf16"]
    best = max(bf16, key=lambda r: r["tokens_per_second"], default=None)
    for r in results:
        speed = r["tokens_per_second"]
        r[f"ratio_to_{BASELINE}"] = speed / base if base else None
        r["ratio_to_best_bf16"] = speed / best["tokens_per_second"] if best else None
        r["best_bf16"] = r is best
