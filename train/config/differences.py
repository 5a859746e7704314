"""Compare the configurations of a run and a checkpoint, and decide which differences a resume allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from model.fp8.recipes import unused_recipe_keys
from train.config.ds_config import FREE, KEYS
from train.config.schema import all_keys, flatten, key_at
from train.files import to_json_text


@dataclass(frozen=True)
class Difference:
    """A configuration key whose value differs between two configurations. A missing value is represented as None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {to_json_text(self.old)} -> {to_json_text(self.new)}"


def differences(old: Any, new: Any, what: str = "") -> list[Difference]:
    """Return the differences between two JSON values. Objects are compared recursively, key by key.

    Args:
        old: The first JSON value.
        new: The second JSON value.
        what: The dotted key of both values in the configuration.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = what + "." if what else ""
        return [
            d for key in {**old, **new} for d in differences(old.get(key), new.get(key), f"{prefix}{key}")
        ]
    return [] if old == new else [Difference(what, old, new)]


def resume_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the configuration differences that prevent resuming a run unless the user allows them.

    Args:
        old, new: Resolved arguments as returned by `TrainingArguments.to_dict`. Arguments written by another version of
            the code may lack keys. A missing key is treated as if it had the value `before` from its declaration, or
            the default if there is no such value.
    """
    sections = (values.get("precision") or {} for values in (old, new))
    unread_keys = {f"precision.{name}" for section in sections for name in unused_recipe_keys(section)}

    defaults = {
        key: node.get("before", node["default"]) for key, node in all_keys().items() if "default" in node
    }

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        data = values["data"]
        # a resume compares the content of the data folders, not their paths
        whole = {"data.sources": sorted(data["sources"]), "data.weights": data.get("weights")}
        given = {k: v for k, v in flatten(values).items() if config_key(k) not in ("", *whole)} | whole
        named = {config_key(key) for key in given}
        given |= {key: value for key, value in defaults.items() if key not in named}
        return {k: v for k, v in given.items() if not (config_key(k) in unread_keys or is_free(k))}

    return differences(relevant(old), relevant(new))


def same_precision(one: dict[str, Any], other: dict[str, Any], keys: Iterable[str] | None = None) -> bool:
    """Return whether two "precision" sections have equal values for `keys`.

    Keys that one of the two recipes does not use are not compared.

    Args:
        one, other: The two sections.
        keys: The keys to compare, or None for all keys.
    """
    compared = {*one, *other} if keys is None else {*keys}
    return all(
        one.get(key) == other.get(key)
        for key in compared - unused_recipe_keys(one) - unused_recipe_keys(other)
    )


def config_key(key: str) -> str:
    """Return the configuration key that contains the dotted path, or "" if none does.

    For example, "deepspeed.zero_optimization" belongs to the key "deepspeed".
    """
    return key_at(key.split("."))


def is_free(key: str) -> bool:
    """Return whether the value of a dotted configuration key may change when a run is resumed.

    For keys inside the DeepSpeed configuration, ds_config.KEYS contains the rules.
    """
    if config_key(key) == "deepspeed":
        return KEYS.get(key.removeprefix("deepspeed."), (None, ""))[1] in FREE
    return all_keys()[config_key(key)]["resume"] == "free"


def permanent_refusal(difference: Difference) -> str:
    """Return why this configuration difference can never be allowed when resuming, or "" if the user may allow it."""
    if difference.key == "precision.compute" and not {difference.old, difference.new} <= {"fp8", "bf16"}:
        return "weights and optimizer state are stored in another type"
    return all_keys()[config_key(difference.key)].get("why", "")
