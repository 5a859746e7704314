#!/usr/bin/env python3
"""What a save costs training: one in the background against one that training waits for, in turns in one process.

    python test_fp8/bench_save.py [--config hare_1.1b] [--rounds 3] [--steps 8] [--work_dir DIR] [--output FILE.json]
    python train/launch.py --nproc 2 test_fp8/bench_save.py ...                        several ranks

Random tokens, FP8 with delayed scaling, AdamW in DeepSpeed. Seconds lost are those until `Saver.begin` returns, those
waited for at the end, and what the steps taken during the save last longer than the median of the steps with no save
under way. The first save in the background allocates its host memory and is told apart.

Exit status: 0; 1 when the median save in the background loses 15 % of a blocking one or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from model import accounting
from model.build import build_model
from model.config import load_config
from model.fp8 import te_backend
from model.fp8.precision import Precision
from test_fp8.common import report
from test_fp8.model.options import positive
from test_fp8.model.timing import synchronize
from train.checkpoint.files import RunState, read_manifest
from train.checkpoint.save import Saver
from train.checkpoint.save_errors import SaveError
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.distributed import init_distributed
from train.engine.step import MicroStep, build_engine
from train.guard.signals import StopVote

PROGRAM = "test_fp8/bench_save.py"
MOST_LOST = 0.15  # of a blocking save
WARM_UP_STEPS = 3


class Training:
    """Steps of a model, and the time that each takes."""

    def __init__(self, options: argparse.Namespace):
        raw = {
            "model": {"config": options.config},
            "data": {"sources": {"none": "none"}},
            "max_steps": 10**6,
            "max_seq_length": options.seq_length,
            "per_device_train_batch_size": options.micro_batch,
            "gradient_accumulation_steps": options.accumulation,
            "deepspeed": f"ds_config_zero{options.stage}.json",
        }
        world = dist.get_world_size()
        args = TrainingArguments.from_dict(raw).resolve(world)
        self.config, self.precision = load_config(options.config), Precision(args.precision)
        te_backend.choose_attention_backend(args.model.attention_backend)
        model = build_model(self.config, args.model.variant, self.precision, seed=1, speed=args.speed)
        self.engine = build_engine(model, args, resolve_ds_config(args, world)[0])
        self.micro_step = MicroStep(self.engine, self.precision, args)
        self.accumulation = options.accumulation
        self.ids = torch.randint(
            self.config.vocab_size, (options.micro_batch, options.seq_length), device=self.engine.device
        )
        self.vote = StopVote()
        self.state = RunState(0, 0, 0, world, options.stage, args.to_dict(), {})

    def step(self) -> float:
        """Take a step; its seconds."""
        start = time.perf_counter()
        for index in range(self.accumulation):
            self.micro_step(Batch(self.ids, self.ids), index)
        synchronize()
        self.state.step += 1
        return time.perf_counter() - start


def measure_save(training: Training, saver: Saver, background: bool, steps: int) -> dict[str, Any]:
    """`steps` steps, a save, and steps until it is committed."""
    alone = [training.step() for _ in range(steps)]
    start = time.perf_counter()
    saver.begin(training.state, background)
    begin_s = time.perf_counter() - start
    during = []
    while training.vote.stop_or(saver.busy)[1]:
        during.append(training.step())
    saved = saver.finish()
    assert saved is not None
    return {
        "background": background,
        "begin_s": begin_s,
        "waited_s": saved.waited_s,
        "save_s": saved.seconds,
        "gigabytes": sum(size for size, _ in read_manifest(saved.path).values()) / 1e9,
        "steps_alone_s": alone,
        "steps_during_s": during,
    }


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The saves of all rounds, with `lost_s` of each."""
    training = Training(options)
    saver = Saver(training.engine, folder, training.precision, 1, say)
    for _ in range(WARM_UP_STEPS):
        training.step()
    found = []
    for index in range(options.rounds + 1):  # the first in the background is no measure of the others
        for background in (False, True):
            found.append({"first": index == 0, **measure_save(training, saver, background, options.steps)})
    step_s = statistics.median(t for save in found for t in save["steps_alone_s"])
    for save in found:
        slower_s = sum(t - step_s for t in save["steps_during_s"])
        save |= {"step_s": step_s, "slower_s": slower_s, "lost_s": save["waited_s"] + slower_s}
        save["gigabytes_per_s"] = save["gigabytes"] / save["save_s"]
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'save':22} {'lost s':>8} {'begin s':>8} {'waited s':>8} {'steps':>6} {'slower s':>8} "
        f"{'save s':>8} {'GB':>8} {'GB/s':>6}"
    ]
    for r in results:
        name = ("in the background" if r["background"] else "blocking") + (", 1st" if r["first"] else "")
        lines.append(
            f"{name:22} {r['lost_s']:8.3f} {r['begin_s']:8.3f} {r['waited_s']:8.3f} {len(r['steps_during_s']):6} "
            f"{r['slower_s']:8.3f} {r['save_s']:8.3f} {r['gigabytes']:8.3f} {r['gigabytes_per_s']:6.2f}"
        )
    return "\n".join(lines)


def ratio(results: Sequence[dict[str, Any]]) -> float:
    """Of seconds lost: medians of the saves in the background and of the blocking ones, without the first."""
    lost = [
        statistics.median(r["lost_s"] for r in results if r["background"] == background and not r["first"])
        for background in (True, False)
    ]
    return lost[0] / lost[1]


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default: Any, help: str, **options: Any) -> None:
        parser.add_argument(name, default=default, help=f"{help}; default: %(default)s", **options)

    add("--config", "hare_1.1b" if gpu else "tiny", "the model")
    add("--stage", 1, "ZeRO's", type=int, choices=range(4))
    add("--micro_batch", 8 if gpu else 2, "samples of a micro-batch", type=positive)
    add("--seq_length", 2048 if gpu else 64, "tokens of a sample", type=positive)
    add("--accumulation", 4 if gpu else 2, "micro-batches of a step", type=positive)
    add("--rounds", 3, "saves of each kind, after a first one", type=positive)
    add("--steps", 8, "before each save", type=positive)
    parser.add_argument(
        "--work_dir", type=Path, help="where the temporary folder is made (the system's place)"
    )
    parser.add_argument("--output", type=report.output_file, metavar="FILE.json", help="write JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse_arguments(argv)
    init_distributed()
    machine, versions = report.describe()
    say(report.headline(machine, versions))
    try:
        with tempfile.TemporaryDirectory(dir=options.work_dir) as name:
            shared: list[Any] = [name]
            dist.broadcast_object_list(shared, src=0)
            results = measure(options, Path(shared[0]))
            dist.barrier()
    except (ConfigurationError, SaveError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lost, rank, world = ratio(results), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if rank:
        return 0
    parameters = accounting.num_parameters(load_config(options.config))
    print(
        f"{options.config}, {parameters / 1e6:,.1f} M parameters, ZeRO {options.stage}, {world} ranks, median step "
        f"{results[0]['step_s']:.3f} s\n\n{table(results)}\n\na save in the background loses {lost:.1%} of a blocking "
        f"one; {MOST_LOST:.0%} are allowed"
    )
    if options.output:
        names = ("config", "stage", "micro_batch", "seq_length", "accumulation", "rounds", "steps")
        words = [word for name in names for word in (f"--{name}", getattr(options, name))]
        command = report.command_line(PROGRAM, words)
        if world > 1:
            command = report.command_line("train/launch.py", ["--nproc", world, PROGRAM, *words])
        report.write_json(options.output, command, results, ranks=world, parameters=parameters, lost=lost)
    return int(lost >= MOST_LOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
