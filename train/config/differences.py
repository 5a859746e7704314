"""Compare two configurations, and decide which differences a resume allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from model.fp8.recipes import unused_recipe_keys
from train.config.ds_config import FREE, KEYS
from train.config.schema import all_keys, flatten, key_at
from train.files import shown


@dataclass(frozen=True)
class Difference:
    """A dotted key with two different JSON values. A missing value is None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def differences(old: Any, new: Any, what: str = "") -> list[Difference]:
    """Return the differences of two JSON values, by key where both have an object.

    Args:
        old: The first value.
        new: The second value.
        what: The dotted key of both values.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = what + "." if what else ""
        return [
            d for key in {**old, **new} for d in differences(old.get(key), new.get(key), f"{prefix}{key}")
        ]
    return [] if old == new else [Difference(what, old, new)]


def resume_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the differences that a resume must allow explicitly or cannot allow.

    Args:
        old, new: `to_dict()` of resolved arguments. A key that is missing, because another version wrote the arguments,
            has the value that matches that version: `before` of the key, or else its default.
    """
    sections = (values.get("precision") or {} for values in (old, new))
    unread_keys = {f"precision.{name}" for section in sections for name in unused_recipe_keys(section)}

    defaults = {
        key: node.get("before", node["default"]) for key, node in all_keys().items() if "default" in node
    }

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        data = values["data"]
        # a resume compares the content of the folders, not their paths
        whole = {"data.sources": sorted(data["sources"]), "data.weights": data.get("weights")}
        given = {k: v for k, v in flatten(values).items() if key_of(k) not in ("", *whole)} | whole
        named = {key_of(key) for key in given}
        given |= {key: value for key, value in defaults.items() if key not in named}
        return {k: v for k, v in given.items() if not (key_of(k) in unread_keys or is_free(k))}

    return differences(relevant(old), relevant(new))


def same_precision(one: dict[str, Any], other: dict[str, Any], keys: Iterable[str] | None = None) -> bool:
    """Return whether two "precision" sections agree in all `keys` that both read. None: compare all keys."""
    compared = {*one, *other} if keys is None else {*keys}
    return all(
        one.get(key) == other.get(key)
        for key in compared - unused_recipe_keys(one) - unused_recipe_keys(other)
    )


def key_of(key: str) -> str:
    """Return the configuration key that contains the dotted `key`, or ""."""
    return key_at(key.split("."))


def is_free(key: str) -> bool:
    """Return whether a resume may change the dotted `key`. A key of DeepSpeed has its rule in ds_config.KEYS."""
    if key_of(key) == "deepspeed":
        return KEYS.get(key.removeprefix("deepspeed."), (None, ""))[1] in FREE
    return all_keys()[key_of(key)]["resume"] == "free"


def permanent_reason(difference: Difference) -> str:
    """Return the reason that no resume can allow this difference, or ""."""
    if difference.key == "precision.compute" and not {difference.old, difference.new} <= {"fp8", "bf16"}:
        return "weights and optimizer state have another type"
    return all_keys()[key_of(difference.key)].get("why", "")
