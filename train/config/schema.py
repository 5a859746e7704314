"""What may be given for each key, once as JSON schema (pydantic makes it of the dataclasses) and once in words.

The help, every message, the command line and the schema that editors complete from read it, so that what is to be said
of a key stands at its field alone.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from model.config import read_json_file
from model.errors import UserError
from train.files import shown

Node = dict[str, Any]  # JSON schema of one value, without references
Place = tuple[str | int, ...]  # names of keys, and the numbers of items in lists

MISSING, UNKNOWN = "missing", "unexpected_keyword_argument"  # pydantic's names
OF_TYPED_DICT = {"extra_forbidden": UNKNOWN}  # where it has another name there

WORDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}

# Names in other programs -> what does the same here, a key first.
FOREIGN = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    "min_lr": "min_lr_ratio, a fraction of learning_rate",
    **dict.fromkeys(("lr_scheduler", "lr_decay_style", "scheduler"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "warmup_ratio", "warmup_iters"), "warmup_steps"),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
        "max_steps; an epoch is the tokens of the data / train_batch_size_tokens",
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
    **dict.fromkeys(("resume", "resume_from", "load"), "resume_from_checkpoint; by default a run resumes"),
    **dict.fromkeys(("output", "out_dir", "save_dir", "save"), "output_dir"),
    **dict.fromkeys(("save_interval", "save_every"), "save_steps"),
    **dict.fromkeys(("log_interval", "log_every"), "logging_steps"),
    **dict.fromkeys(("eval_interval", "eval_every"), "eval_steps"),
    "wandb": "report_to wandb",
    "tensorboard": "report_to tensorboard",
    **dict.fromkeys(("model_name_or_path", "model_path", "pretrained", "init_weights"), "model.init_from"),
    **dict.fromkeys(
        ("dataset", "dataset_name", "data_path", "train_data", "train_file"),
        "data.sources, folders written by train/prepare_data.py",
    ),
    "tokenizer": "data.sources; train/prepare_data.py takes --tokenizer",
    **dict.fromkeys(("zero", "zero_stage", "deepspeed_config", "ds_config"), "deepspeed"),
    **dict.fromkeys(("activation_checkpointing", "recompute"), "gradient_checkpointing"),
    "torch_compile": "model.compile",
}


class ConfigurationError(UserError, ValueError):
    """The configuration cannot be used; the message lists every problem.

    Args:
        message: the error, or the heading of `problems`.
        problems: one line each, which begins with the key it is about.

    Attributes:
        keys: the key of each problem.
    """

    code = "configuration"

    def __init__(
        self,
        message: str = "",
        *,
        problems: Sequence[str] = (),
        code: str | None = None,
        key: str | None = None,
    ):
        self.keys = [problem.lstrip("-").split()[0].rstrip(":,") for problem in problems]
        key = self.keys[0] if self.keys and key is None else key
        super().__init__("\n  ".join([message, *problems] if message else problems), code=code, key=key)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises JsonError: as read_json_file. ConfigurationError: no object."""
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path}: a JSON object is expected, this is {WORDS[json_type(value)]}",
            code="not_an_object",
            key=str(path),
        )
    return value


@cache
def schema_of(cls: type) -> Node:
    """The JSON schema of a pydantic dataclass, its references replaced by what they refer to."""
    schema = TypeAdapter(cls).json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if name := node.get("$ref"):
            return inlined(definitions[name.rpartition("/")[2]])
        strict = (
            {"additionalProperties": False} if "properties" in node else {}
        )  # pydantic 2.11 does not say it of all
        left_out = ("title", "description") if strict else ("title",)  # names and docstrings of classes
        return {k: inlined(v) for k, v in node.items() if not (k in left_out and isinstance(v, str))} | strict

    return inlined(schema)


@cache
def keys_of(cls: type) -> dict[str, Node]:
    """Dotted key -> schema of everything that can be set: the top level first, then what is in sections. A key without
    "default" is required."""
    properties = schema_of(cls)["properties"]
    keys = {name: node for name, node in properties.items() if "properties" not in node}
    for name, node in properties.items():
        keys |= {f"{name}.{key}": inner for key, inner in node.get("properties", {}).items()}
    return keys


def key_at(cls: type, place: Sequence[str | int]) -> str:
    """The key in which `place` lies; "" where it is in none: a section, or a name that is unknown."""
    names = [".".join(map(str, place[:length])) for length in (1, 2)]
    return next((name for name in names if name in keys_of(cls)), "")


def node_at(cls: type, place: Sequence[str | int]) -> Node | None:
    """The schema of what is at `place`: a section, a key, or below a key an entry of its object or an item of its list;
    None where there can be nothing."""
    node: Node | None = schema_of(cls)
    for step in place:
        node = next(
            (inner for option in options(node or {}) if (inner := _below(option, step)) is not None), None
        )
    return node


def _below(node: Node, step: str | int) -> Node | None:
    if isinstance(step, int):
        return node.get("items")
    entries = node.get("additionalProperties", False)
    entries = None if entries is False else {} if entries is True else entries
    return node.get("properties", {}).get(step, entries)


def options(node: Node) -> list[Node]:
    """The alternatives that a schema allows."""
    return node.get("anyOf", [node])


def json_type(value: Any) -> str:
    """JSON schema's name of the type of a JSON value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def in_words(node: Node) -> str:
    """What a schema allows, as a user reads it: "an integer above 0 or null"."""
    if "anyOf" in node:
        return " or ".join(map(in_words, node["anyOf"]))
    if "enum" in node:
        return f"one of {', '.join(node['enum'])}"
    kind = node.get("type")
    if kind is None:
        return "anything"
    words = WORDS[kind]
    if kind == "string" and node.get("minLength"):
        words += " that is not empty"
    if kind == "array":
        words += " of at least one entry" if node.get("minItems") else ""
        words += f" of which each is {in_words(node['items'])}"
    if kind == "object" and "properties" not in node:
        entries = node["additionalProperties"]
        words += " of at least one entry" if node.get("minProperties") else ""
        words += f" whose values are {in_words({} if entries is True else entries)}"
    if {"minimum", "maximum"} <= node.keys():
        return f"{words} between {node['minimum']:.12g} and {node['maximum']:.12g}"
    limits = [f"{text} {node[limit]:.12g}" for limit, text in LIMITS.items() if limit in node]
    return f"{words} {' and '.join(limits)}" if limits else words


def example(key: str, node: Node) -> str:
    """ "; for example --key JSON" for a key that takes an object or a list, of its example or its default; else ""."""
    value = node.get("examples", [node.get("default")])[0]
    return f"; for example --{key} '{json.dumps(value)}'" if value and isinstance(value, dict | list) else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)" for the known dotted key nearest to `name`, else ""."""
    known = list(known)
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]  # right name, wrong section
    close = same_leaf or difflib.get_close_matches(name, known, 1, 0.6)
    if not close:
        by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
    return f" (did you mean {close[0]}?)" if close else ""


def instead_of(name: str) -> str:
    """ " (use X)" for another program's name of what a key here does, else ""."""
    use = FOREIGN.get(name.replace("-", "_").lower())
    return f" (use {use})" if use else ""


def unchangeable(cls: type, names: Iterable[str]) -> list[str]:
    """What is wrong with `names`, given in allow_changes_on_resume, a line each: no key, or one that cannot change."""
    keys, problems = keys_of(cls), []
    for name in names:
        given = f"allow_changes_on_resume {shown(name)}"
        if name not in keys:
            problems.append(f"{given}: there is no such key{nearest(name, keys)}; --help lists all keys")
        elif why := keys[name].get("why"):
            problems.append(f"{given}: this key cannot change on a resume: {why}; remove it")
    return problems


def parse(cls: type, raw: dict[str, Any]) -> tuple[Any, list[str], set[str]]:
    """An instance of `cls` from a JSON object, all that is wrong with that, a line each, and the keys without a usable
    value: in the instance these hold their default, a required one its example, so that what goes across keys can be
    checked too."""
    sections: Node = {name: {} for name, node in schema_of(cls)["properties"].items() if "properties" in node}
    given = sections | copy.deepcopy(raw)
    adapter = TypeAdapter[Any](cls)
    try:
        return adapter.validate_json(json.dumps(given)), [], set()
    except ValidationError as error:
        found = error.errors(include_url=False)
        kinds = {_place(given, e): OF_TYPED_DICT.get(e["type"], e["type"]) for e in found}
    # a key that allows several types has a complaint of each: the one from within the value says where the mistake is
    places = [p for p in kinds if not any(p == other[: len(p)] and p != other for other in kinds)]
    places.sort(key=lambda place: kinds[place] != UNKNOWN)  # first what others may follow from
    problems = [_problem(cls, given, place, kinds[place]) for place in places]
    bad: set[str] = set()
    for place in places:
        if key := key_at(cls, place):
            bad.add(key)
        elif kinds[place] == UNKNOWN:
            del _value(given, place[:-1])[place[-1]]
        else:
            given[str(place[0])] = {}
            bad |= {name for name in keys_of(cls) if name.startswith(f"{place[0]}.")}
    for key in bad:
        node, (section, _, name) = keys_of(cls)[key], key.rpartition(".")
        target = given[section] if section else given
        target.pop(name, None)
        if "default" not in node:
            target[name] = node["examples"][0]
    return adapter.validate_json(json.dumps(given)), problems, bad


def _place(given: Any, error: ErrorDetails) -> Place:
    """Where in `given` the error is: pydantic's location without the names of the types that it tried."""
    place: list[str | int] = []
    for step in error["loc"]:
        if isinstance(given, list | dict) and (
            step in given if isinstance(given, dict) else isinstance(step, int)
        ):
            given = given[step]  # type: ignore[index]
            place.append(step)
    return (*place, error["loc"][-1]) if error["type"] == MISSING else tuple(place)


def _value(given: Any, place: Place) -> Any:
    for step in place:
        given = given[step]
    return given


def _problem(cls: type, given: dict[str, Any], place: Place, kind: str) -> str:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)[1:]
    if kind == UNKNOWN:
        item = node_at(cls, place[:-1]) if (key := key_at(cls, place)) else None
        whole = f"{key.rpartition('.')[0]}.{place[-1]}"
        if item and whole in keys_of(cls):
            return f"{name}: it cannot differ from item to item; set it for the whole run, as {whole}"
        known = item["properties"] if item else [*keys_of(cls), *schema_of(cls)["properties"]]
        return f"{name}: unknown key{instead_of(name) or nearest(name, known)}"
    node, key = node_at(cls, place) or {}, key_at(cls, place)
    expected = f"{in_words(node)} is expected"
    if not key:
        first = next(iter(node["properties"]))
        expected = f"{in_words(node)} (a section) is expected; for example --{name}.{first} VALUE"
    elif len(place) == key.count(".") + 1:
        expected += example(key, node)
    if kind == MISSING:
        return f"{name}: required, and not given: {expected}"
    value = _value(given, place)
    if isinstance(value, float) and not math.isfinite(value):
        expected = expected.replace("a number", "a finite number")
    return f"{name}: {shown(value)} is given, {expected}"
