#!/usr/bin/env python3
"""Plot and compare runs: `python train/plot.py RUN [RUN ...] [--output FILE]`.

RUN is the output_dir of a run, which may still be in progress. The command prints a table with the loss, evaluation
loss, tokens, tokens/s, state and FP8 modules of each run. It plots loss, learning rate, gradient norm and tokens/s
against tokens.

By default, the plot is written to RUN/loss.png for a single run, and to comparison.png in the current folder for
several runs. For a single run with FP8 health samples (precision.health_steps), a second plot is written to health.png
in the same folder. With --output NAME.png, the second plot is NAME_health.png.

Exit status: 0 done; 2 a RUN has no metrics, or the plot cannot be written.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("drawing", "matplotlib")

from train.command import command
from train.record import plots
from train.record.history import read_history, table


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument(
        "--output",
        type=Path,
        help="PNG file to write (default: RUN/loss.png for a single run, comparison.png for several runs)",
    )
    options = parser.parse_args(argv)
    output = options.output or (
        options.runs[0] / "loss.png" if len(options.runs) == 1 else Path("comparison.png")
    )
    if output.suffix.lower() != ".png" or output.is_dir():
        parser.error(f"--output is {output}, but it must be the path of a file that ends in .png")
    histories = [read_history(path) for path in dict.fromkeys(options.runs)]
    print(table(histories))
    for history in histories:
        if reason := history.ended().get("why"):
            print(f"{history.path}: {reason}")
    plots.draw(histories, output)
    print(f"wrote {output.absolute()}")
    health = output.with_name("health.png" if output.stem == "loss" else f"{output.stem}_health.png")
    if len(histories) == 1 and plots.draw_health(histories[0], health):
        print(f"wrote {health.absolute()}")


if __name__ == "__main__":
    sys.exit(main())
