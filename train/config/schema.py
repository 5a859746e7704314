"""Describe the allowed values of each configuration key, as a JSON schema and in words.

pydantic generates the schema. `--help`, error messages, the command line, the schema file for editors and the tables in
docs/configuration.md use these descriptions.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from train.config.arguments import TrainingArguments

Node = dict[str, Any]  # JSON schema for one value, with all references resolved

LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

# Maps the name of a key in other training programs to advice, which starts with this project's key.
FOREIGN = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    "min_lr": "min_lr_ratio, a fraction of learning_rate",
    **dict.fromkeys(("lr_scheduler", "lr_decay_style", "scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "warmup_ratio", "warmup_iters"), "warmup_steps"),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
        "max_steps = epochs x number of training tokens / train_batch_size_tokens",
    ),
    **dict.fromkeys(("steps", "iters", "max_iters", "train_iters", "num_steps"), "max_steps"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "micro_batch_size", "mbs"), "per_device_train_batch_size"
    ),
    **dict.fromkeys(("global_batch_size", "gbs", "total_batch_size"), "train_batch_size_tokens, in tokens"),
    **dict.fromkeys(
        ("grad_accum", "grad_accum_steps", "gradient_accumulation", "accumulate_grad_batches"),
        "gradient_accumulation_steps",
    ),
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_length", "max_seq_len", "block_size", "max_length"),
        "max_seq_length",
    ),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping"), "max_grad_norm"),
    "optimizer": "optim",
    "wd": "weight_decay",
    **dict.fromkeys(("bf16", "fp16", "fp8", "fp32", "dtype", "mixed_precision"), "precision.compute"),
    **dict.fromkeys(
        ("resume", "resume_from", "load"),
        "resume_from_checkpoint, which defaults to the newest checkpoint of the run",
    ),
    **dict.fromkeys(("output", "out_dir", "save_dir", "save"), "output_dir"),
    **dict.fromkeys(("save_interval", "save_every"), "save_steps"),
    **dict.fromkeys(("log_interval", "log_every"), "logging_steps"),
    **dict.fromkeys(("eval_interval", "eval_every"), "eval_steps"),
    "wandb": "report_to wandb",
    "tensorboard": "report_to tensorboard",
    **dict.fromkeys(("model_name_or_path", "model_path", "pretrained", "init_weights"), "model.init_from"),
    **dict.fromkeys(
        ("dataset", "dataset_name", "data_path", "train_data", "train_file"),
        "data.sources, which lists folders written by train/prepare_data.py",
    ),
    "tokenizer": "data.sources; the tokenizer is an option of train/prepare_data.py",
    **dict.fromkeys(("zero", "zero_stage", "deepspeed_config", "ds_config"), "deepspeed"),
    **dict.fromkeys(("activation_checkpointing", "recompute"), "gradient_checkpointing"),
    "torch_compile": "model.compile",
}


@cache
def full_schema() -> Node:
    """Return the JSON schema of the training configuration, with all references resolved."""
    schema = TypeAdapter(TrainingArguments).json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if name := node.get("$ref"):
            return inline(definitions[name.rpartition("/")[2]])
        is_section = "properties" in node
        dropped = ("title", "description") if is_section else ("title",)  # class names and docstrings
        kept = {k: inline(v) for k, v in node.items() if not (k in dropped and isinstance(v, str))}
        # pydantic 2.11 sometimes omits this entry
        return kept | ({"additionalProperties": False} if is_section else {})

    return inline(schema)


@cache
def all_keys() -> dict[str, Node]:
    """Return a dictionary from each dotted configuration key to its JSON schema. Top-level keys come first.

    The schema of a required key has no "default".
    """
    properties = full_schema()["properties"]
    keys = {name: node for name, node in properties.items() if "properties" not in node}
    for name, node in properties.items():
        keys |= {f"{name}.{key}": inner for key, inner in node.get("properties", {}).items()}
    return keys


def key_at(place: Sequence[str | int]) -> str:
    """Return the configuration key that contains the value at a path of names and list indices.

    Returns "" if the path points to a section or starts with an unknown name.
    """
    names = [".".join(map(str, place[:length])) for length in (1, 2)]
    return next((name for name in names if name in all_keys()), "")


def node_at(place: Sequence[str | int]) -> Node | None:
    """Return the JSON schema for a path of names and list indices in the configuration, or None for an unknown path."""
    node: Node | None = full_schema()
    for step in place:
        inner = (_child(option, step) for option in options(node or {}))
        node = next((child for child in inner if child is not None), None)
    return node


def _child(node: Node, step: str | int) -> Node | None:
    if isinstance(step, int):
        return node.get("items")
    if step in node.get("properties", {}):
        return node["properties"][step]
    return value_schema(node)


def value_schema(node: Node) -> Node | None:
    """Return the schema of the values if `node` describes an object with arbitrary keys, otherwise None."""
    entries = node.get("additionalProperties", False)
    return None if entries is False else {} if entries is True else entries


def options(node: Node) -> list[Node]:
    """Return the JSON schemas in the "anyOf" list of `node`, or [node] if there is no such list."""
    return node.get("anyOf", [node])


def json_type(value: Any) -> str:
    """Return the JSON schema type of a JSON value, such as "integer"."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def describe(node: Node) -> str:
    """Describe in words the values that a JSON schema allows, for example "integer > 0 or null"."""
    if "anyOf" in node:
        return " or ".join(map(describe, node["anyOf"]))
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return ", ".join(node["enum"])
    words = [node.get("type", "anything")]
    if not {"minLength", "minItems", "minProperties"}.isdisjoint(node):  # all are 1
        words.insert(0, "non-empty")
    if inner := node.get("items") or value_schema(node):
        words.append(f"of {describe(inner)}")
    limits = [f"{sign} {node[limit]:.12g}" for limit, sign in LIMITS.items() if limit in node]
    return " ".join([*words, ", ".join(limits)]).strip()


def example(key: str, node: Node) -> str:
    """Return a hint on how to write an object or a list on the command line, in the form "; for example --key JSON".

    Return "" for keys with other types of values.
    """
    value = node.get("examples", [node.get("default")])[0]
    return f"; for example --{key} '{json.dumps(value)}'" if value and isinstance(value, dict | list) else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)", where X is the known key most similar to `name`, or "" if no key is similar.

    Only the part after the last dot is compared.
    """
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], by_leaf, 1, 0.6)
    return f" (did you mean {by_leaf[close[0]]}?)" if close else ""


def suggest_key(name: str, others: Sequence[str] = ()) -> str:
    """Suggest a configuration key for an unknown name.

    Args:
        name: The unknown name.
        others: Other names that are allowed here, such as the names in a list item.

    Returns:
        " (use X)" for a name used by other training programs, " (did you mean X?)" for a similar name, or "".
    """
    if use := FOREIGN.get(name.replace("-", "_").lower()):
        return f" (use {use})"
    return suggest(name, [*others, *all_keys(), *full_schema()["properties"]])


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries into one dictionary with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
