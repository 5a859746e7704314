#!/usr/bin/env python3
"""How does a training scale over the GPUs of one host? Whole steps of bench_model.py on 1, 2, 4, ... of them, at each
ZeRO stage, in bf16 and FP8, beside what train/plan.py expects of each.

    python test_fp8/bench_scaling.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_scaling.py --stages 1 --step_tokens 2097152          (a step of one size, however many GPUs)
    python test_fp8/bench_scaling.py --config mistral_7b --seq_length 4096 --gpus 8 --micro_batch 2 --stages 1 2
    python test_fp8/bench_scaling.py --work_dir FOLDER --time_limit_s 400      (again, and it goes on in the folder)

What is planned of each is told before the first is measured. One GPU is measured on each of those that are used, all at
the same time, since GPUs of one host differ and are a little slower beside others at work: the share is of what these
GPUs make each for itself, in the same run. A step has --accumulation micro-batches on any number of GPUs, or with
--step_tokens as many as that takes. Each round visits all numbers of GPUs, every second one in reverse.

Each row is checked as in bench_model.py, which takes the time: the same model, FP8 and attention as they are named.
More rows by --row, in keys of the training configuration.

Exit status: 0; 1 when a row could not be measured; 2 when nothing can be (too few GPUs, a step of other tokens, a
folder of another run, or one that a run is at work in); 3 when time ran out before the last launch; 130 after Ctrl-C
and 143 after SIGTERM, which end what was started.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.config import load_sizes
from model.fp8.machine import describe, headline
from model.variants import ATTENTION_BACKENDS, VARIANTS
from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, model_config, positive, seconds
from test_fp8.common.processes import noted_signals
from test_fp8.common.report import Result
from test_fp8.common.rows import Row, parse_rows
from test_fp8.common.work_dir import work_dir
from test_fp8.model.rows import ROW_KEYS, arguments_of
from test_fp8.scaling.launches import Launch, run_together
from test_fp8.scaling.results import COLUMNS, farthest, plot, results_of
from train.config.ds_config import resolve_ds_config
from train.files import reason
from train.planning.plan import Prediction
from train.planning.setting import Setting
from train.preflight.machine import cuda_devices
from train.record.provenance import sources_sha256

PRECISIONS = ("bf16", "fp8")
SOURCES = ("model", "train", "test_fp8/common", "test_fp8/model", "test_fp8/scaling")
CPU_RANKS = [1, 2]

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", ByMachine("hare_1.1b", "tiny"), "the model", type=model_config)
OPTIONS.add("--gpus", None, "numbers of them; default: 1, 2, 4, ... of the host's", type=positive, nargs="+")
OPTIONS.add("--stages", [0, 1, 2, 3], "of ZeRO", type=int, nargs="*", choices=range(4))
OPTIONS.add("--variant", "te_layer", "of the model", choices=[v.name for v in VARIANTS.values() if v.te])
OPTIONS.add("--precisions", list(PRECISIONS), "to compute in", nargs="+", choices=PRECISIONS)
OPTIONS.add_rows()
OPTIONS.add("--micro_batch", ByMachine(16, 2), "samples of a micro-batch", type=positive)
OPTIONS.add("--seq_length", ByMachine(2048, 64), "tokens of a sample", type=positive)
OPTIONS.add("--accumulation", ByMachine(8, 2), "micro-batches of a step", type=positive)
OPTIONS.add("--step_tokens", None, "tokens of a step, in place of --accumulation", type=positive)
OPTIONS.add("--attention", "auto", "of Transformer Engine", choices=list(ATTENTION_BACKENDS))
OPTIONS.add("--rounds", ByMachine(2, 1), "visits to each", type=positive)
OPTIONS.add("--steps", ByMachine(5, 1), "timed a visit, at least", type=positive)
OPTIONS.add("--seconds", ByMachine(1.0, 0.0), "timed a visit, at least --steps steps", type=seconds)
OPTIONS.add_flag("--deterministic", "deterministic kernels, as train.py's default")
OPTIONS.add("--seed", 42, "of weights and tokens", type=int)
OPTIONS.add("--work_dir", None, "keeps what is measured here, and takes what is; else removed", type=Path)
OPTIONS.add("--time_limit_s", None, "after which no launch begins; needs --work_dir", type=positive)
OPTIONS.add_output("JSON and a plot")


def rows_of(options: argparse.Namespace) -> dict[str, Row]:
    """Those of --stages and --precisions, and of --row. Raises RowError: a bad --row, or none at all."""
    rows = {}
    for stage in options.stages:
        for precision in options.precisions:
            name = f"zero_{stage}_{precision}"
            how = {"precision.compute": precision, "deepspeed": f"ds_config_zero{stage}.json"}
            rows[name] = Row(name, {"model.variant": options.variant, **how})
    added = parse_rows(options.row, rows, ROW_KEYS, "another model or batch")
    rows |= {row.name: row for row in added}
    if not rows:
        OPTIONS.error("--stages and --row name no row; there is nothing to measure")
    return rows


def accumulation_on(options: argparse.Namespace, ranks: int) -> int:
    """Micro-batches of a step. Raises ValueError: --step_tokens are not so many."""
    if options.step_tokens is None:
        return options.accumulation
    tokens = options.micro_batch * options.seq_length * ranks
    if options.step_tokens % tokens:
        raise ValueError(
            f"--step_tokens {options.step_tokens:,}: {ranks} GPUs take {tokens:,} tokens at a time (--micro_batch "
            f"{options.micro_batch} x --seq_length {options.seq_length} each); a multiple of that is expected"
        )
    return options.step_tokens // tokens


def cells_of(options: argparse.Namespace, rows: dict[str, Row]) -> list[Result]:
    """Each row on each number of ranks, with what is planned of it. Raises ValueError: a configuration that is not
    allowed."""
    import torch

    cells, sizes = [], load_sizes(options.config)
    for ranks in options.gpus:
        accumulation = accumulation_on(options, ranks)
        own = argparse.Namespace(**vars(options) | {"accumulation": accumulation})
        for row in rows.values():
            arguments = arguments_of(row, own, options.attention, options.micro_batch, ranks)
            ds_config = resolve_ds_config(arguments, ranks)
            cell: Result = {
                "row": row.name,
                "ranks": ranks,
                "stage": ds_config["zero_optimization"]["stage"],
                "compute": arguments.precision.compute,
                "configuration": dict(row.settings),
                "accumulation": accumulation,
                "step_tokens": arguments.train_batch_size_tokens,
            }
            if torch.cuda.is_available():
                setting = replace(Setting.of(arguments, ds_config, sizes, ranks), eval_batch=0)
                planned = Prediction.of(setting, torch.cuda.get_device_name()).to_json()
                cell |= {
                    f"planned_{key}": planned.get(key) for key in ("peak_gib", "tokens_per_second", "basis")
                }
            cells.append(cell)
    return cells


def launches_of(
    options: argparse.Namespace, rows: dict[str, Row], folder: Path, gpus: int
) -> list[list[Launch]]:
    """Those of each round, in groups that run at the same time."""
    groups = []
    for turn in range(options.rounds):
        for ranks in options.gpus if turn % 2 == 0 else reversed(options.gpus):
            accumulation = accumulation_on(options, ranks)
            if ranks == 1 and gpus:
                each: list[tuple[str, list[int] | None]]
                each = [(f"gpu_{place}", [place]) for place in range(max(options.gpus))]
            else:
                each = [(f"gpus_{ranks}", list(range(ranks)) if gpus else None)]
            groups.append(
                [
                    Launch(f"{name}_round_{turn}", folder, ranks, places, accumulation, rows)
                    for name, places in each
                ]
            )
    return groups


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    if options.time_limit_s and options.work_dir is None:
        OPTIONS.error("--time_limit_s needs --work_dir, in which the same command goes on")
    until = time.monotonic() + options.time_limit_s if options.time_limit_s else float("inf")
    devices = cuda_devices()
    gpus = len(devices or [])
    options.gpus = sorted(
        set(options.gpus or ([2**n for n in range(gpus.bit_length())] if gpus else CPU_RANKS))
    )
    if gpus and max(options.gpus) > gpus:
        print(f"error: --gpus {max(options.gpus)}: {gpus} are here", file=sys.stderr)
        return 2
    OPTIONS.settle(options)
    try:
        rows = rows_of(options)
        cells = cells_of(options, rows)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine, versions = describe()
    print(headline(machine, versions))
    print(
        report.table(
            cells, {k: COLUMNS[k] for k in ("row", "GPUs", "tokens a step", "planned", "planned GiB")}
        )
    )
    if not gpus:
        print("No GPU: a small model and the CPU reference; these speeds mean nothing.")
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(noted_signals())
        own: Result = {"machine": machine, "versions": versions, "sources": sources_sha256(*SOURCES)}
        own |= {"command": OPTIONS.command(options), "planned": cells}
        try:
            folder = stack.enter_context(work_dir(options.work_dir, own, "what it has is"))
        except (ValueError, OSError) as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            return 2
        groups = launches_of(options, rows, folder, gpus)
        launches = [launch for group in groups for launch in group]
        for group in groups:
            if not any(launch.left for launch in group):
                continue
            if stops or time.monotonic() > until:
                break
            print(f"{', '.join(launch.name for launch in group)}: see {group[0].log}", flush=True)
            run_together(group, options, stops)
            write(options, results_of(cells, launches))
        results, left = results_of(cells, launches), any(launch.left for launch in launches)
    print("\n".join(filter(None, [report.table(results, COLUMNS), farthest(results)])))
    if left:
        print("not all was measured; with --work_dir the same command goes on with what is left")
        return 128 + stops[0] if stops else 3
    write(options, results)
    return int(any("reason" in r for r in results))


def write(options: argparse.Namespace, results: Sequence[Result]) -> None:
    """What is known so far, should the program be ended before its end."""
    if not options.output:
        return
    more = {key: getattr(options, key) for key in ("micro_batch", "seq_length", "rounds", "steps")}
    report.write_json(
        options.output, OPTIONS.command(options), results, model=Path(options.config).name, **more
    )
    machine, _ = describe()
    what = f"{Path(options.config).name}, {options.variant}, micro-batch {options.micro_batch} x {options.seq_length}"
    title = f"{what}, {machine.get('gpu', machine['cpu'])}"
    plot(results, title, options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
