"""The command lines of test_fp8/: types, defaults that differ without a GPU, and the command that repeats a run. All of
it without torch, so that --help and a bad argument are answered at once."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from model.config import config_file
from model.keys import between, json_file

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_REPEATED = ("output", "work_dir", "time_limit_s", "one_rank")


class ByMachine(NamedTuple):
    """A default that is settled once torch is there."""

    gpu: Any
    cpu: Any


class Options(argparse.ArgumentParser):
    """The options of the program `file`, whose docstring `text` is the help."""

    def __init__(self, file: str, text: str | None, **options: Any):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.program = f"test_fp8/{Path(file).name}"
        self.flags: dict[str, str] = {}  # key -> flag, "" where there is none

    def add(self, name: str, default: Any, help: str, **options: Any) -> None:
        """An option, or with a name without -- what stands alone; its `default` is shown."""
        values = default if isinstance(default, ByMachine) else (default,)
        shown = ", without a GPU ".join(
            " ".join(map(str, v)) if isinstance(v, list) else str(v) for v in values
        )
        if default is not None and default is not False and default != []:
            help += f"; default: {shown}"
        action = self.add_argument(name, default=default, help=help.replace("%", "%%"), **options)
        self.flags[action.dest] = name if name.startswith("-") else ""

    def add_flag(self, name: str, help: str) -> None:
        self.add(name, False, help, action="store_true")

    def add_rows(self) -> None:
        """--row NAME key=value ..., see common/rows.py."""
        self.add("--row", [], "one more row", nargs="+", action="append", metavar=("NAME", "key=value"))

    def add_output(self, what: str) -> None:
        self.add("--output", None, f"write {what}", type=json_file, metavar="FILE.json")

    def settle(self, options: argparse.Namespace) -> None:
        """Put what holds on this machine in the place of each `ByMachine`."""
        import torch

        for key, value in vars(options).items():
            if isinstance(value, ByMachine):
                setattr(options, key, value.gpu if torch.cuda.is_available() else value.cpu)

    def command(self, options: argparse.Namespace, *more: object) -> str:
        """The command line that repeats a run with `options`, with `more` behind, without where its output goes and
        without folders of this machine."""
        words = ["python", self.program]
        for key, flag in self.flags.items():
            value = getattr(options, key)
            if key in NOT_REPEATED or value is None or value is False or value == self.get_default(key) == []:
                continue
            lists = value if isinstance(value, list) else [] if value is True else [value]
            for items in lists if lists and isinstance(lists[0], list) else [lists]:
                words += [flag] * bool(flag) + [public(item) for item in items]
        return shlex.join([*words, *map(str, more)])


def public(value: object) -> str:
    """A value or key=value of a command line without folders of this machine: of a Path the name, of text that is an
    absolute path its part in the repository, or its name."""
    if isinstance(value, Path):
        return value.name
    key, equals, text = str(value).rpartition("=")
    if not Path(text).is_absolute():
        return str(value)
    path = Path(text).resolve()
    return f"{key}{equals}{path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(text).name}"


def model_config(text: str) -> str:
    """The argparse type of --config: a model configuration that there is."""
    try:
        config_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("model.config: ")) from error
    return text


def json_report(text: str) -> dict[str, Any]:
    """The argparse type of a file that --output wrote: its content."""
    try:
        found = json.loads(Path(text).read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("results"), list):
            return found
        why = 'it has no "results"'
    except (OSError, ValueError) as error:
        why = str(error)
    raise argparse.ArgumentTypeError(f"{text}: allowed is a file that --output has written; {why}")


positive, seconds = between(1), between(0, 1000, float)
