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

import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, model_config, positive
from test_fp8.common.report import Result

MOST_LOST = 0.15  # of a blocking save

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", ByMachine("hare_1.1b", "tiny"), "the model", type=model_config)
OPTIONS.add("--stage", 1, "ZeRO's", type=int, choices=range(4))
OPTIONS.add("--micro_batch", ByMachine(8, 2), "samples of a micro-batch", type=positive)
OPTIONS.add("--seq_length", ByMachine(2048, 64), "tokens of a sample", type=positive)
OPTIONS.add("--accumulation", ByMachine(4, 2), "micro-batches of a step", type=positive)
OPTIONS.add("--rounds", 3, "saves of each kind, after a first one", type=positive)
OPTIONS.add("--steps", 8, "before each save", type=positive)
OPTIONS.add("--work_dir", None, "where the temporary folder is made, unless in the system's place", type=Path)
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "save": (lambda r: ("in the background" if r["background"] else "blocking") + ", 1st" * r["first"], "<"),
    "lost s": ("lost_s", ".3f"),
    "begin s": ("begin_s", ".3f"),
    "waited s": ("waited_s", ".3f"),
    "steps": (lambda r: len(r["steps_during_s"]), "d"),
    "slower s": ("slower_s", ".3f"),
    "save s": ("save_s", ".3f"),
    "GB": ("gigabytes", ".3f"),
    "GB/s": ("gigabytes_per_s", ".2f"),
}


def ratio(results: Sequence[Result]) -> float:
    """Of seconds lost: medians of the saves in the background and of the blocking ones, without the first."""
    lost = [
        statistics.median(r["lost_s"] for r in results if r["background"] == background and not r["first"])
        for background in (True, False)
    ]
    return lost[0] / lost[1]


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    OPTIONS.settle(options)
    import torch.distributed as dist

    from model.config import load_config, num_parameters
    from model.errors import UserError
    from test_fp8.model.saves import measure
    from train.engine.distributed import init_distributed

    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    say = partial(print, flush=True) if rank == 0 else (lambda line: None)
    say(headline(*describe()))
    try:
        with tempfile.TemporaryDirectory(dir=options.work_dir) as name:
            shared: list[Any] = [name]
            dist.broadcast_object_list(shared, src=0)
            results = measure(options, Path(shared[0]), say)
            dist.barrier()
    except (ValueError, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lost = ratio(results)
    dist.destroy_process_group()
    if rank:
        return 0
    parameters = num_parameters(load_config(options.config))
    print(
        f"{options.config}, {parameters / 1e6:,.1f} M parameters, ZeRO {options.stage}, {world} ranks, median step "
        f"{results[0]['step_s']:.3f} s\n\n{report.table(results, COLUMNS)}\n\na save in the background loses "
        f"{lost:.1%} of a blocking one; {MOST_LOST:.0%} are allowed"
    )
    if options.output:
        launcher = f"python train/launch.py --nproc {world}" if world > 1 else "python"
        command = OPTIONS.command(options).replace("python", launcher, 1)
        report.write_json(options.output, command, results, ranks=world, parameters=parameters, lost=lost)
    return int(lost >= MOST_LOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
