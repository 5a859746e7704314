"""What two configurations differ in, and what of it a resumed run may have otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from model.fp8.recipes import RECIPES, unread
from train.config.arguments import TrainingArguments
from train.config.schema import key_at, keys_of
from train.files import shown

MIXTURE = "data.weights"


@dataclass(frozen=True)
class Difference:
    """`key` (dotted) has the JSON value `old` on one side and `new` on the other; None where there is none."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


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
    """What a resume has otherwise and not every one may have, by key. Both are `to_dict()` of resolved arguments; of a
    key that one of them lacks, which another version wrote, the default counts, or what that version did
    (`_of_new_keys`)."""
    rules = {"free", "content"}
    unread_keys = unread_by_either(old, new)
    if not (_depends_on_its_length(old) or _depends_on_its_length(new)):
        rules.add("constant")
    if _calibrations_to_come(old) == _calibrations_to_come(new):
        rules.add("calibration")
    # a mixture by source beside one by stage: source by source it would be told as null in the other
    staged = any(isinstance(values["data"].get("weights"), list) for values in (old, new))

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        # the content of data folders is compared, not their paths
        values = values | {"data": values["data"] | {"sources": sorted(values["data"]["sources"])}}
        found = {key: value for key, value in leaves(values).items() if not _is_of_no_matter(key)}
        if staged:
            found = {key: value for key, value in found.items() if key_of(key) != MIXTURE}
            found[MIXTURE] = values["data"].get("weights")
        present = {key_of(key) for key in found}
        lacking = _of_new_keys(values.get("precision") or {})
        found |= {key: value for key, value in lacking.items() if key not in present}
        return {
            key: value
            for key, value in found.items()
            if key_of(key) and key_of(key) not in unread_keys and rule_of(key) not in rules
        }

    return differences(relevant(old), relevant(new))


def _depends_on_its_length(values: dict[str, Any]) -> bool:
    """Whether a step of the run is another where max_steps is: its learning rate, or its stage."""
    stages = (values.get("precision") or {}).get("schedule") or []
    return values.get("lr_scheduler_type") != "constant" or any("until_share" in stage for stage in stages)


def _calibrations_to_come(values: dict[str, Any]) -> list[Any]:
    """calibration_passes of each stage with delayed scaling that begins after the run has."""
    precision = values.get("precision") or {}
    later = ({**precision, **stage, "schedule": None} for stage in (precision.get("schedule") or [])[1:])
    return [own.get("calibration_passes") for own in later if "calibration_passes" not in unread(own)]


def unread_by_either(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """The keys of the section "precision", dotted, that say nothing in one of two configurations: a version may have
    another default for them, and what makes the other read them, as `compute`, is a difference by itself."""
    sections = (values.get("precision") or {} for values in (old, new))
    return {f"precision.{name}" for name in set().union(*map(unread, sections))}


def same_precision(one: dict[str, Any], other: dict[str, Any], keys: Iterable[str] | None = None) -> bool:
    """Whether two sections "precision" are the same, of these keys where some are given, but for what one of them does
    not read."""
    compared = {*one, *other} if keys is None else {*keys}
    return all(one.get(key) == other.get(key) for key in compared - unread(one) - unread(other))


def _of_new_keys(precision: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> what a run without the key did, whose section "precision" is given: `before` of the key, which is
    about lm_head's gradients in Transformer Engine's FP8, where a stage has these, else the default."""
    head = any(
        own.get("compute") == "fp8"
        and (recipe := RECIPES.get(own.get("recipe", ""))) is not None
        and recipe.package == "te"
        and any(fnmatchcase("lm_head", pattern) for pattern in own.get("bf16_modules") or ())
        for own in ({**precision, **stage} for stage in precision.get("schedule") or [{}])
    )
    return {
        key: node.get("before", node["default"]) if head else node["default"]
        for key, node in keys_of(TrainingArguments).items()
        if "default" in node
    }


# Of DeepSpeed's configuration what only repeats keys of the training configuration (ds_config.py sees to that).
_REPEATED = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16.enabled "
    "fp16.enabled msamp.enabled msamp.opt_level msamp.use_te".split()
)


# What decides when ZeRO 3 gathers weights, and not what is computed with them.
_GATHERING = tuple(
    f"zero_optimization.{name}"
    for name in ("leaf_module.", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)


# What DeepSpeed tells and measures, by the key itself or the section.
_TOLD = (
    "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers comms_logger flops_profiler "
    "tensorboard csv_monitor".split()
)


def _is_of_no_matter(key: str) -> bool:
    section, _, name = key.partition(".")
    told = name.partition(".")[0] in _TOLD
    return section == "deepspeed" and (
        told or name in _REPEATED or name.startswith(("optimizer.", *_GATHERING))
    )


def key_of(key: str) -> str:
    """The key of the configuration in which the dotted `key` lies; "" where there is none."""
    return key_at(TrainingArguments, key.split("."))


def rule_of(key: str) -> str:
    """The rule (model.keys.RESUME) of the key in which the dotted `key` lies."""
    return keys_of(TrainingArguments)[key_of(key)]["resume"]


def why_never(difference: Difference) -> str:
    """Why no resume can have this difference; "" where one that allows it can."""
    if difference.key == "precision.compute" and not {difference.old, difference.new} <= {"fp8", "bf16"}:
        return "weights and optimizer state are kept in another type"
    return keys_of(TrainingArguments)[key_of(difference.key)].get("why", "")
