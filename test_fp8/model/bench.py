"""All rows of `bench_model.py`: visited in rounds, reported, and what they have in common."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.build import build_model
from model.config import flops_per_token, load_config, num_parameters
from model.fp8.machine import describe, headline
from model.fp8.precision import Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE, PrecisionConfig
from test_fp8.common import report
from test_fp8.common.report import Result
from test_fp8.common.rows import Row
from test_fp8.common.same_model import LOSS_TOLERANCE, Reference
from test_fp8.model import megatron
from test_fp8.model.results import (
    EXPLAINED,
    Series,
    add_ratio_to_one_rank,
    lines,
    other_conditions,
    plot,
    results_of,
)
from test_fp8.model.rows import MEASURES, Setting, Settings
from test_fp8.model.visit import Visit, Visitor, free_memory, optimizer_ms
from train.data.stream import Batch
from train.engine.distributed import init_distributed, make_deterministic
from train.planning.autotune import resolve_auto

OPTIMIZER_SAMPLES = 8


class Bench:
    """All of `rows` (`configured_rows`).

    Raises ValueError: sizes that the model or FP8 cannot take.
    """

    def __init__(self, options: argparse.Namespace, rows: Sequence[tuple[str, Row, Settings]]):
        self.options = options
        self.config = load_config(options.config)
        length, longest = options.seq_length, self.config.max_position_embeddings
        if length % FP8_TRAIN_ROW_MULTIPLE or length > longest:
            raise ValueError(
                f"--seq_length {length}: a multiple of {FP8_TRAIN_ROW_MULTIPLE} up to the model's "
                f"max_position_embeddings {longest} is expected"
            )
        self.flops = flops_per_token(self.config, length)
        if problem := other_conditions(options, num_parameters(self.config)):
            raise ValueError(f"--one_rank: {problem}; measure it with the same options on one such GPU")
        self.series = [Series(row, measure, settings) for measure, row, settings in rows]
        self.optimizer_ms: list[float] = []
        self.finished = dict.fromkeys(options.measure, 0)  # rounds

    def measure(self, command: str) -> int:
        """All rounds, with the report of `command` after each visit of a row; the exit status."""
        options, alone = self.options, not dist.is_initialized()
        if options.deterministic:
            make_deterministic()
        if alone:
            init_distributed()
        machine, versions = describe()
        about = f"{Path(options.config).name} on {machine.get('gpu', machine['cpu'])}"
        print(headline(machine, versions))
        print(
            f"{about}: {num_parameters(self.config) / 1e6:,.1f} M parameters, {self.flops / 1e9:.3f} GFLOP a token at "
            f"{options.seq_length} tokens; {options.accumulation} micro-batches a step, {options.rounds} rounds, "
            f"deterministic kernels {'on' if options.deterministic else 'off'}; ranks: {dist.get_world_size()}"
        )
        if not torch.cuda.is_available():
            print("No GPU: small models and the CPU reference; these speeds mean nothing.")
        self.prepare()
        print(
            f"the same model: equal weights; relative errors up to {LOSS_TOLERANCE} in the loss, "
            f"{self.visitor.reference.logits_tolerance()} in the logits",
            flush=True,
        )
        for _ in self.run():
            if options.output:  # what is known so far, should the run be ended before its end
                results = self.results()
                report.write_json(options.output, command, results, **self.conditions())
                plot(results, f"{about}, {options.seq_length} tokens a sample", options.output)
        results = self.results()
        print("\n".join(["", *lines(results)]))
        free_memory()
        if alone:
            dist.destroy_process_group()
        failed = [f"{r['measure']} {r['row']}: {r['reason']}" for r in results if r.get("failed")]
        for line in failed:
            print(f"failed: {line}", file=sys.stderr)
        return int(bool(failed))

    def prepare(self) -> None:
        """The batch, and what transformers' model in bf16 makes of it."""
        options = self.options
        generator = torch.Generator().manual_seed(options.seed)
        shape = max(options.micro_batch), options.seq_length + 1
        ids = torch.randint(self.config.vocab_size, shape, generator=generator)
        ids = ids.to("cuda" if torch.cuda.is_available() else "cpu")
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        model = build_model(self.config, "hf", Precision(PrecisionConfig(compute="bf16")), seed=options.seed)
        reference = Reference.of(model, batch.input_ids, batch.labels)
        self.visitor = Visitor(reference, batch, options.seconds, options.document_length, options.steps)

    def run(self) -> Iterator[None]:
        """Measure; yields after each visit, when `results` has news."""
        for measure in MEASURES:
            series = [s for s in self.series if s.measure == measure]
            for turn in range(self.options.rounds if series else 0):
                if measure == "step":
                    self._time_optimizer(series)
                for place, one in enumerate(series if turn % 2 == 0 else reversed(series), start=1):
                    self._visit(one, turn)
                    self.finished[measure] += place == len(series)
                    yield

    def _time_optimizer(self, series: Sequence[Series]) -> None:
        if dist.get_world_size() > 1:  # which share it
            return
        arguments = next(iter(series[0].settings.values()))
        try:
            self.optimizer_ms += optimizer_ms(self.visitor.reference.weights, arguments, OPTIMIZER_SAMPLES)
        except torch.OutOfMemoryError:
            print("the optimizer alone: out of memory; what DeepSpeed adds is not known")

    def _visit(self, series: Series, turn: int) -> None:
        """All settings of `series` that this round has for it; of those that were fastest bare the first that fits."""
        bare = next((s for s in self.series if (s.row, s.measure) == (series.row, "bare")), None)
        bare = bare if series.measure == "step" else None
        series.failed = series.failed or (bare.failed if bare else None)
        for setting in [] if series.failed else series.candidates(turn, bare):
            label = f"{series.measure:<4} {series.row.name:<38} {setting}"
            try:
                self._tune(series, setting)
                visit = self._measured(series, setting)
                visit.turn = turn
            except Exception as error:  # whatever it is, the other rows go on
                if dist.get_world_size() > 1:  # the other ranks may wait for this one
                    raise
                if series.refuse(setting, error) and not isinstance(error, EXPLAINED):
                    traceback.print_exc()
                print(f"{label} {series.reasons[setting]}", flush=True)
                if series.failed:
                    return
                continue
            series.visits.setdefault(setting, []).append(visit)
            rate = series.tokens_per_second(setting, [visit])
            before = visit.before_gib or 0.0
            left = f", {before:.1f} GiB were allocated before it" if before > 0.5 else ""
            print(
                f"{label} {rate:>11,.0f} tokens/s, loss {visit.loss:.5f}, {visit.attention}, visit of "
                f"{visit.seconds:.1f} s{left}",
                flush=True,
            )
            if bare:
                return

    def _measured(self, series: Series, setting: Setting) -> Visit:
        arguments, row = series.settings[setting], series.row
        if row.megatron is not None:
            return megatron.visit(arguments, row.megatron, self.visitor, self.config)
        return self.visitor.visit(arguments, series.measure, setting.attention, setting.loss)

    def _tune(self, series: Series, setting: Setting) -> None:
        """What the row leaves to precision.auto is chosen once for both measures."""
        if not series.settings[setting].precision.auto:
            return
        free_memory()
        arguments = resolve_auto(series.settings[setting], 1, print)
        choice = {
            "compute": arguments.precision.compute,
            "cuda_graphs": arguments.speed.cuda_graphs,
            "attention_backend": arguments.model.attention_backend,
        }
        for one in self.series:
            if one.row == series.row:
                one.settings[setting] = arguments
                one.choices[setting] = choice

    def results(self) -> list[Result]:
        results = results_of(self.series, self.optimizer_ms, self.flops)
        if self.options.one_rank:
            add_ratio_to_one_rank(results, self.options.one_rank, dist.get_world_size())
        return results

    def conditions(self) -> dict[str, Any]:
        """What all rows have in common, for the report."""
        options = "seq_length document_length accumulation rounds steps deterministic seed".split()
        return {
            "model": Path(self.options.config).name,
            "parameters": num_parameters(self.config),
            "gflop_per_token": self.flops / 1e9,
            **{key: getattr(self.options, key) for key in options},
            "ranks": dist.get_world_size(),
            "rounds_finished": self.finished,
            "loss_tolerance": LOSS_TOLERANCE,
            "logits_tolerance": self.visitor.reference.logits_tolerance(),
            "optimizer_ms": self.optimizer_ms,
        }
