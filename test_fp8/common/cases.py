"""A case of a benchmark: a name, and the keys of the training configuration that it overrides."""

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
    """The cases on the command line are invalid."""


class Unavailable(UserError):
    """This machine cannot run the case."""


@dataclass(frozen=True)
class Case:
    """A case of a benchmark.

    overrides: dotted keys of the training configuration -> JSON values, or text as on a command line.
    megatron: switches of Megatron-Core's configuration if Megatron-Core trains this case.
    """

    name: str
    overrides: Mapping[str, Any]
    megatron: Mapping[str, bool] | None = None

    def texts(self) -> dict[str, str]:
        """Return the overrides as command line arguments."""
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in self.overrides.items()}

    def configured(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the training configuration `base`, a JSON object, with the overrides.

        Raises ValueError for an unknown key or an invalid value.
        """
        from train.config.load import override

        raw = copy.deepcopy(dict(base))
        for key, text in self.texts().items():
            override(raw, key, text)
        return raw


def parse_cases(
    given: Sequence[Sequence[str]], taken: Collection[str], allowed: Collection[str] | None = None
) -> dict[str, Case]:
    """Parse --row NAME key=value ... and return the cases. `allowed` limits the keys. Raises CaseError."""
    cases: dict[str, Case] = {}
    for name, *pairs in given:
        if not re.fullmatch(r"\w[\w.-]*", name) or name in taken or name in cases:
            raise CaseError(f"--row {name}: choose a new name of letters, digits and _ - .")
        for pair in pairs:
            key, equals, _ = pair.partition("=")
            sections = [key] if allowed is None else allowed
            if not equals or not any(f"{key}.".startswith(f"{section}.") for section in sections):
                raise CaseError(
                    f"--row {name} {pair}: expected key=value with a key of {', '.join(sections)}"
                )
        cases[name] = Case(name, dict(pair.split("=", 1) for pair in pairs))
    return cases


def select(patterns: Sequence[str], cases: Mapping[str, Case], option: str) -> list[Case]:
    """Return the cases whose name matches one of `patterns` (wildcards * and ?), in the order of `cases`.

    Raises CaseError if a pattern matches no case.
    """
    for pattern in patterns:
        if not fnmatch.filter(cases, pattern):
            raise CaseError(f"{option} {pattern}: no case matches; choose from {', '.join(cases)}")
    return [c for c in cases.values() if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)]
