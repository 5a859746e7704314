"""The section "msamp" that a DeepSpeed configuration for MS-AMP has, as HARE's: what it asks for, in keys of this one.

MS-AMP (Peng et al., FP8-LM, arXiv:2310.18313) brought a DeepSpeed of its own, which read the section. Stock DeepSpeed
ignores it, so that what somebody measured with it had nothing of MS-AMP.
"""

from __future__ import annotations

import json
from typing import Any

from model.fp8.recipes import PrecisionConfig
from train.config.schema import nearest

KEYS = ("enabled", "opt_level", "use_te")
# opt_level -> what MS-AMP does, the nearest here: keys of the section "precision"
LEVELS: dict[str, tuple[str, dict[str, str]]] = {
    "O1": ("gradients and their reduction in FP8", {"gradient_communication": "bf16"}),
    "O2": (
        "O1, first moments in FP8, second moments and master weights in float16",
        {"gradient_communication": "bf16", "optimizer_states": "fp8"},
    ),
    "O3": (
        "O2 and weights in FP8",
        {"gradient_communication": "bf16", "optimizer_states": "fp8"},
    ),
}
WHY = {
    "gradient_communication": "DeepSpeed reduces gradients in no 8 bits (ZeRO++ at stage 3 has 4)",
    "optimizer_states": "both moments in FP8, weights exactly float32",
}


def problems(section: Any) -> list[str]:
    """Of the section "msamp"."""
    if not isinstance(section, dict):
        return [f"msamp: {json.dumps(section)} is given, an object is expected"]
    found = [f"msamp.{key}: no such key{nearest(key, KEYS)}; remove it" for key in section if key not in KEYS]
    found += [
        f"msamp.{key}: {json.dumps(section[key])} is given, true or false is expected"
        for key in ("enabled", "use_te")
        if not isinstance(section.get(key, False), bool)
    ]
    if section.get("opt_level", "O1") not in [*LEVELS]:  # also of what cannot be a key
        found.append(
            f"msamp.opt_level: {json.dumps(section['opt_level'])} is given, O1, O2 or O3 is expected"
        )
    return found


def asked(deepspeed: dict[str, Any]) -> str | None:
    """The level that is on in a DeepSpeed configuration whose section has no `problems`."""
    section = deepspeed.get("msamp", {})
    return section.get("opt_level", "O1") if section.get("enabled", False) else None


def apply(deepspeed: dict[str, Any], precision: PrecisionConfig) -> list[str]:
    """Set in `precision` what the section asks for; twice is as once. Returns its problems."""
    if found := problems(deepspeed.get("msamp", {})):
        return found
    if (level := asked(deepspeed)) is None:
        return []
    usual = PrecisionConfig()
    for key, value in LEVELS[level][1].items():
        given = getattr(precision, key)
        if given not in (getattr(usual, key), value):
            found.append(
                f'msamp.opt_level "{level}" asks for precision.{key} {value}, and {given} is given; remove one of them'
            )
        else:
            setattr(precision, key, value)
    return found + [
        f'msamp.opt_level "{level}" asks for what this run cannot have: {p}' for p in precision.problems()
    ]


def described(deepspeed: dict[str, Any]) -> str | None:
    """For the log: what the section does here; None where it is not on."""
    if (level := asked(deepspeed)) is None:
        return None
    theirs, ours = LEVELS[level]
    here = ", ".join(f"precision.{key} {value} ({WHY[key]})" for key, value in ours.items())
    weights = "; weights in FP8 are precision.compute fp8's copies" if level == "O3" else ""
    return f"msamp {level} (MS-AMP: {theirs}; stock DeepSpeed ignores the section): the nearest here is {here}{weights}"
