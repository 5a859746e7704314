#!/usr/bin/env python3
"""Training throughput of a whole model: transformers eager and compiled, torchao, te_linear and te_layer, in bf16 and
FP8 by recipe, with and without CUDA graphs, as bare passes and inside DeepSpeed.

    python test_fp8/bench_model.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_model.py --config hare_0.4b --rows 'te_*' --step_rows '*_graph' --attention fused flash
    python test_fp8/bench_model.py --rows hf_bf16 --row mine model.variant=te_layer speed.fused_rope=false

--config: a name of model/configs, a MistralConfig JSON, or a folder that has one. --rows and --step_rows choose rows by
name (* and ? as in file names; '*' is all); --row adds one, in keys of the training configuration.

measure "bare"   forward + backward of a micro-batch, gradients dropped, no optimizer. FP8 copies of the weights are
                 kept for --accumulation passes, as in training.
measure "step"   a whole optimizer step as train/train.py makes it (train/engine/step.py): DeepSpeed with ZeRO 1 and
                 float32 accumulation over --accumulation micro-batches, clipping, AdamW.
"DeepSpeed"      what DeepSpeed adds, as a share of the step: 1 - (accumulation x pass + optimizer) / step. The passes
                 take turns with the steps and run through the same model object, captured graphs and compiled code.
                 Where weight-gradient GEMMs add into DeepSpeed's float32 buffer (speed.main_grad) they do so in the
                 passes too; elsewhere adding up gradients counts as DeepSpeed's. The optimizer is plain torch on
                 parameters of the same sizes: norm, clipping, AdamW on float32 masters, copy to bf16, zeroed gradients.

Each row must be the model that transformers' in bf16 is: the same weights, bit for bit; as many parameters; logits and
loss of the same random tokens within the tolerances that are printed; FP8 where it says FP8 and nowhere else; an
attention that agrees with SDPA. A row that is not is left out with the reason, and the exit status is 1.

Rows take turns: each of --rounds rounds visits all rows, every second one in reverse. A visit builds the model, checks
it (the first time), warms up, times, and frees everything. The first round tries each --micro_batch (te rows with each
--attention), later ones the row's fastest; "step" begins with what was fastest bare. What does not fit the memory is a
reason, no failure. Throughput is from the median of all timed passes (steps); "drift" is how far apart the rounds are.

Memory is the peak of a visit, what torch had allocated and reserved. Graphs have a pool of their own, which only
"reserved" counts in full. "launch ms" is the host's time to enqueue a pass.

Without a GPU the CPU reference runs a small model: it shows that everything works, and no speed can be read from it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from model.accounting import flops_per_token, num_parameters
from model.build import build_model
from model.config import load_config
from model.fp8.precision import Precision
from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE, PrecisionConfig
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.model import rows as bench_rows
from test_fp8.model.options import MEASURES, command, parse_arguments
from test_fp8.model.report import plot, summary_lines, table
from test_fp8.model.results import EXPLAINED, Result, Series, Setting, results_of
from test_fp8.model.same_model import LOGITS_TOLERANCE, LOSS_TOLERANCE, Reference
from test_fp8.model.visit import Visit, Visitor, free_memory, optimizer_ms
from train.autotune import resolve_auto
from train.config.arguments import TrainingArguments
from train.engine.distributed import init_distributed, make_deterministic

OPTIMIZER_SAMPLES = 8


class Bench:
    """All rows of one model: their configurations, then `run`, then `results`.

    Raises ValueError (RowError, ConfigurationError): rows that there are not, sizes that the model or FP8 cannot take.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.config = load_config(options.config)
        self._check_sizes()
        every = dict(bench_rows.PRESETS)
        for name, *pairs in options.row:
            if name in every and name not in bench_rows.PRESETS:
                raise bench_rows.RowError(f"--row {name} is given twice")
            every[name] = bench_rows.parse_row(name, pairs)
        added = [name for name in every if name not in bench_rows.PRESETS]
        rows = bench_rows.select([*options.rows, *added], every, "--rows")
        step_rows = bench_rows.select([*options.step_rows, *added], every, "--step_rows")
        chosen = {"bare": rows, "step": [row for row in rows if row in step_rows]}
        if "bare" not in options.measure and not chosen["step"]:
            raise bench_rows.RowError(
                "--step_rows: none of them is in --rows, so there is nothing to measure"
            )
        self.series = [
            Series(row, measure, self._settings(row)) for measure in MEASURES if measure in options.measure
            for row in chosen[measure]
        ]  # fmt: skip
        if not self.series:
            raise bench_rows.RowError("there is nothing to measure; name rows with --rows or --row")
        self.optimizer_ms: list[float] = []
        self.finished = dict.fromkeys(options.measure, 0)  # rounds

    def _check_sizes(self) -> None:
        unit, longest = FP8_TRAIN_ROW_MULTIPLE, self.config.max_position_embeddings
        length = self.options.seq_length
        if length % unit or length > longest:
            raise ValueError(
                f"--seq_length {length}: a multiple of {unit} up to the model's max_position_embeddings {longest} is "
                "expected"
            )

    def arguments(self, row: bench_rows.Row, setting: Setting) -> TrainingArguments:
        """The resolved training configuration of `row`. Raises ConfigurationError: it is not allowed."""
        options = self.options
        base = {
            "model": {"config": options.config, "attention_backend": setting.attention},
            "data": {"sources": {"random tokens": "none"}},
            "precision": {},
            "speed": {},
            "max_steps": 1000,
            "max_seq_length": options.seq_length,
            "per_device_train_batch_size": setting.micro_batch,
            "gradient_accumulation_steps": options.accumulation,
            "full_determinism": options.deterministic,
            "seed": options.seed,
            # where precision.auto looks for an earlier choice: nowhere
            "output_dir": "nowhere",
            "resume_from_checkpoint": "never",
        }
        arguments = TrainingArguments.from_dict(row.configured(base), f"row {row.name}").resolve(1)
        compute = arguments.precision.compute
        if compute not in LOSS_TOLERANCE:
            raise bench_rows.RowError(
                f"row {row.name}: precision.compute is {compute}; what is compared is {' and '.join(LOSS_TOLERANCE)}"
            )
        return arguments

    def _settings(self, row: bench_rows.Row) -> dict[Setting, TrainingArguments]:
        """What the first round tries: every micro-batch, smallest first, with every attention that the row can have."""
        settings = {}
        for attention in self.options.attention:
            for micro_batch in sorted(self.options.micro_batch):
                arguments = self.arguments(row, Setting(micro_batch, attention))
                if not VARIANTS[arguments.model.variant].te or arguments.precision.auto:
                    arguments.model.attention_backend = "auto"
                settings[Setting(micro_batch, arguments.model.attention_backend)] = arguments
        return settings

    def prepare(self) -> None:
        """The batch, and what transformers' model in bf16 makes of it."""
        options = self.options
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator().manual_seed(options.seed)
        samples, tokens = max(options.micro_batch), options.seq_length
        ids = torch.randint(self.config.vocab_size, (samples, tokens + 1), generator=generator).to(device)
        batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        model = build_model(self.config, "hf", Precision(PrecisionConfig(compute="bf16")), seed=options.seed)
        self.visitor = Visitor(Reference.of(model, *batch), batch, options.seconds, options.document_length)

    def run(self) -> Iterator[None]:
        """Measure; yields after each round, when `results` has news."""
        for measure in MEASURES:
            series = [s for s in self.series if s.measure == measure]
            for turn in range(self.options.rounds if series else 0):
                if measure == "step":
                    self._time_optimizer(series)
                for one in series if turn % 2 == 0 else reversed(series):
                    self._visit(one, turn)
                self.finished[measure] += 1
                yield

    def _time_optimizer(self, series: Sequence[Series]) -> None:
        arguments = next(iter(series[0].settings.values()))
        try:
            weights = self.visitor.reference.weights
            self.optimizer_ms += optimizer_ms(weights, arguments, OPTIMIZER_SAMPLES)
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
                visit = self.visitor.visit(series.settings[setting], series.measure)
            except Exception as error:  # whatever it is, the other rows go on
                if series.refuse(setting, error) and not isinstance(error, EXPLAINED):
                    traceback.print_exc()
                print(f"{label} {series.reasons[setting]}", flush=True)
                if series.failed:
                    return
                continue
            series.visits.setdefault(setting, []).append((turn, visit))
            rate = series.tokens_per_second(setting, [visit])
            print(
                f"{label} {rate:>11,.0f} tokens/s, loss {visit.loss:.5f}, {visit.attention}, visit of "
                f"{visit.seconds:.1f} s{left_behind(visit)}",
                flush=True,
            )
            if bare:
                return

    def _tune(self, series: Series, setting: Setting) -> None:
        """Where the row leaves the choice to precision.auto, have it chosen, once for both measures."""
        if not series.settings[setting].precision.auto:
            return
        free_memory()
        arguments, record = resolve_auto(series.settings[setting], 1, print)
        for one in self.series:
            if one.row == series.row:
                one.settings[setting] = arguments
                one.choices[setting] = asdict(record.choice) | {"why": record.why} if record else {}

    def results(self) -> list[Result]:
        return results_of(self.series, self.visitor.proofs, self.optimizer_ms, self.flops())

    def flops(self) -> float:
        return flops_per_token(self.config, self.options.seq_length)


def left_behind(visit: Visit) -> str:
    """A remark where earlier visits have not given back their memory, which then counts for this one."""
    much = (visit.before_gib or 0) > 0.5
    return f", {visit.before_gib:.1f} GiB were allocated before it" if much else ""


def conditions(bench: Bench) -> dict[str, Any]:
    """What all rows have in common, for the report."""
    options = bench.options
    return {
        "model": Path(options.config).name,
        "parameters": num_parameters(bench.config),
        "gflop_per_token": bench.flops() / 1e9,
        "seq_length": options.seq_length,
        "document_length": options.document_length,
        "accumulation": options.accumulation,
        "rounds": options.rounds,
        "rounds_finished": bench.finished,
        "deterministic": options.deterministic,
        "seed": options.seed,
        "loss_tolerance": LOSS_TOLERANCE,
        "logits_tolerance": LOGITS_TOLERANCE,
        "optimizer_ms": bench.optimizer_ms,
    }


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv, __doc__ or "")
    if options.deterministic:
        make_deterministic()
    try:
        bench = Bench(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    alone = not dist.is_initialized()
    if alone:
        init_distributed()
    about = conditions(bench)
    machine, versions = report.describe()
    print(report.headline(machine, versions))
    print(
        f"{about['model']}: {about['parameters'] / 1e6:,.1f} M parameters, {about['gflop_per_token']:.3f} GFLOP a "
        f"token at {options.seq_length} tokens; {options.accumulation} micro-batches a step, {options.rounds} rounds, "
        f"deterministic kernels {'on' if options.deterministic else 'off'}"
    )
    print(f"the same model: equal weights; relative errors up to {tolerances()}", flush=True)
    if not torch.cuda.is_available():
        print("No GPU: small models and the CPU reference; these speeds mean nothing.")
    bench.prepare()
    title = f"{about['model']} on {machine.get('gpu', machine['cpu'])}, {options.seq_length} tokens a sample"
    for _ in bench.run():
        if options.output:  # what is known so far, should the run be ended before its end
            save(bench, title)
    results = bench.results()
    print(f"\n{table(results)}\n")
    print("\n".join(summary_lines(results)))
    free_memory()
    if alone:
        dist.destroy_process_group()
    failed = [f"{r['measure']} {r['row']}: {r['reason']}" for r in results if r.get("failed")]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def save(bench: Bench, title: str) -> None:
    options, results = bench.options, bench.results()
    report.write_json(options.output, command(options), results, **conditions(bench))
    plot(results, title, options.output)


def tolerances() -> str:
    """For the log: "loss bf16 1e-03, fp8 2e-02, logits ..."."""
    kinds: Mapping[str, Mapping[str, float]] = {"loss": LOSS_TOLERANCE, "logits": LOGITS_TOLERANCE}
    return "; ".join(
        f"{kind} {', '.join(f'{value:g} in {compute}' for compute, value in limits.items())}"
        for kind, limits in kinds.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
