"""What a save costs training: one in the background against one that training waits for, in turns in one process.

    python test_fp8/bench_save.py [--config hare_1.1b] [--rounds 3] [--steps 8] [--work_dir DIR] [--output FILE.json]
    python train/launch.py --nproc 2 test_fp8/bench_save.py ...                        several ranks

Random tokens, FP8 with delayed scaling, AdamW in DeepSpeed. The seconds lost are those until `Saver.begin` returns,
those waited for at the end, and the time by which steps during the save are longer than the median step. The first
save in the background allocates its host memory and does not count.

Exit status: 1 if the median save in the background loses 15 % of a blocking one or more.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, positive

OPTIONS = Options(__file__, __doc__)
OPTIONS.add_shared(
    config=ByMachine("hare_1.1b", "tiny"),
    micro_batch=ByMachine(8, 2),
    seq_length=ByMachine(2048, 64),
    accumulation=ByMachine(4, 2),
    work_dir=None,
)
OPTIONS.add("--stage", 1, "of ZeRO", type=int, choices=range(4))
OPTIONS.add("--rounds", 3, "saves of each kind, after a first one", type=positive)
OPTIONS.add("--steps", 8, "before each save", type=positive)
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


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, "test_fp8.model.saves", COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
