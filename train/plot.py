#!/usr/bin/env python3
"""Draw and compare runs: `python train/plot.py RUN [RUN ...] [--output FILE]`.

RUN is the output_dir of a run, which may still be going on. Prints a table (loss, evaluation loss, tokens, tokens/s,
FP8, GPU-hours, state) and draws loss, learning rate, gradient norm and tokens/s against tokens: one run to
RUN/loss.png, several to comparison.png in the current folder, unless --output names a file. A run with FP8 health
samples (precision.health_steps) also gets RUN/health.png, or FILE_health.png beside FILE.

Exit status: 0; 2 if a RUN has no metrics.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import need

need("drawing", "matplotlib")

from train.record import plots
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
        except (HistoryError, OSError) as error:
            problems.append(str(error))
    if problems:
        print("error: " + "\n  ".join(problems), file=sys.stderr)
        return 2
    print(table(histories))
    for history in histories:
        if failure := history.failure():
            print(f"{history.folder.path}: {history.state()}: {failure}")
    health = output.with_name("health.png" if output.stem == "loss" else f"{output.stem}_health.png")
    try:
        plots.draw(histories, output)
        print(f"wrote {output.absolute()}")
        if len(histories) == 1 and plots.draw_health(histories[0], health):
            print(f"wrote {health.absolute()}")
    except OSError as error:
        print(f"error: {error}; name another file with --output", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
