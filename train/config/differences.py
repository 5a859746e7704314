"""What two configurations differ in, and what of it a resumed run may have otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from train.config.arguments import TrainingArguments
from train.config.schema import key_at, keys_of


@dataclass(frozen=True)
class Difference:
    """`key` (dotted) has the JSON value `old` on one side and `new` on the other; None where there is none."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} -> {json.dumps(self.new)}"


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of everything in a nested object that is no object itself."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def differences(old: Any, new: Any, what: str = "") -> list[Difference]:
    """Where two JSON values differ: by key where both have an object, else as a whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = what + "." if what else ""
        return [
            d for key in {**old, **new} for d in differences(old.get(key), new.get(key), f"{prefix}{key}")
        ]
    return [] if old == new else [Difference(what, old, new)]


def resume_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """What keeps a run from being resumed, by key. Both are `to_dict()` of resolved arguments."""
    rules = {"free"}
    if old.get("lr_scheduler_type") == new.get("lr_scheduler_type") == "constant":
        rules.add("constant")

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        # the content of data folders is compared, not their paths
        values = values | {"data": values["data"] | {"sources": sorted(values["data"]["sources"])}}
        return {key: value for key, value in leaves(values).items() if rule_of(key) not in rules}

    return differences(relevant(old), relevant(new))


def rule_of(key: str) -> str:
    """The rule (train.config.schema.RESUME) of the key in which the dotted `key` lies; "" where it has to stay."""
    return keys_of(TrainingArguments).get(key_at(TrainingArguments, key.split(".")), {}).get("resume", "")
