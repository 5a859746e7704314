"""Parse and select benchmark cases, which are named sets of training configuration keys."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.errors import UserError


class CaseError(UserError):
    """An error raised for invalid benchmark cases on the command line."""


class Unavailable(UserError):
    """An error raised if this host cannot run a benchmark case."""


@dataclass(frozen=True)
class Case:
    """A configuration that a benchmark measures.

    overrides: dotted training configuration keys with their values, either JSON values or command-line text. megatron:
    Megatron-Core configuration keys, or None if the case does not use Megatron-Core.
    """

    name: str
    overrides: Mapping[str, Any]
    megatron: Mapping[str, bool] | None = None

    def texts(self) -> dict[str, str]:
        """Return the configuration overrides of the benchmark case, with the values as command-line text."""
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in self.overrides.items()}

    def configured(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the training configuration `base` with the overrides of the benchmark case applied.

        base: a JSON object. Raises ValueError for an unknown key or an invalid value.
        """
        from train.config.load import override

        raw = copy.deepcopy(dict(base))
        for key, text in self.texts().items():
            override(raw, key, text)
        return raw


def parse_cases(
    given: Sequence[Sequence[str]], taken: Collection[str], allowed: Collection[str] | None = None
) -> dict[str, Case]:
    """Parse the benchmark cases that are defined by --row NAME key=value ... options.

    given: the arguments of each --row option. taken: case names that are already in use. allowed: the keys and sections
    that a case may set, or None for all keys. Raises CaseError if a name or key is invalid, or a value is missing.
    """
    cases: dict[str, Case] = {}
    for name, *pairs in given:
        if not re.fullmatch(r"\w[\w.-]*", name) or name in taken or name in cases:
            raise CaseError(
                f"--row {name}: the name is invalid or already in use; choose another name that starts with a letter, "
                "digit or _, and consists of letters, digits, _, - and ."
            )
        for pair in pairs:
            key, equals, _ = pair.partition("=")
            if not equals:
                raise CaseError(f"--row {name}: {pair} has no value; write key=value")
            if allowed is not None and not any(f"{key}.".startswith(f"{section}.") for section in allowed):
                raise CaseError(
                    f"--row {name}: a case cannot set {key}; use one of these keys, or a key of these sections: "
                    f"{', '.join(allowed)}"
                )
        cases[name] = Case(name, dict(pair.split("=", 1) for pair in pairs))
    return cases


def select(patterns: Sequence[str], cases: Mapping[str, Case]) -> list[Case]:
    """Return the benchmark cases whose name matches one of the patterns, in the order of `cases`.

    patterns: values of --rows, which may contain the wildcards * and ?. Raises CaseError if a pattern matches no case.
    """
    for pattern in patterns:
        if not fnmatch.filter(cases, pattern):
            raise CaseError(f"--rows {pattern}: no case matches this pattern; choose from {', '.join(cases)}")
    return [c for c in cases.values() if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]
