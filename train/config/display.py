"""How a configuration is shown: every key for the log, and for the console what is not the default."""

from __future__ import annotations

import dataclasses
import textwrap
from operator import attrgetter
from typing import Any

from train.config.arguments import TrainingArguments
from train.config.ds_config import load_deepspeed
from train.config.schema import all_keys
from train.files import shown

LONGEST_VALUE, WIDTH = 60, 110  # characters


def table(args: TrainingArguments) -> str:
    """A line a key; `*` marks what is not the default."""
    keys, values = all_keys(), values_of(args)
    width = max(map(len, keys))
    return "\n".join(
        f"{' ' if values[key] == node.get('default', ...) else '*'} {key:<{width}}  {_json(values[key])}"
        for key, node in keys.items()
    )


def differing(args: TrainingArguments) -> str:
    """The keys that are not at their defaults, with their values, long ones cut off; output_dir is told elsewhere, and
    what resolving filled in is left out where it follows from the other keys."""
    follows = {
        "output_dir": args.output_dir,
        "per_device_eval_batch_size": args.per_device_train_batch_size,
        "deepspeed": load_deepspeed(None),
    }
    told = []
    for key, node in all_keys().items():
        value = values_of(args)[key]
        if value not in (node.get("default", ...), follows.get(key, ...)):
            text = value if isinstance(value, str) else _json(value)
            told.append(f"{key} {text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + '...'}")
    text = "configuration, where it is not the default (all of it: train.log): " + ", ".join(told)
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def values_of(args: TrainingArguments) -> dict[str, Any]:
    """Dotted key -> value."""
    return {key: attrgetter(key)(args) for key in all_keys()}


def _json(value: Any) -> str:
    return shown(value, dataclasses.asdict)
