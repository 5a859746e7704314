"""JSON objects -> nested dataclasses, strictly: unknown keys and wrong types are problems, never guesses.

Every function appends to a list of problems instead of raising, so that a user sees all of them at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeGuard

TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises ValueError: no file, no JSON (with line and column), a key given twice, NaN or Infinity, not an
    object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:  # json keeps the last one silently
            raise ValueError(f"{path}: the key {', '.join(twice)} is given twice in one object")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{path}: {name} is not JSON; give a finite number")

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno} column {error.colno}: not valid JSON: {error.msg}"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, this is {TYPE_NAMES[type(value)]}")
    return value


def key_types(cls: type) -> dict[str, Any]:
    """Field name -> type of the dataclass `cls` (ClassVars are no keys)."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_section(kind: Any) -> TypeGuard[type]:
    """Whether the type of a key is a dataclass, that is, a section of its own."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def listed_section(kind: Any) -> type | None:
    """The dataclass of which the type of a key allows a list; None where it allows no such list."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is list and is_section(typing.get_args(option)[0]):
            return typing.get_args(option)[0]
    return None


def sections(cls: type) -> list[tuple[str, type]]:
    """(name, dataclass) of the keys of `cls` that are sections."""
    return [(name, kind) for name, kind in key_types(cls).items() if is_section(kind)]


def all_fields(cls: type, prefix: str = "") -> list[tuple[str, dataclasses.Field]]:
    """(dotted key, field) of everything that can be set: the top level first, then what is in sections."""
    inner = sections(cls)
    names = {name for name, _ in inner}
    out = [(prefix + field.name, field) for field in dataclasses.fields(cls) if field.name not in names]
    for name, kind in inner:
        out += all_fields(kind, f"{prefix}{name}.")
    return out


def default_of(field: dataclasses.Field) -> Any:
    """The field's default, dataclasses.MISSING where it is required."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def get(values: Any, key: str) -> Any:
    """The attribute at a dotted key."""
    for name in key.split("."):
        values = getattr(values, name)
    return values


def leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in a nested object that is no object itself."""
    out = []
    for key, value in values.items():
        out += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return out


def knows(cls: type, path: str) -> bool:
    """Whether the dotted `path` is a key or a section of `cls`, or lies below a key, where any name may follow."""
    kind: Any = cls
    for name in path.split("."):
        if not is_section(kind):
            return True
        if name not in key_types(kind):
            return False
        kind = key_types(kind)[name]
    return True


def example(path: str, field: dataclasses.Field) -> str:
    """'; for example --path JSON' for a field that takes an object or a list: its metadata's example, else its default;
    '' for any other."""
    value = field.metadata.get("example") or default_of(field)
    return f"; for example --{path} '{json.dumps(value)}'" if value and isinstance(value, dict | list) else ""


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """' (did you mean X?)' for the known dotted key nearest to `name`, else ''."""
    known = list(known)
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]  # right name, wrong section
    close = same_leaf or difflib.get_close_matches(name, known, 1, 0.6)
    if not close:
        by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
    return f" (did you mean {close[0]}?)" if close else ""


def type_name(kind: Any) -> str:
    """A type as a user reads it: 'an integer or null'."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(option) for option in typing.get_args(kind))
    if origin is dict:
        return f"an object whose values are {type_name(typing.get_args(kind)[1])}"
    if origin is list:
        return f"a list of which each is {type_name(typing.get_args(kind)[0])}"
    return "anything" if kind is Any else TYPE_NAMES.get(kind, "an object")


def fits(value: Any, kind: Any) -> bool:
    """Whether the JSON `value` has type `kind`: bool is no int, int is a float, null only where allowed."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in options)
    if origin is dict:
        return isinstance(value, dict) and all(fits(v, options[1]) for v in value.values())
    if origin is list:
        return isinstance(value, list) and all(fits(v, options[0]) for v in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def as_type(value: Any, kind: Any) -> Any:
    """`value`, which fits `kind`, with integers made float where a float is meant."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if fits(value, option))
    if kind is float:
        return float(value)
    if typing.get_origin(kind) is dict:
        return {key: as_type(v, typing.get_args(kind)[1]) for key, v in value.items()}
    return value


def build(
    cls: type,
    raw: dict[str, Any],
    problems: list[str],
    bad: set[str],
    prefix: str = "",
    known: typing.Sequence[str] = (),
) -> Any:
    """An instance of the dataclass `cls` from the JSON object `raw`.

    Each unknown key, wrong type and missing required key is appended to `problems`, and the dotted path of a
    field that got no usable value to `bad`; such a field holds its default, or None where it has none.
    `known` are all dotted keys of the outermost object, for suggestions.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    kinds, values = key_types(cls), {}
    known = known or [*(key for key, _ in all_fields(cls)), *fields]
    for key in [key for key in raw if key not in fields]:
        problems.append(f"{prefix}{key}: unknown key{nearest(prefix + key, known)}")
    for name, field in fields.items():
        path, kind = prefix + name, kinds[name]
        required = default_of(field) is dataclasses.MISSING
        if is_section(kind):
            section = raw.get(name, {})
            if isinstance(section, dict):
                values[name] = build(kind, section, problems, bad, path + ".", known)
            else:
                keys = [key for key, _ in all_fields(kind, path + ".")]
                problems.append(
                    f"{path}: {json.dumps(section)} is given, an object (a section) is expected; "
                    f"for example --{keys[0]} VALUE"
                )
                bad.update(keys)
                values[name] = build(kind, {}, [], bad, path + ".", known)
        elif isinstance(raw.get(name), list) and (item := listed_section(kind)):
            values[name] = _build_list(item, raw[name], problems, bad, path)
        elif name in raw and fits(raw[name], kind):
            values[name] = as_type(raw[name], kind)
        elif name in raw or required:
            given = f"{json.dumps(raw[name])} is given," if name in raw else "required, and not given:"
            problems.append(f"{path}: {given} {type_name(kind)} is expected{example(path, field)}")
            bad.add(path)
            if required:
                values[name] = None
    return cls(**values)


def _build_list(cls: type, raw: list[Any], problems: list[str], bad: set[str], path: str) -> list[Any]:
    """The instances of `cls` from the JSON objects of a list; a problem in one is also a problem of the list."""
    before, built = len(problems), []
    for index, item in enumerate(raw):
        place = f"{path}[{index}]"
        if isinstance(item, dict):
            built.append(build(cls, item, problems, bad, place + "."))
        else:
            problems.append(f"{place}: {json.dumps(item)} is given, an object is expected")
    if len(problems) > before:
        bad.add(path)
    return built


def set_override(raw: dict[str, Any], cls: type, path: str, text: str) -> None:
    """Put the command line's `--path text` into the JSON object `raw`.

    `text` is read as JSON where that gives a value that fits the key's type, else it is the string itself.
    Names below a key that is an object (`data.sources.NAME`) set one entry of it.

    Raises ValueError: the path goes through something that is no object; an object or a list that is not valid JSON.
    """
    names, target = path.split("."), raw
    kind: Any = cls
    # an object of plain values takes the whole rest as one name: a data source may have a dot in its name
    while len(names) > 1 and (kind is Any or is_section(kind)):
        section = names.pop(0)
        kind = _value_type(key_types(kind).get(section, Any)) if is_section(kind) else Any
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ValueError(
                f"--{path}: {section} is {json.dumps(target)}, not an object, so nothing in it can be set"
            )
    name = ".".join(names)
    fields = {f.name: f for f in dataclasses.fields(kind)} if is_section(kind) else {}
    try:
        # an unknown key keeps its text: `build` tells that it is unknown
        target[name] = parse_value(text, key_types(kind).get(name, str) if is_section(kind) else kind)
    except ValueError as error:
        hint = example(path, fields[name]) if name in fields else ""
        raise ValueError(f"--{path} {text} {error}{hint}") from error


def parse_value(text: str, kind: Any) -> Any:
    """`text` of the command line as JSON, or as the string it is where that is what fits `kind`.

    Raises ValueError: it begins like an object or a list, `kind` may be one, and it is not valid JSON.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")) and _may_be_nested(kind):
            raise ValueError(f"is not valid JSON: {error.msg}, at character {error.pos + 1}") from error
        return text
    return text if not fits(value, kind) and fits(text, kind) else value


def _may_be_nested(kind: Any) -> bool:
    """Whether a value of type `kind` may be an object or a list."""
    options = (kind, *typing.get_args(kind))
    return any(o is Any or is_section(o) or typing.get_origin(o) in (dict, list) for o in options)


def _value_type(kind: Any) -> Any:
    """`kind`, or the type of the values where `kind` can be an object of plain values."""
    for option in (kind, *typing.get_args(kind)):
        if typing.get_origin(option) is dict:
            return typing.get_args(option)[1]
    return kind
