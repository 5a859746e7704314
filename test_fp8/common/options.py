"""Declare and parse command-line options for the benchmarks.

This module does not import torch, so --help and argument errors are printed without delay.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.config import config_file
from model.keys import between, json_file

ROOT = Path(__file__).resolve().parent.parent.parent
ABSOLUTE_FOLDER = re.compile(r"(?<![\w./])/(?:[^/\s\"']+/)*")

positive = between(1)


class DeviceDefault(NamedTuple):
    """A pair of default values for an option: `gpu` on a host with a GPU, and `cpu` on a host without one."""

    gpu: Any
    cpu: Any


class Option(NamedTuple):
    """A command-line option, or a positional argument if `name` has no dashes.

    keywords: additional keyword arguments for argparse's add_argument.
    """

    name: str
    default: Any
    help: str
    keywords: dict[str, Any]

    def describe(self) -> str:
        """Return the help text of the option, followed by the default."""
        values = self.default if isinstance(self.default, DeviceDefault) else (self.default,)
        shown = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        default = (
            "" if self.default in (None, False, []) else f" Default: {' or, without a GPU, '.join(shown)}."
        )
        return (self.help + default).replace("%", "%%")


def option(name: str, default: Any, help: str, **keywords: Any) -> Option:
    return Option(name, default, help, keywords)


def model_config(text: str) -> str:
    """Argparse type for the name or path of an existing model configuration."""
    try:
        config_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model.config: ")) from error
    return text


# Options that several benchmarks share, with the help text and further arguments for argparse.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "--config": ("Name or path of the model configuration.", {"type": model_config}),
    "--row": (
        "Add a case: the name of the case, and training configuration keys with their values. Can be repeated.",
        {"nargs": "+", "action": "append", "metavar": ("NAME", "key=value")},
    ),
    "--micro_batch": ("Number of samples per micro-batch.", {"type": positive}),
    "--seq_length": ("Number of tokens per sample.", {"type": positive}),
    "--accumulation": ("Number of micro-batches per optimizer step.", {"type": positive}),
    "--rounds": ("Number of measurements for each case.", {"type": positive}),
    "--steps": ("Minimum number of timed steps per round.", {"type": positive}),
    "--seconds": (
        "Duration of the timing per round, in seconds. At least --steps steps are timed.",
        {"type": between(0, 1000, float)},
    ),
    "--deterministic": (
        "Use deterministic GPU kernels, as train.py does by default.",
        {"action": "store_true"},
    ),
    "--output": ("Write a JSON report to this file.", {"type": json_file, "metavar": "FILE.json"}),
}


def shared(**defaults: Any) -> list[Option]:
    """Return the command-line options that several benchmarks share, with the given defaults.

    defaults: maps option names in `SHARED`, without leading dashes, to default values.
    """
    return [Option(f"--{name}", default, *SHARED[f"--{name}"]) for name, default in defaults.items()]


# Options with which bench_model.py and bench_scaling.py measure whole optimizer steps.
STEP_OPTIONS = shared(
    config=DeviceDefault("hare_1.1b", "tiny"),
    row=[],
    seq_length=DeviceDefault(2048, 64),
    accumulation=DeviceDefault(8, 2),
    steps=DeviceDefault(5, 1),
    seconds=DeviceDefault(1.0, 0.0),
    deterministic=False,
)


class Options(argparse.ArgumentParser):
    """The argument parser for a benchmark.

    file: path of the benchmark script. text: description for --help. options: options in addition to --output.
    """

    def __init__(self, file: str, text: str | None, options: Sequence[Option]):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.program = f"test_fp8/{Path(file).name}"
        for one in (*options, *shared(output=None)):
            self.add_argument(one.name, default=one.default, help=one.describe(), **one.keywords)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse the command line. All arguments after -- are returned as `extra_arguments`."""
        split = argv.index("--") if "--" in argv else len(argv)
        options = self.parse_args(argv[:split])
        options.extra_arguments = argv[split + 1 :]
        return options

    def command(self, argv: list[str]) -> str:
        """Return the command line for the report, with file names in place of absolute paths."""
        ranks = os.environ.get("WORLD_SIZE", "1")
        launcher = ["train/launch.py", "--nproc", ranks] if ranks != "1" else []
        return shlex.join(["python", *launcher, self.program, *map(strip_folders, argv)])


def choose_defaults(options: argparse.Namespace) -> None:
    """Replace each `DeviceDefault` in `options` with the value `gpu` if this host has a GPU, otherwise with `cpu`."""
    import torch

    for key, value in vars(options).items():
        if isinstance(value, DeviceDefault):
            setattr(options, key, value.gpu if torch.cuda.is_available() else value.cpu)


def strip_folders(word: object) -> str:
    """Replace each absolute path in a command-line argument with its file name."""
    return ABSOLUTE_FOLDER.sub("", str(word))
