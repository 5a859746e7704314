"""Measure how much training time a checkpoint save costs, for background saves and blocking saves.

    python test_fp8/bench_save.py [--config hare_1.1b] [--rounds 3] [--steps 8] [--output FILE.json]
    python train/launch.py --nproc 2 test_fp8/bench_save.py ...                        several ranks

Both kinds of saves alternate in one process, which trains the model variant te_layer on random tokens in FP8 with
delayed scaling, AdamW and ZeRO 1. The lost time is the sum of the time in `Saver.begin`, the time waited at the end of
the save, and the time by which steps during the save are slower than the median step. The first save of each kind is
excluded, because it allocates host memory. Set TMPDIR to choose the disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, option, positive, shared

OPTIONS = [
    *shared(
        config=DeviceDefault("hare_1.1b", "tiny"),
        micro_batch=DeviceDefault(8, 2),
        seq_length=DeviceDefault(2048, 64),
        accumulation=DeviceDefault(4, 2),
        deterministic=False,
    ),
    option(
        "--rounds",
        3,
        "Number of timed blocking saves and of timed background saves, not counting the first "
        "save of each kind.",
        type=positive,
    ),
    option("--steps", 8, "Number of training steps before each save.", type=positive),
]
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


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, "test_fp8.model.saves")

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
