"""Command lines of the benchmarks. Nothing here imports torch, so that --help and a bad argument are answered at
once."""

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


class ByMachine(NamedTuple):
    """A default that depends on whether there is a GPU."""

    gpu: Any
    cpu: Any


class Option(NamedTuple):
    """An option, or a positional argument if `name` has no dashes. `keywords` are those of add_argument."""

    name: str
    default: Any
    help: str
    keywords: dict[str, Any]

    def described(self) -> str:
        """The help with the default."""
        values = self.default if isinstance(self.default, ByMachine) else (self.default,)
        shown = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        default = "" if self.default in (None, False, []) else f"; default: {', without a GPU '.join(shown)}"
        return (self.help + default).replace("%", "%%")


def option(name: str, default: Any, help: str, **keywords: Any) -> Option:
    return Option(name, default, help, keywords)


def model_config(text: str) -> str:
    """An argparse type: a model configuration that exists."""
    try:
        config_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model.config: ")) from error
    return text


# Options that several programs have: help and argparse's keywords.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "--config": ("the model", {"type": model_config}),
    "--row": ("add a case", {"nargs": "+", "action": "append", "metavar": ("NAME", "key=value")}),
    "--micro_batch": ("samples of a micro-batch", {"type": positive}),
    "--seq_length": ("tokens of a sample", {"type": positive}),
    "--accumulation": ("micro-batches of a step", {"type": positive}),
    "--rounds": ("measurements of each case", {"type": positive}),
    "--steps": ("timed in a round, at least", {"type": positive}),
    "--seconds": ("timed in a round, at least 4 passes or --steps steps", {"type": between(0, 1000, float)}),
    "--deterministic": ("deterministic kernels, as train.py's default", {"action": "store_true"}),
    "--output": ("write a JSON report", {"type": json_file, "metavar": "FILE.json"}),
}


def shared(**defaults: Any) -> list[Option]:
    """Options of `SHARED` with these defaults."""
    return [Option(f"--{name}", default, *SHARED[f"--{name}"]) for name, default in defaults.items()]


# How bench_model.py and bench_scaling.py measure whole steps.
STEP_OPTIONS = shared(
    config=ByMachine("hare_1.1b", "tiny"),
    row=[],
    seq_length=ByMachine(2048, 64),
    accumulation=ByMachine(8, 2),
    steps=ByMachine(5, 1),
    seconds=ByMachine(1.0, 0.0),
    deterministic=False,
)


class Options(argparse.ArgumentParser):
    """The command line of the program `file`; `text` is its help."""

    def __init__(self, file: str, text: str | None, options: Sequence[Option]):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.program = f"test_fp8/{Path(file).name}"
        for one in (*options, *shared(output=None)):
            self.add_argument(one.name, default=one.default, help=one.described(), **one.keywords)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse a command line; `behind` is what follows a word --."""
        split = argv.index("--") if "--" in argv else len(argv)
        options = self.parse_args(argv[:split])
        options.behind = argv[split + 1 :]
        return options

    def command(self, argv: list[str]) -> str:
        """The command line for the report: without folders of this machine."""
        ranks = os.environ.get("WORLD_SIZE", "1")
        launcher = ["train/launch.py", "--nproc", ranks] if ranks != "1" else []
        return shlex.join(["python", *launcher, self.program, *map(without_folder, argv)])


def choose_defaults(options: argparse.Namespace) -> None:
    """Replace each `ByMachine` by the default of this machine."""
    import torch

    for key, value in vars(options).items():
        if isinstance(value, ByMachine):
            setattr(options, key, value.gpu if torch.cuda.is_available() else value.cpu)


def without_folder(word: object) -> str:
    """A word of a command line with the name alone of each absolute path."""
    return ABSOLUTE_FOLDER.sub("", str(word))
