#!/usr/bin/env python3
"""Draw and compare runs: `python train/plot.py RUN [RUN ...] [--output FILE]`.

RUN is the folder of a run, its output_dir, also of one that goes on. Prints a table (loss, evaluation loss, tokens,
tokens/s, FP8, GPU-hours, what became of it), and draws loss, learning rate, gradient norm and tokens/s against tokens:
one run to RUN/loss.png, several to comparison.png here, unless --output names a file. Of one run that looked at the
health of its FP8 (precision.health_steps), that too: RUN/health.png, or beside FILE with _health in its name.

Exit status: 0; 2 where a RUN is none, or nothing is to be seen of it yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("drawing", "matplotlib")

from train.record.history import HistoryError, read_history, table


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output", type=Path, help="a .png; default: RUN/loss.png, of several runs comparison.png"
    )
    options = parser.parse_args(argv)
    output = options.output or (
        options.runs[0] / "loss.png" if len(options.runs) == 1 else Path("comparison.png")
    )
    if output.suffix.lower() != ".png" or output.is_dir():
        parser.error(f"--output {output}: a file that ends in .png is expected")
    histories, problems = [], []
    for path in dict.fromkeys(options.runs):
        try:
            histories.append(read_history(path))
        except HistoryError as error:
            problems.append(str(error))
    if problems:
        print("error: " + "\n  ".join(problems), file=sys.stderr)
        return 2
    for history in histories:
        if history.unreadable:
            print(
                f"warning: {history.unreadable} lines of {history.folder.metrics} are none of a run",
                file=sys.stderr,
            )
    print(table(histories))
    for history in histories:
        if why := history.why():
            print(f"{history.folder.path}: {history.state()}: {why}")
    from train.record.fp8_health import draw_health
    from train.record.plots import draw

    of_health = output.with_name("health.png" if output.stem == "loss" else f"{output.stem}_health.png")
    drawn = [output]
    try:
        draw(histories, output)
        if len(histories) == 1 and draw_health(histories[0], of_health):
            drawn.append(of_health)
    except OSError as error:
        print(f"error: {output} cannot be written: {error}; name another file with --output", file=sys.stderr)
        return 2
    for path in drawn:
        print(f"wrote {os.path.abspath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
