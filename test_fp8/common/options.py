"""Command lines of the benchmarks. Does not import torch, so that --help and argument errors appear at once."""

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
    """A default with one value for machines with a GPU and one for machines without."""

    gpu: Any
    cpu: Any


class Option(NamedTuple):
    """An option, or a positional argument if `name` has no dashes. `keywords` are arguments of add_argument."""

    name: str
    default: Any
    help: str
    keywords: dict[str, Any]

    def describe(self) -> str:
        """Return the help text with the default."""
        values = self.default if isinstance(self.default, DeviceDefault) else (self.default,)
        shown = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        default = "" if self.default in (None, False, []) else f"; default: {', without a GPU '.join(shown)}"
        return (self.help + default).replace("%", "%%")


def option(name: str, default: Any, help: str, **keywords: Any) -> Option:
    return Option(name, default, help, keywords)


def model_config(text: str) -> str:
    """Check that a model configuration exists (an argparse type)."""
    try:
        config_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model.config: ")) from error
    return text


# Options of several programs: help text and argparse's keywords.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "--config": ("model configuration", {"type": model_config}),
    "--row": (
        "add a case: its name and keys of the training configuration",
        {"nargs": "+", "action": "append", "metavar": ("NAME", "key=value")},
    ),
    "--micro_batch": ("samples per micro-batch", {"type": positive}),
    "--seq_length": ("tokens per sample", {"type": positive}),
    "--accumulation": ("micro-batches per step", {"type": positive}),
    "--rounds": ("measurements of each case", {"type": positive}),
    "--steps": ("minimum number of timed steps per round", {"type": positive}),
    "--seconds": (
        "seconds of timing per round; at least 4 passes or --steps steps are timed",
        {"type": between(0, 1000, float)},
    ),
    "--deterministic": ("use deterministic kernels, as train.py does by default", {"action": "store_true"}),
    "--output": ("write a JSON report", {"type": json_file, "metavar": "FILE.json"}),
}


def shared(**defaults: Any) -> list[Option]:
    """Return options of `SHARED` with these defaults."""
    return [Option(f"--{name}", default, *SHARED[f"--{name}"]) for name, default in defaults.items()]


# Options of bench_model.py and bench_scaling.py for measuring whole steps.
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
    """Argument parser of the program `file`. `text` is its description."""

    def __init__(self, file: str, text: str | None, options: Sequence[Option]):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.program = f"test_fp8/{Path(file).name}"
        for one in (*options, *shared(output=None)):
            self.add_argument(one.name, default=one.default, help=one.describe(), **one.keywords)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse a command line. The arguments after -- become `extra_arguments`."""
        split = argv.index("--") if "--" in argv else len(argv)
        options = self.parse_args(argv[:split])
        options.extra_arguments = argv[split + 1 :]
        return options

    def command(self, argv: list[str]) -> str:
        """Return the command line for the report, without folders of this machine."""
        ranks = os.environ.get("WORLD_SIZE", "1")
        launcher = ["train/launch.py", "--nproc", ranks] if ranks != "1" else []
        return shlex.join(["python", *launcher, self.program, *map(strip_folders, argv)])


def choose_defaults(options: argparse.Namespace) -> None:
    """Replace each `DeviceDefault` by its value for this machine."""
    import torch

    for key, value in vars(options).items():
        if isinstance(value, DeviceDefault):
            setattr(options, key, value.gpu if torch.cuda.is_available() else value.cpu)


def strip_folders(word: object) -> str:
    """Reduce each absolute path in a command line argument to its file name."""
    return ABSOLUTE_FOLDER.sub("", str(word))
