"""Inspect prepared data: `python train/inspect_data.py DIR [--verify] [--samples N]`.

Print the manifest, statistics of the document lengths, and random samples. As in training, a sample is a window of
--seq_length tokens, which can contain several documents. Each line of text begins with "| ". BOS and EOS are printed on
separate lines. The sizes and indexes of all shards are always checked. --verify also checks every hash and token id.

Exit status: 0 if no damage was found; 1 if a file is damaged; 2 if there is nothing to inspect.
"""

import argparse
import functools
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("inspecting data", "pydantic", "numpy")

from model.keys import between
from train.command import command


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder with prepared or imported data")
    add(
        "--verify",
        action="store_true",
        help="check the hash of every file, and that every token id is in the vocabulary",
    )
    add("--samples", type=between(0), default=2, help="number of random samples to print (default: 2)")
    add(
        "--split",
        choices=("train", "eval"),
        default="train",
        help="split from which to print samples (default: train)",
    )
    add(
        "--seq_length",
        type=between(1),
        default=256,
        help="maximum number of tokens per sample (default: 256)",
    )
    add("--seed", type=int, default=0, help="random seed for choosing the samples (default: 0)")
    cores = min(os.cpu_count() or 1, 16)
    add(
        "--workers",
        type=between(1),
        default=cores,
        help="number of threads (default: one per core, at most 16)",
    )
    return parser.parse_args(argv)


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from train.data.inspection import inspect_folder

    problems = inspect_folder(args)
    for problem in problems:
        print(f"damaged: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
