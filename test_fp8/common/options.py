"""Command lines of the benchmarks. Nothing here imports torch, so that --help and a bad argument are answered at
once."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from model.config import config_file
from model.keys import between, json_file

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_REPEATED = ("output", "work_dir")

positive = between(1)


class ByMachine(NamedTuple):
    """A default that depends on whether there is a GPU."""

    gpu: Any
    cpu: Any


def model_config(text: str) -> str:
    """An argparse type: a model configuration that exists."""
    try:
        config_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model.config: ")) from error
    return text


# Options that several programs have: help and argparse's options.
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
    "--seed": ("of weights and tokens", {"type": int}),
    "--work_dir": ("where the temporary folder is made; default: the system's place", {"type": Path}),
}


class Options(argparse.ArgumentParser):
    """The options of the program `file`; `text` is its help."""

    def __init__(self, file: str, text: str | None, **options: Any):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.program = f"test_fp8/{Path(file).name}"
        self.flags: dict[str, str] = {}  # key -> flag, "" for a positional argument

    def add(self, name: str, default: Any, help: str, **options: Any) -> None:
        """Add an option, or a positional argument if `name` has no dashes. The help shows the default."""
        values = default if isinstance(default, ByMachine) else (default,)
        shown = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
        if default not in (None, False, []):
            help += f"; default: {', without a GPU '.join(shown)}"
        action = self.add_argument(name, default=default, help=help.replace("%", "%%"), **options)
        self.flags[action.dest] = name if name.startswith("-") else ""

    def add_shared(self, **defaults: Any) -> None:
        """Add options of `SHARED` with these defaults."""
        for name, default in defaults.items():
            help, options = SHARED[f"--{name}"]
            self.add(f"--{name}", default, help, **options)

    def add_output(self, what: str = "JSON and a plot") -> None:
        self.add("--output", None, f"write {what}", type=json_file, metavar="FILE.json")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse a command line; `behind` is what follows a word --."""
        split = argv.index("--") if "--" in argv else len(argv)
        options = self.parse_args(argv[:split])
        options.behind = argv[split + 1 :]
        return options

    def settle(self, options: argparse.Namespace) -> None:
        """Replace each `ByMachine` by the default of this machine."""
        import torch

        for key, value in vars(options).items():
            if isinstance(value, ByMachine):
                setattr(options, key, value.gpu if torch.cuda.is_available() else value.cpu)

    def command(self, options: argparse.Namespace) -> str:
        """The command line that repeats a run with `options`, without the output file and without folders of this
        machine."""
        ranks = os.environ.get("WORLD_SIZE", "1")
        words = ["python", *(["train/launch.py", "--nproc", ranks] if ranks != "1" else []), self.program]
        for key, flag in self.flags.items():
            value = getattr(options, key)
            if key in NOT_REPEATED or value is None or value is False or value == self.get_default(key) == []:
                continue
            lists = value if isinstance(value, list) else [] if value is True else [value]
            for items in lists if lists and isinstance(lists[0], list) else [lists]:
                words += [flag] * bool(flag) + [public(item) for item in items]
        return shlex.join([*words, *(["--", *map(public, options.behind)] if options.behind else [])])


def public(value: object) -> str:
    """A value, or key=value, of a command line without folders of this machine: of an absolute path its part in the
    repository, or its name."""
    if isinstance(value, Path):
        return value.name
    key, equals, text = str(value).rpartition("=")
    path = Path(text)
    if not path.is_absolute():
        return str(value)
    inside = path.resolve().is_relative_to(ROOT)
    return f"{key}{equals}{path.resolve().relative_to(ROOT) if inside else path.name}"
