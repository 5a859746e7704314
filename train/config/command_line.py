"""The command line of a training run: `CONFIG [--key value | --key=value | --section.key value]...`, and its help."""

from __future__ import annotations

import json
from typing import Any

from model.keys import RESUME
from train.config.schema import (
    ConfigurationError,
    Node,
    example,
    in_words,
    instead_of,
    json_type,
    keys_of,
    nearest,
    node_at,
    options,
    schema_of,
)
from train.files import shown

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SWITCHED = ("true", "false", "null")
USAGE = """\
usage: train.py CONFIG [--key value]...

CONFIG is a JSON file; a bare name that is not here is looked up in train_args/.
Every key of the file can be given as --key value too, --section.key value in a section;
values are JSON or plain strings, a list of names also NAME,NAME; a key that is true or false may
stand alone (--dry_run), which is true.
Start with deepspeed, torchrun or python (one process).
--schema prints the JSON schema of the file, by which editors complete and check it.

Exit status: 0 done; 2 for what has to be changed first: a key, data, a folder, the disk, a GPU that is not
there, numbers that went wrong; 75 stopped on request, with a checkpoint, the same command goes on; 130 ended
by Ctrl-C, without one; 1 all else, which another start from the last checkpoint may help.
"""


def help_text(cls: type) -> str:
    """What --help prints: usage, and every key with what it takes, its default and meaning."""
    lines = [USAGE]
    for key, node in keys_of(cls).items():
        default = f"default {json.dumps(node['default'])}" if "default" in node else "required"
        why = f": {node['why']}" if "why" in node else ""
        facts = [in_words(node), default, RESUME[node["resume"]] + why]
        lines += [f"  --{key}  ({'; '.join(facts)})", f"        {node['description']}"]
    return "\n".join(lines)


def schema_text(cls: type) -> str:
    """What --schema prints, and train_args/train_config.schema.json holds."""
    schema = schema_of(cls)
    named = {"$schema": {"type": "string", "description": "this schema; for editors"}} | schema["properties"]
    return json.dumps({"$schema": DIALECT} | schema | {"properties": named}, indent=1)


def split(argv: list[str], cls: type) -> tuple[str, list[tuple[str, str]]]:
    """CONFIG, and the (key, text) of the others. DeepSpeed's `--local_rank` is accepted and ignored.

    Raises ConfigurationError: no CONFIG or several, a key without a value.
    """
    configs, overrides, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            configs.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals and _is_switch(key, cls) and not (words and words[0] in SWITCHED):
            text = "true"
        elif not equals:
            if not words or words[0].startswith("--"):
                if unknown_key := _unknown(key, cls):
                    raise ConfigurationError(unknown_key, code="unknown_key", key=key)
                raise ConfigurationError(
                    f"{word} needs a value: {word} VALUE or {word}=VALUE", code="no_value", key=key
                )
            text = words.pop(0)
        if not _is_local_rank(key):
            overrides.append((key, text))
    if len(configs) != 1:
        given = ", ".join(configs) or "none"
        unknown = [
            line for key, _ in overrides if (line := _unknown(key, cls))
        ]  # one may have swallowed CONFIG
        raise ConfigurationError(
            f"one CONFIG is expected, {len(configs)} are given ({given}); see --help",
            problems=unknown,
            code="config_count",
        )
    return configs[0], overrides


def _is_switch(key: str, cls: type) -> bool:
    node = node_at(cls, key.split("."))
    return node is not None and {option.get("type") for option in options(node)} <= {"boolean", "null"}


def _is_local_rank(key: str) -> bool:
    return key.replace("-", "_") == "local_rank"


def _unknown(key: str, cls: type) -> str:
    """The problem of a `--key` that does not exist; "" for one that does."""
    if _is_local_rank(key) or node_at(cls, key.split(".")) is not None:
        return ""
    return f"--{key}: unknown key{instead_of(key) or nearest(key, keys_of(cls))}; --help lists all keys"


def override(raw: dict[str, Any], cls: type, path: str, text: str) -> None:
    """Put the command line's `--path text` into the JSON object `raw`: as JSON where that gives a type that the key
    takes, else as the string itself. Names below a key that is an object (`data.sources.NAME`) set one entry of it.

    Raises ConfigurationError: the path goes through something that is no object; an object or a list that is not
    valid JSON.
    """
    names, target, node = path.split("."), raw, schema_of(cls)
    # an object of plain values takes the whole rest as one name: a data source may have a dot in its name
    while len(names) > 1 and (not node or "properties" in node):
        section = names.pop(0)
        node = _entries(node.get("properties", {}).get(section, {}))
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigurationError(
                f"--{path}: {section} is {shown(target)}, not an object, so nothing in it can be set",
                code="not_an_object",
                key=path,
            )
    name = ".".join(names)
    if "properties" in node:  # an unknown key keeps its text: it is named with the other problems
        node = node["properties"].get(name, {"type": "string"})
    try:
        target[name] = _value(text, node)
    except ValueError as error:
        raise ConfigurationError(
            f"--{path} {text} {error}{example(path, node)}", code="invalid_json", key=path
        ) from error


def _entries(node: Node) -> Node:
    """The schema of the values, where `node` allows an object of plain values; else `node`."""
    for option in options(node):
        if entries := option.get("additionalProperties"):
            return {} if entries is True else entries
    return node


def _value(text: str, node: Node) -> Any:
    """Raises ValueError: it begins like an object or a list, may be one, and is not valid JSON."""
    kinds = {option.get("type") for option in options(node)}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")) and kinds & {"object", "array", None}:
            raise ValueError(f"is not valid JSON: {error.msg}, at character {error.pos + 1}") from error
        takes_names = any(option.get("items", {}).get("type") == "string" for option in options(node))
        if takes_names and ("," in text or "string" not in kinds):
            return [name.strip() for name in text.split(",")]
        return text
    return text if "string" in kinds and json_type(value) not in kinds else value
