"""A row of a comparison: a name, and how it computes what all rows compute, in keys of the training configuration."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RowError(ValueError):
    """Rows that cannot be had; the message names them and what there is."""


class NotHere(RuntimeError):
    """What this machine cannot run, and what does not fit its memory; the message says why."""


@dataclass(frozen=True)
class Row:
    """`settings`: dotted keys -> JSON values, or texts as the command line has them. `megatron`: of a row that
    Megatron-Core trains, switches of its own configuration; None: this project does."""

    name: str
    settings: Mapping[str, Any]
    megatron: Mapping[str, bool] | None = None

    def configured(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The training configuration `base`, a JSON object, with this row's settings.

        Raises ValueError: a key that there is not, a text that is no value of it.
        """
        from train.config.arguments import TrainingArguments
        from train.config.command_line import override

        raw = copy.deepcopy(dict(base))
        for key, value in self.settings.items():
            override(raw, TrainingArguments, key, value if isinstance(value, str) else json.dumps(value))
        return raw


def is_under(key: str, allowed: Collection[str]) -> bool:
    """Whether the dotted `key` is one of `allowed` or lies in one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def parse_rows(
    given: Sequence[Sequence[str]], taken: Collection[str], allowed: Collection[str], otherwise: str
) -> list[Row]:
    """The rows of --row NAME key=value ...

    Raises RowError: a name that is `taken` or given twice, or has other characters than letters, digits and _ - .; what
    is no key=value; a key that is not `allowed`, and would make `otherwise`, in which KEY stands for it.
    """
    rows: dict[str, Row] = {}
    for name, *pairs in given:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise RowError(f"--row {name}: a name has letters, digits and _ - . only")
        if name in taken or name in rows:
            raise RowError(f"--row {name}: there is such a row already; choose another name")
        for pair in pairs:
            key, equals, _ = pair.partition("=")
            if not equals:
                raise RowError(
                    f"--row {name} {pair}: key=value is expected; what stands alone comes before --row"
                )
            if not is_under(key, allowed):
                wrong = otherwise.replace("KEY", key)
                raise RowError(
                    f"--row {name} {pair}: a row may change {', '.join(allowed)}; {key} would make {wrong}"
                )
        rows[name] = Row(name, dict(pair.split("=", 1) for pair in pairs))
    return list(rows.values())
