"""Load the training arguments from a JSON file and the command line, and open the other files that a run reads.

Later code of a run does not open these files again.

- `read_configuration` reads the file and applies the command-line options.
- `load_arguments` also checks the values and locates the data folders.
- `build_arguments` checks a JSON object: first the type and limits of each key, then combinations of keys.
- `resolve_arguments` reads the DeepSpeed configuration, and sets the keys that are determined by other keys and the
  number of ranks.
- `open_inputs` reads the model configuration and opens the data.

Command-line options take precedence over the file, and the file takes precedence over the defaults.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from model import end_with_reader
from model.config import load_config, read_json_file
from model.fp8.recipes import BF16_MOMENTS_MAX_BETA2, fp8_multiple
from model.hf_folder import HUB_ID, local_folder
from model.keys import RESUME
from model.variants import VARIANTS, cuda_graphs_problem, supports_mlp, variant_problems
from train.config.arguments import (
    CONFIG_FOLDER,
    DEFAULT_DEEPSPEED,
    ConfigurationError,
    TrainingArguments,
    raise_problems,
)
from train.config.schedule import phase_end_problems, phase_precisions, phase_problems
from train.config.schema import (
    Node,
    all_keys,
    describe,
    example,
    full_schema,
    json_type,
    key_at,
    node_at,
    options,
    suggest,
    suggest_key,
    value_schema,
)
from train.data.order import weight_problems
from train.data.source import TokenSource, open_held_out, open_sources
from train.files import data_folder, nearest_existing_path, to_json_text

if TYPE_CHECKING:
    from transformers import MistralConfig

USAGE = """\
usage: train.py CONFIG [--key value]...

CONFIG is a JSON file. A file name without a folder is also looked up in train_args/.
To override a key of the file, pass --key value, or --section.key value for a key in a section. Values are JSON
or plain strings. A list of names can be written as NAME,NAME. --key without a value sets a boolean key to true.
Start train.py with deepspeed, torchrun, srun, mpirun or accelerate, or with python for a single process.
--schema prints the JSON schema of the file, with which editors complete and check the file.

Exit status:
  0    The run is complete.
  1    Another error occurred. A restart from the last checkpoint may help.
  2    Something must be changed before the run can continue: a key, the data, a folder, the disk, the GPUs, or
       the cause of wrong numbers, such as a loss that is not finite.
  75   The run was asked to stop. It saved a checkpoint if it had begun to train. The same command resumes it.
  130  The run was stopped by Ctrl-C, without a checkpoint.
"""
# The supervisor passes the configuration with which a run started to its ranks in this environment variable.
CONFIGURATION = "FP8_CONFIGURATION"
# Names of two error types in pydantic
MISSING, UNKNOWN = "missing", "unexpected_keyword_argument"

Place = tuple[str | int, ...]  # path to a value in the configuration: key names and list indices


def load_arguments(
    argv: list[str], configuration: tuple[dict[str, Any], str] | None = None
) -> TrainingArguments:
    """Load the training arguments from a command line, and locate the model and data folders on this node.

    Args:
        argv: The command line, as for `read_configuration`.
        configuration: The result of `read_configuration`, if it was called earlier. By default, the content of the
            environment variable CONFIGURATION is used if it is set.

    Raises:
        ConfigurationError: The file or the command line is invalid.
        JsonError: The file is not valid JSON.
        HubError: The model cannot be downloaded.
    """
    given = os.environ.get(CONFIGURATION)
    arguments = build_arguments(
        *(configuration or (json.loads(given) if given else read_configuration(argv)))
    )
    model = arguments.model
    model.config = local_folder(model.config, weights=False)
    model.init_from = model.init_from and local_folder(model.init_from)
    for folders in (arguments.data.sources, arguments.data.eval_sources or {}):
        for name, folder in folders.items():
            folders[name] = data_folder(folder)
    return arguments


def read_configuration(argv: list[str]) -> tuple[dict[str, Any], str]:
    """Read the JSON file and the options of a command line, without checking the values.

    The command line has the form `CONFIG [--key value | --key=value | --section.key value]...`. `--help` and `--schema`
    print text and exit. The option `--local_rank`, which DeepSpeed's launcher adds, is ignored.

    Returns:
        The JSON object, and its name for error messages.

    Raises:
        ConfigurationError, JsonError: The file or the command line is invalid.
    """
    for option, printed in (("--help", help_text), ("-h", help_text), ("--schema", schema_text)):
        if option in argv:
            with end_with_reader():
                print(printed())
            raise SystemExit(0)
    config, overrides = split_argv(argv)
    path = find_config(config, "CONFIG")
    raw = read_json_object(path)
    for key, text in overrides:
        override(raw, key, text)
    if raw.get("output_dir") is None:
        raw["output_dir"] = str(Path("output") / path.stem)
    return raw, f"{path} combined with the command line" if overrides else str(path)


def find_config(name: str, what: str) -> Path:
    """Return the path of a training or DeepSpeed configuration file.

    Args:
        name: A path, or the name of a file in train_args/ with or without ".json".
        what: The argument or key that selects the file: "CONFIG" or "deepspeed".

    Raises:
        ConfigurationError: The file does not exist.
    """
    candidates = [Path(name)]
    if Path(name).name == name:
        candidates += [CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name.removesuffix('.json')}.json"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    pattern = "ds_config_*.json" if what == "deepspeed" else "train_config_*.json"
    shipped = sorted(path.name for path in CONFIG_FOLDER.glob(pattern))
    raise ConfigurationError(
        f"{what}: the file {' or '.join(dict.fromkeys(map(str, candidates)))} does not exist. Pass the path "
        f"of a file, or one of these names in train_args/: {', '.join(shipped)}",
        code="no_such_file",
        key=name,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        JsonError: See `read_json_file`.
        ConfigurationError: The file does not contain a JSON object.
    """
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{path} does not contain a JSON object; enclose its keys in curly braces",
            code="not_an_object",
            key=str(path),
        )
    return value


def load_deepspeed(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """Load the DeepSpeed configuration without resolving "auto" values.

    Args:
        value: The value of the key `deepspeed`: a name or path of a file, an object, or None for the default file.

    Raises:
        ConfigurationError: The file does not exist or does not contain a JSON object.
        JsonError: The file is not valid JSON.
    """
    if isinstance(value, dict):
        return copy.deepcopy(value)
    path = find_config(DEFAULT_DEEPSPEED if value is None else value, "deepspeed")
    return read_json_object(path)


@dataclass(frozen=True)
class Inputs:
    """Model configuration and data of a run, which are opened once at startup.

    The run uses these objects until it ends, even if the user edits a file during the run.
    """

    config: MistralConfig  # model configuration
    train: list[TokenSource]
    held_out: dict[str, list[TokenSource]]  # evaluation data, keyed by loss name


def open_inputs(args: TrainingArguments) -> Inputs:
    """Read the model configuration and open the data of a run.

    Raises:
        ModelConfigError: The model configuration is invalid.
        ConfigurationError: The embedding is tied to lm_head, but lr_scales has a factor for one of them.
        DataError: A data folder cannot be opened, or the folders are incompatible with each other.
    """
    data, length = args.data, args.max_seq_length
    train = open_sources(data.sources, "train", length)
    held_out = open_held_out(train, data.sources, data.eval_sources or {}, length)
    config = load_config(args.model.config)
    if config.tie_word_embeddings:
        for key in ("embedding", "lm_head"):
            if (value := getattr(args.lr_scales, key)) != 1:
                raise ConfigurationError(
                    f"lr_scales.{key} {value}: the embedding and lm_head of this model share one matrix, which cannot "
                    f"have a factor; set lr_scales.{key} to 1",
                    key=f"lr_scales.{key}",
                )
    return Inputs(config, train, held_out)


# ---------------------------------------------------------------- the command line


def help_text() -> str:
    """Return the output of `train.py --help`, which describes the usage and every configuration key."""
    lines = [USAGE]
    for key, node in all_keys().items():
        default = f"default {json.dumps(node['default'])}" if "default" in node else "required"
        reason = f": {node['why']}" if "why" in node else ""
        facts = [describe(node), default, RESUME[node["resume"]] + reason]
        lines += [f"  --{key}  ({'; '.join(facts)})", f"        {node['description']}"]
    return "\n".join(lines)


def schema_text() -> str:
    """Return the JSON schema that `train.py --schema` prints.

    The file train_args/train_config.schema.json contains the same schema.
    """
    schema = full_schema()
    named = {
        "$schema": {"type": "string", "description": "Path of this schema, which editors use."}
    } | schema["properties"]
    return json.dumps(
        {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"properties": named}, indent=1
    )


def split_argv(argv: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split a command line into the configuration file and (key, text) pairs.

    Raises:
        ConfigurationError: The command line does not contain exactly one configuration file, or it contains an unknown
            key or a key without a value.
    """
    configs, overrides, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            configs.append(word)
            continue
        key, equals, text = word[2:].partition("=")
        is_launchers = key.replace("-", "_") == "local_rank"
        if not (is_launchers or key_at(key.split(".")) or key in full_schema()["properties"]):
            raise ConfigurationError(
                f"--{key}: unknown key{suggest_key(key)}; --help lists all keys", code="unknown_key", key=key
            )
        if not equals:
            text = _take_value(key, words)
        if not is_launchers:
            overrides.append((key, text))
    if len(configs) != 1:
        raise ConfigurationError(
            f"expected one configuration file, got {len(configs)} ({', '.join(configs) or 'none'}); pass "
            "exactly one CONFIG, and enclose JSON values in single quotes: --key '{...}' (see --help)",
            code="config_count",
        )
    return configs[0], overrides


def _take_value(key: str, words: list[str]) -> str:
    """Return the value of the option `--key`, and remove this value from the start of `words`.

    A boolean option can be passed without a value and is then "true". This also applies to gradient_checkpointing,
    which accepts "mlp" in addition to booleans.
    """
    accepted = options(node_at(key.split(".")) or {})
    names = [option["const"] for option in accepted if "const" in option]
    is_switch = {option.get("type") for option in accepted if "const" not in option} <= {"boolean", "null"}
    if words and (
        words[0] in ("true", "false", "null", *names) if is_switch else not words[0].startswith("--")
    ):
        return words.pop(0)
    if is_switch:
        return "true"
    raise ConfigurationError(f"--{key} needs a value; pass --{key} VALUE", code="no_value", key=key)


def override(raw: dict[str, Any], path: str, text: str) -> None:
    """Apply the command-line option `--path text` to the JSON object `raw`.

    If the text is JSON of a type that the key accepts, the JSON value is used. Otherwise, the value is the text itself.
    The path can also name an entry of an object-valued key, such as `data.sources.NAME`. A key inside `deepspeed`
    changes the DeepSpeed configuration file of the run.

    Raises:
        ConfigurationError: An intermediate value on the path is not an object, or the text starts like an object or a
            list but is not valid JSON.
    """
    names, target, node = path.split("."), raw, full_schema()
    if names[0] == "deepspeed" and len(names) > 1 and isinstance(raw.get("deepspeed"), str | None):
        raw["deepspeed"] = load_deepspeed(raw.get("deepspeed"))
    # in an object with arbitrary names, the rest of the path is a single name: a data source may have a dot in its name
    while len(names) > 1 and (not node or "properties" in node):
        section = names.pop(0)
        inner = node.get("properties", {}).get(section, {})
        node = next((v for option in options(inner) if (v := value_schema(option)) is not None), inner)
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigurationError(
                f"--{path}: cannot set a key in {section}, because the value of {section} is "
                f"{to_json_text(target)}; set {section} to an object",
                code="not_an_object",
                key=path,
            )
    name = ".".join(names)
    if "properties" in node:  # keep the text for an unknown key, which build_arguments reports
        node = node["properties"].get(name, {"type": "string"})
    target[name] = _parse_value(path, text, node)


def _parse_value(path: str, text: str, node: Node) -> Any:
    kinds = {option.get("type") for option in options(node)}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith(("{", "[")) and kinds & {"object", "array", None}:
            raise ConfigurationError(
                f"--{path} {text} is not valid JSON ({error.msg} at character {error.pos + 1}); enclose JSON in single "
                f"quotes{example(path, node)}",
                code="invalid_json",
                key=path,
            ) from error
        takes_names = any(option.get("items", {}).get("type") == "string" for option in options(node))
        if takes_names and ("," in text or "string" not in kinds):
            return [name.strip() for name in text.split(",")]
        return text
    return text if "string" in kinds and json_type(value) not in kinds else value


# ---------------------------------------------------------------- checks of a JSON object


def build_arguments(raw: dict[str, Any], source: str = "configuration") -> TrainingArguments:
    """Build the training arguments from a JSON object, and check them.

    Args:
        raw: The JSON object.
        source: The name of the configuration for error messages.

    Raises:
        ConfigurationError: The message lists all unknown keys and invalid values. If there are none, it lists all
            combinations of keys that are not allowed.
    """
    raw = {key: value for key, value in raw.items() if key != "$schema"}  # only editors use this key
    sections: Node = {name: {} for name, node in full_schema()["properties"].items() if "properties" in node}
    given = sections | raw
    try:
        arguments = TypeAdapter(TrainingArguments).validate_json(
            json.dumps(given, ensure_ascii=False).encode()
        )
    except ValidationError as error:
        raise_problems(source, _validation_problems(given, error.errors(include_url=False)))
        raise
    raise_problems(source, problems_across_keys(arguments))
    return arguments


def _validation_problems(given: dict[str, Any], errors: list[ErrorDetails]) -> list[str]:
    kinds = {
        _place(given, e): UNKNOWN if e["type"] == "extra_forbidden" else e["type"]  # raised for a TypedDict
        for e in errors
    }
    # pydantic reports one error for each type that a key allows. The innermost place is the mistake.
    places = [p for p in kinds if not any(p == other[: len(p)] and p != other for other in kinds)]
    # list unknown keys first, because a misspelt key explains a missing one
    unknown_first = sorted(places, key=lambda place: kinds[place] != UNKNOWN)
    return [_problem(given, place, kinds[place]) for place in unknown_first]


def _place(given: Any, error: ErrorDetails) -> Place:
    """Return the path of the invalid value in the configuration.

    The location that pydantic reports also contains type names, which are removed.
    """
    place: list[str | int] = []
    for step in error["loc"]:
        if isinstance(given, list | dict) and (
            step in given if isinstance(given, dict) else isinstance(step, int)
        ):
            given = given[step]  # type: ignore[index]
            place.append(step)
    return (*place, error["loc"][-1]) if error["type"] == MISSING else tuple(place)


def _problem(given: Any, place: Place, kind: str) -> str:
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)[1:]
    key = key_at(place)
    if kind == UNKNOWN:
        section, known = name.rpartition(".")[0], (node_at(place[:-1]) or {}).get("properties", {})
        return f"{name}: unknown key{suggest_key(name, [f'{section}.{key}' for key in known])}"
    node = node_at(place) or {}
    expected = f"allowed values: {describe(node)}"
    if not key:
        first = next(iter(node["properties"]))
        expected = f"this section must be an {describe(node)}; for example, pass --{name}.{first} VALUE"
    elif len(place) == key.count(".") + 1:
        expected += example(key, node)
    if kind == MISSING:
        return f"{name}: this required key is missing; {expected}"
    for step in place:
        given = given[step]
    if given == "nvfp4":
        expected += ". NVFP4 is not supported, because the kernels and tests of this project support only 8-bit formats"
    return f"{name}: {to_json_text(given)} is not a valid value; {expected}"


def problems_across_keys(args: TrainingArguments) -> list[str]:
    """Return the combinations of configuration keys that are not allowed, one line per problem."""
    decays = args.lr_scheduler_type == "warmup_stable_decay"
    is_rollback = args.on_spike == "rollback"
    bf16_moments = (
        args.precision.optimizer_states == "bf16_remainder" and args.precision.optimizer_moments == "bf16"
    )
    no_graphs = cuda_graphs_problem(args.model.variant, recomputes=args.gradient_checkpointing is True)
    fp8_phases = [own for own in phase_precisions(args.precision) if own.compute == "fp8"]
    fp8_rows = max((fp8_multiple(own.recipe) for own in fp8_phases), default=1)
    rules: list[tuple[object, str, str]] = [  # (whether the combination is refused, its keys, the reason)
        (
            args.warmup_steps > args.max_steps,
            "warmup_steps max_steps",
            "the warmup is longer than the run; reduce warmup_steps",
        ),
        (
            (args.decay_steps is not None) != decays,
            "lr_scheduler_type decay_steps",
            "decay_steps is required for warmup_stable_decay and not allowed for other schedules; set or remove "
            "decay_steps",
        ),
        (
            decays and args.warmup_steps + (args.decay_steps or 0) > args.max_steps,
            "warmup_steps decay_steps max_steps",
            "warmup and decay together are longer than the run; reduce warmup_steps or decay_steps",
        ),
        (
            args.optim != "muon" and args.muon_momentum != type(args).muon_momentum,
            "optim muon_momentum",
            "muon_momentum has an effect only with optim muon; remove muon_momentum, or set optim to muon",
        ),
        (
            args.lr_scales.embedding != 1 and args.model.init_from is not None,
            "lr_scales.embedding model.init_from",
            "the factor is meant for the initial weights of a new model, and damages a trained embedding; set "
            "lr_scales.embedding to 1",
        ),
        (
            args.keep_every_steps % args.save_steps if args.save_steps else args.keep_every_steps,
            "keep_every_steps save_steps",
            "no checkpoint is saved at some of the steps to keep; set keep_every_steps to a multiple of save_steps",
        ),
        (
            args.profile_steps is not None and args.profile_steps[0] > args.profile_steps[-1],
            "profile_steps",
            "the first step is after the last step; swap the two numbers",
        ),
        (
            args.push_to_hub and not HUB_ID.fullmatch(args.hub_model_id or ""),
            "push_to_hub hub_model_id",
            "an upload needs a repository; set hub_model_id to ORG/NAME",
        ),
        (
            args.push_to_hub and args.save_strategy == "no",
            "push_to_hub save_strategy",
            "a run that saves no checkpoint exports no model; set save_strategy to steps, or remove push_to_hub",
        ),
        (
            is_rollback and args.save_strategy == "no",
            "on_spike save_strategy",
            "a rollback needs checkpoints; set save_strategy to steps, or set on_spike to warn",
        ),
        (
            is_rollback and args.spike_threshold == 0,
            "on_spike spike_threshold",
            "a rollback needs spike detection, which a threshold of 0 turns off; set spike_threshold to a positive "
            "number, or set on_spike to warn",
        ),
        (
            bf16_moments and args.adam_beta2 > BF16_MOMENTS_MAX_BETA2,
            "precision.optimizer_states precision.optimizer_moments adam_beta2",
            f"bf16 cannot represent the small updates of the second moment if adam_beta2 is above "
            f"{BF16_MOMENTS_MAX_BETA2}; set precision.optimizer_moments to fp32",
        ),
        (
            args.data.document_mask and not VARIANTS[args.model.variant].te,
            "data.document_mask model.variant",
            "this model variant does not support document masks; set data.document_mask to false, or set model.variant "
            "to te_linear or te_layer",
        ),
        (
            args.speed.cuda_graphs and no_graphs,
            "speed.cuda_graphs gradient_checkpointing model.variant",
            no_graphs or "",
        ),
        (
            len(args.data.sources) > 1 and args.data.sources.keys() & (args.data.eval_sources or {}).keys(),
            "data.sources data.eval_sources",
            "both contain the same name, so their losses would both be logged as eval_loss/NAME; rename the evaluation "
            "data",
        ),
        (
            args.gradient_checkpointing == "mlp"
            and not any(supports_mlp(args.model.variant, args.speed, own.recipe) for own in fp8_phases),
            "gradient_checkpointing model.variant precision.compute precision.recipe speed.fused_swiglu",
            "mlp needs model.variant te_layer, precision.compute fp8, precision.recipe delayed and speed.fused_swiglu "
            "true; change these keys, or set gradient_checkpointing to true or false",
        ),
        *(
            (
                (getattr(args, key) or 0) * args.max_seq_length % fp8_rows,
                f"{key} max_seq_length precision.compute",
                f"in FP8, batch size x sequence length must be divisible by {fp8_rows}; change one of the two sizes",
            )
            for key in ("per_device_train_batch_size", "per_device_eval_batch_size")
        ),
    ]
    problems = [
        f"{', '.join(f'{key} {to_json_text(attrgetter(key)(args))}' for key in keys.split())}: {reason}"
        for is_refused, keys, reason in rules
        if is_refused
    ]
    if args.output_dir and not (place := nearest_existing_path(Path(args.output_dir))).is_dir():
        problems.append(
            f"output_dir {to_json_text(args.output_dir)}: {place} exists but is not a folder; choose another output_dir"
        )
    if args.data.weights is not None:
        problems += weight_problems(args.data.weights, list(args.data.sources))
    problems += args.precision.problems()
    problems += variant_problems(args.model.variant, args.precision, args.model.compile)
    problems += phase_problems(args)
    if isinstance(args.allow_changes_on_resume, list):
        for name in args.allow_changes_on_resume:
            named = f"allow_changes_on_resume {to_json_text(name)}"
            if name not in all_keys():
                problems.append(f"{named}: unknown key{suggest(name, all_keys())}; --help lists all keys")
            elif reason := all_keys()[name].get("why"):
                problems.append(
                    f"{named}: this key cannot be changed when resuming, because {reason}. Remove the key "
                    "from allow_changes_on_resume"
                )
    return problems


# ---------------------------------------------------------------- keys determined by other keys


def resolve_arguments(arguments: TrainingArguments, world_size: int) -> TrainingArguments:
    """Return a copy of the training arguments with values for all keys that depend on other keys.

    Sets gradient_accumulation_steps, train_batch_size_tokens and per_device_eval_batch_size. Replaces `deepspeed` with
    the object in the DeepSpeed configuration file. Arguments that are already resolved do not change.

    Args:
        arguments: The training arguments.
        world_size: The number of ranks.

    Raises:
        ConfigurationError: train_batch_size_tokens is not a multiple of the tokens in a micro-batch of all ranks or
            contradicts gradient_accumulation_steps, or a phase of precision.schedule has no step.
    """
    out = copy.deepcopy(arguments)
    micro_batch, length = arguments.per_device_train_batch_size, arguments.max_seq_length
    micro_tokens = micro_batch * length * world_size
    sizes = (
        f"per_device_train_batch_size {micro_batch} x max_seq_length {length} x {world_size} ranks = {micro_tokens} "
        "tokens"
    )
    given, steps = arguments.train_batch_size_tokens, arguments.gradient_accumulation_steps
    if given is not None and given % micro_tokens:
        below = given // micro_tokens * micro_tokens
        valid = " or ".join(str(size) for size in (below, below + micro_tokens) if size)
        raise ConfigurationError(
            f"train_batch_size_tokens: {given} is not divisible by {sizes}; use the nearest valid size, "
            f"{valid}, or fewer ranks",
            code="batch_not_divisible",
            key="train_batch_size_tokens",
        )
    if given is not None and steps is not None and given != micro_tokens * steps:
        raise ConfigurationError(
            f"train_batch_size_tokens {given} contradicts gradient_accumulation_steps {steps}, which gives "
            f"{micro_tokens * steps} tokens per step ({sizes} per micro-batch). Remove one of the two keys",
            code="batch_contradiction",
            key="train_batch_size_tokens",
        )
    out.gradient_accumulation_steps = steps or (given // micro_tokens if given else 1)
    out.train_batch_size_tokens = micro_tokens * out.gradient_accumulation_steps
    out.per_device_eval_batch_size = arguments.per_device_eval_batch_size or micro_batch
    out.deepspeed = load_deepspeed(arguments.deepspeed)
    raise_problems("precision.schedule", phase_end_problems(out))
    return out
