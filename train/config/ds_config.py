"""The DeepSpeed configuration of a run. Values of "auto" are filled in from the training arguments.

Only the keys in KEYS are accepted. They were checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from model.config import JsonError, load_sizes
from model.fp8.recipes import PrecisionConfig
from model.variants import VARIANTS, compiles, why_no_graphs
from train.config.arguments import (
    DEFAULT_DEEPSPEED,
    ConfigurationError,
    TrainingArguments,
    find_config,
    raise_problems,
    read_json_object,
)
from train.config.schema import flatten, suggest


class Kind(NamedTuple):
    """The allowed values of a key, in words and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int) -> Kind:
    def is_whole(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return number and value >= least and value == int(value)

    return Kind(f"an integer of at least {least}", is_whole)


def _is_name_or_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) for name in names)


ANY = Kind("anything", lambda value: True)  # the value is compared with the training arguments
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind("a name or a list of names", _is_name_or_names)
SIZE, COUNT = _whole(1), _whole(0)

# How a key was checked
RUN = "run on two ranks with other values: the gradients are the same"
RESHARDED = f"{RUN}; tests/reliability/test_world_size.py reshards its checkpoints"
SOURCE = "according to DeepSpeed's source, it has no effect on a step here"
FP16 = "according to DeepSpeed's source, it affects only the loss scale of fp16"
EQUAL = "must agree with the training arguments"
REPORTS = "run on two ranks with other values: only the reports of DeepSpeed change"
GATHERS = "run on two ranks with other values: only the time at which ZeRO 3 gathers weights changes"
# A resume may change keys with these remarks.
FREE = (EQUAL, REPORTS, GATHERS)

# Section ("" is the top level) -> key -> (a Kind or a tuple of the only allowed values; remark).
# The remark says how the key was checked, or why other values are not allowed. A nested section is listed under its
# dotted path.
KEYS: dict[str, dict[str, tuple[Kind | tuple[Any, ...], str]]] = {
    "": {
        "train_batch_size": (ANY, EQUAL),
        "train_micro_batch_size_per_gpu": (ANY, EQUAL),
        "gradient_accumulation_steps": (ANY, EQUAL),
        "gradient_clipping": (ANY, EQUAL),
        "communication_data_type": (ANY, EQUAL),
        "gradient_allreduce_op": (("mean",), "a sum multiplies the gradient by the number of ranks"),
        "prescale_gradients": ((False,), "DeepSpeed fails with it at ZeRO 2"),
        "gradient_predivide_factor": ((1, 1.0), "DeepSpeed fails with other values at ZeRO 2 and 3"),
        "zero_allow_untested_optimizer": (FLAG, "the optimizers of this project are tested"),
        "steps_per_print": (SIZE, REPORTS),
        "wall_clock_breakdown": (FLAG, REPORTS),
        "memory_breakdown": (FLAG, REPORTS),
        "dump_state": (FLAG, REPORTS),
    },
    "bf16": {"enabled": (ANY, EQUAL)},
    "fp16": {
        "enabled": (ANY, EQUAL),
        "loss_scale": (COUNT, FP16),
        "initial_scale_power": (COUNT, FP16),
        "loss_scale_window": (SIZE, FP16),
        "hysteresis": (SIZE, FP16),
        "min_loss_scale": (SIZE, FP16),
    },
    "data_types": {"grad_accum_dtype": (("fp32", "bf16", "fp16"), "tests/train/preflight/test_gradients.py")},
    "checkpoint": {
        "load_universal": ((False,), "runs resume from their own checkpoints on any number of ranks")
    },
    "optimizer": {"type": (ANY, EQUAL)},
    "optimizer.params": {
        "lr": (ANY, EQUAL),
        "betas": (ANY, EQUAL),
        "eps": (ANY, EQUAL),
        "weight_decay": (ANY, EQUAL),
        "torch_adam": (FLAG, "selects an implementation; ignored here"),
        "fused": (FLAG, "selects an implementation; ignored here"),
        "adam_w_mode": ((True,), "false is Adam with L2 regularization"),
    },
    "timers": {},
    "timers.throughput": {"enabled": (FLAG, REPORTS), "synchronized": (FLAG, REPORTS)},
    "zero_optimization": {
        "stage": ((0, 1, 2, 3), "tests/train/test_training.py"),
        "overlap_comm": (FLAG, RUN),
        "contiguous_gradients": (FLAG, RUN),
        "reduce_scatter": (FLAG, RUN),
        "reduce_bucket_size": (SIZE, RUN),
        "allgather_bucket_size": (SIZE, RUN),
        "allgather_partitions": (FLAG, SOURCE),
        "use_multi_rank_bucket_allreduce": (FLAG, RUN),
        "round_robin_gradients": (FLAG, RESHARDED),
        "parameter_alignment": (FLAG, RESHARDED),
        "sub_group_size": (SIZE, RESHARDED),
        "stage3_prefetch_bucket_size": (COUNT, GATHERS),
        "stage3_param_persistence_threshold": (COUNT, GATHERS),
        "stage3_model_persistence_threshold": (COUNT, RUN),
        "stage3_max_live_parameters": (COUNT, RUN),
        "stage3_max_reuse_distance": (COUNT, RUN),
        "stage3_gather_16bit_weights_on_model_save": (FLAG, SOURCE),
        "load_from_fp32_weights": ((True,), "false loses the float32 weights on a resume"),
        "elastic_checkpoint": ((False,), "checkpoints written with true cannot be loaded"),
        "offload_optimizer": (
            (None, {"device": "none"}),
            "offloading is not supported; precision.optimizer_states packs the states, and ZeRO partitions them",
        ),
        "offload_param": (
            (None, {"device": "none"}),
            "offloading is not supported; ZeRO 3 partitions the weights",
        ),
    },
    "zero_optimization.leaf_module": {
        "classes": (NAMES, GATHERS),
        "names": (NAMES, GATHERS),
        "name_suffixes": (NAMES, GATHERS),
    },
}
# Unsupported key -> what to use instead
INSTEAD = {
    "scheduler": "lr_scheduler_type and warmup_steps in the training configuration",
    "wandb": 'report_to "wandb" in the training configuration',
    "tensorboard": 'report_to "tensorboard" in the training configuration',
    "csv_monitor": "metrics.jsonl, which every run writes",
    "activation_checkpointing": "gradient_checkpointing in the training configuration",
    "torch_autocast": "the section precision in the training configuration",
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "precision.optimizer_states, or a higher ZeRO stage",
    "zero_optimization.cpu_offload_param": "ZeRO 3",
    "zero_optimization.zenflow": "precision.optimizer_states, or a higher ZeRO stage",
    "zero_optimization.zero_quantized_gradients": "precision.gradient_communication with bf16 or fp32",
}


def load_deepspeed(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """Load the DeepSpeed configuration that the key `deepspeed` names, without changes.

    Raises:
        ConfigurationError: The file does not exist or does not contain a JSON object.
    """
    if isinstance(value, dict):
        return copy.deepcopy(value)
    path = find_config(DEFAULT_DEEPSPEED if value is None else value, "deepspeed")
    try:
        return read_json_object(path)
    except JsonError as error:
        raise ConfigurationError(str(error), code=error.code, key=error.key) from error


def resolve_ds_config(
    arguments: TrainingArguments, world_size: int, source: str = "deepspeed"
) -> dict[str, Any]:
    """Return the configuration for deepspeed.initialize, without "auto" values and without an `optimizer` section.

    Args:
        arguments: The arguments, resolved for `world_size` ranks.
        world_size: The number of ranks.
        source: The name of the configuration in error messages.

    Raises:
        ConfigurationError: Lists all unsupported keys and values and all contradictions.
    """
    assert isinstance(arguments.deepspeed, dict), "call resolve_arguments first"
    config = copy.deepcopy(arguments.deepspeed)
    config.pop("msamp", None)  # applied by resolve_arguments
    problems = _key_problems(config)
    problems += _fill(config, _expected(arguments, world_size))
    problems += _take_optimizer(config, arguments)
    if (asked := arguments.precision.gradient_communication) or "communication_data_type" in config:
        problems += _fill(config, {"communication_data_type": (asked, "precision.gradient_communication")})
    config.setdefault("zero_optimization", {}).setdefault("stage", 0)
    problems += _combination_problems(config, arguments)
    _fill_sizes(config["zero_optimization"], arguments)
    # off by default, because they wait for the device in every micro-batch
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    config.setdefault("wall_clock_breakdown", False)
    problems += [
        f'{key}: "auto" is not supported for this key; set a value or remove the key'
        for key, value in flatten(config).items()
        if value == "auto"
    ]
    raise_problems(source, problems)
    return config


def _key_problems(config: dict[str, Any], section: str = "") -> list[str]:
    """Remove unsupported keys and values from `config`. Return one problem per removed key."""
    problems, known = [], KEYS[section]
    for key, value in list(config.items()):
        path = f"{section}.{key}" if section else key
        if path in KEYS:
            if isinstance(value, dict):
                problems += _key_problems(value, path)
                continue
            problems.append(f"{path}: the value is {json.dumps(value)}, but it must be an object")
        elif key in known:
            allowed, remark = known[key]
            if isinstance(allowed, Kind):
                words, is_allowed = allowed.words, allowed.holds(value)
            else:
                words = " or ".join(map(json.dumps, allowed))
                is_allowed = json.dumps(value) in map(json.dumps, allowed)
            if is_allowed or value == "auto":
                continue
            problems.append(
                f"{path}: {json.dumps(value)} is not supported ({remark}); set it to {words}, or remove it"
            )
        else:
            sections = [name for name in KEYS if name.rpartition(".")[0] == section and name]
            elsewhere = [f"{name}.{key}".lstrip(".") for name, keys in KEYS.items() if key in keys]
            use = (
                f" (use {INSTEAD[path]})"
                if path in INSTEAD
                else suggest(key, elsewhere or [*known, *sections])
            )
            if not use:
                use = f"; the supported keys are {', '.join(sorted([*known, *sections]))}"
            problems.append(f"{path}: this key is not supported{use}; remove it")
        del config[key]
    return problems


def _expected(arguments: TrainingArguments, world_size: int) -> dict[str, tuple[Any, str]]:
    """Return DeepSpeed key -> (value, training arguments that determine it)."""
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps or 1
    compute = arguments.precision.compute
    return {
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (
            accumulation,
            "gradient_accumulation_steps (or train_batch_size_tokens)",
        ),
        "train_batch_size": (
            micro * accumulation * world_size,
            f"per_device_train_batch_size {micro} x accumulation {accumulation} x {world_size} ranks",
        ),
        # always set, because DeepSpeed clips at 1.0 by default
        "gradient_clipping": (arguments.max_grad_norm, "max_grad_norm"),
        "bf16.enabled": (compute in ("fp8", "bf16"), f"precision.compute {compute}"),
        "fp16.enabled": (compute == "fp16", f"precision.compute {compute}"),
    }


def _fill(config: dict[str, Any], expected: dict[str, tuple[Any, str]]) -> list[str]:
    """Set each expected value where `config` has "auto" or no value. Return one problem per contradicting value."""
    problems = []
    for key, (value, source) in expected.items():
        section, name = config, key
        if "." in key:
            outer, name = key.split(".")
            section = config.setdefault(outer, {})
        if section.get(name, "auto") == "auto":
            section[name] = value
        elif not _equal(section[name], value):
            problems.append(
                f"{key}: {json.dumps(section[name])} contradicts {source} in the training configuration, which "
                f'requires {json.dumps(value)}; change one of them, or set "auto"'
            )
    return problems


def _take_optimizer(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    """Remove the optimizer section, since the optimizer is built from the arguments. Return its contradictions."""
    optimizer = config.pop("optimizer", None)
    if optimizer is None:
        return []
    problems = []
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if arguments.optim == "muon" or str(kind).lower() == "muon":
        return [
            f"optimizer: the type is {json.dumps(kind)}, but Muon is configured only by optim in the training "
            "configuration; remove the section"
        ]
    if str(kind).lower() not in ("adam", "adamw"):
        problems.append(
            f"optimizer.type: {json.dumps(kind)} is not supported, only AdamW; remove the section"
        )
    expected = {
        "lr": (arguments.learning_rate, "learning_rate"),
        "betas": ([arguments.adam_beta1, arguments.adam_beta2], "adam_beta1 and adam_beta2"),
        "eps": (arguments.adam_epsilon, "adam_epsilon"),
        "weight_decay": (arguments.weight_decay, "weight_decay"),
    }
    given = {name: params[name] for name in params.keys() & expected.keys()}
    found = _fill(given, {name: expected[name] for name in given})
    return problems + [f"optimizer.params.{problem}" for problem in found]


def _layers_freed_early(zero: dict[str, Any], arguments: TrainingArguments) -> str:
    """Return the layer class that must be added to the leaf modules of ZeRO 3, or "".

    With recomputation, a module in a layer frees its weights after the recomputed forward pass, before Transformer
    Engine's backward pass needs them.
    """
    variant, leaf = arguments.model.variant, zero.get("leaf_module", {})
    if not (arguments.gradient_checkpointing and VARIANTS[variant].te):
        return ""
    classes = leaf.get("classes") or []
    named = [name.rpartition(".")[2] for name in (classes if isinstance(classes, list) else [classes])]
    layer = {"te_linear": "MistralDecoderLayer", "te_layer": "FusedTransformerLayer"}[variant]
    return "" if leaf.get("names") or leaf.get("name_suffixes") or layer in named else layer


def _combination_problems(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    """Return the unsupported combinations of ZeRO stage, types and optimizer, one line per problem."""
    zero = config["zero_optimization"]
    stage, accumulate = zero["stage"], config.get("data_types", {}).get("grad_accum_dtype")
    precision, model, muon = arguments.precision, arguments.model, arguments.optim == "muon"
    dtype = {"fp8": "bf16"}.get(precision.compute, precision.compute)  # dtype of the weights
    zero_1_in_float32 = stage == 1 and accumulate == "fp32"
    problems = []

    def check(allowed: object, problem: str) -> None:
        if not allowed:
            problems.append(problem)

    check(
        stage != 3 or not compiles(model.variant, precision, model.compile),
        "zero_optimization.stage: torch.compile cannot trace the hooks in which ZeRO 3 gathers weights; use stage 0, 1 "
        "or 2, or set model.compile to false",
    )
    layer = _layers_freed_early(zero, arguments) if stage == 3 else ""
    check(
        not layer,
        "zero_optimization.leaf_module: with gradient_checkpointing, ZeRO 3 must gather all weights of a layer "
        f'together; add "leaf_module": {{"classes": ["{layer}"]}}, as in ds_config_zero3.json',
    )
    no_graphs = arguments.speed.cuda_graphs and why_no_graphs(model.variant, zero_stage=stage)
    check(not no_graphs, f"zero_optimization.stage: {no_graphs}")
    check(
        stage != 0 or dtype != "fp16",
        "zero_optimization.stage: with fp16 and stage 0, DeepSpeed 0.19.8 divides the gradients by the loss scale "
        "without scaling the loss; use stage 1, 2 or 3, or set precision.compute to bf16",
    )
    # without ZeRO, DeepSpeed fails if gradients accumulate in another type than that of the weights
    types = {None, dtype} if stage == 0 else {None, dtype, "fp32"}
    check(
        accumulate in types,
        f"data_types.grad_accum_dtype: the value is {json.dumps(accumulate)}; with ZeRO {stage} and {dtype} weights it "
        f"must be {' or '.join(sorted(filter(None, types)))}",
    )
    check(
        not muon or dtype != "fp16", 'precision.compute: optim "muon" does not support fp16; use bf16 or fp8'
    )
    check(
        not muon or dtype == "fp16" or stage == 0 or (zero_1_in_float32 and dtype == "bf16"),
        'zero_optimization.stage: optim "muon" needs stage 0, or stage 1 with data_types.grad_accum_dtype fp32 and '
        "precision.compute bf16 or fp8 (ds_config_zero1.json). Otherwise DeepSpeed 0.19.8 orthogonalizes fused "
        "matrices as one matrix, and clips the update instead of the gradient",
    )
    packed = precision.optimizer_states != "fp32"
    states = f"precision.optimizer_states {precision.optimizer_states}"
    check(
        not (packed and muon),
        f'{states}: only AdamW\'s states can be packed; with optim "muon" set it to fp32',
    )
    check(
        not packed or zero_1_in_float32,
        f"{states}: packed states need ZeRO 1 with data_types.grad_accum_dtype fp32, even on one rank; set deepspeed "
        "to ds_config_zero1.json, or optimizer_states to fp32",
    )
    return problems


def _fill_sizes(zero: dict[str, Any], arguments: TrainingArguments) -> None:
    """Replace "auto" sizes (in elements) by values derived from the hidden size, as transformers does."""
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    if autos := [key for key in keys if zero.get(key) == "auto"]:
        hidden = load_sizes(arguments.model.config).hidden_size
        sizes = dict(zip(keys, (hidden**2, int(0.9 * hidden**2), 10 * hidden), strict=True))
        zero.update((key, sizes[key]) for key in autos)


def _equal(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(given, list) and len(given) == len(value) and all(map(_equal, given, value))
    if isinstance(value, bool) or isinstance(given, bool):
        return given is value
    if not (isinstance(given, int | float) and isinstance(value, int | float)):
        return given == value
    return math.isclose(given, value, rel_tol=1e-12)


# ---------------------------------------------------------------- MS-AMP

# MS-AMP (Peng et al., FP8-LM, arXiv:2310.18313) has its own DeepSpeed, which reads a section "msamp". The stock
# DeepSpeed ignores that section. opt_level -> (what MS-AMP does, the closest keys of the section "precision")
MSAMP_LEVELS: dict[str, tuple[str, dict[str, str]]] = {
    "O1": ("gradients and their reduction in FP8", {"gradient_communication": "bf16"}),
    "O2": (
        "O1, first moments in FP8, second moments and master weights in float16",
        {"gradient_communication": "bf16", "optimizer_states": "fp8"},
    ),
    "O3": ("O2 and weights in FP8", {"gradient_communication": "bf16", "optimizer_states": "fp8"}),
}
MSAMP_KEYS: dict[str, tuple[Any, ...]] = {
    "enabled": (True, False),
    "opt_level": tuple(MSAMP_LEVELS),
    "use_te": (True, False),
}


def _msamp_level(deepspeed: dict[str, Any]) -> str | None:
    section = deepspeed.get("msamp", {})
    return section.get("opt_level", "O1") if section.get("enabled", False) else None


def apply_msamp(deepspeed: dict[str, Any], precision: PrecisionConfig) -> list[str]:
    """Apply the section "msamp" to `precision`. Return its problems, one line each."""
    section = deepspeed.get("msamp", {})
    if not isinstance(section, dict):
        return [f"msamp: the value is {json.dumps(section)}, but it must be an object"]
    problems = []
    for key, value in section.items():
        if key not in MSAMP_KEYS:
            problems.append(f"msamp.{key}: unknown key{suggest(key, MSAMP_KEYS)}; remove it")
        elif value not in MSAMP_KEYS[key]:
            allowed = ", ".join(map(json.dumps, MSAMP_KEYS[key]))
            problems.append(f"msamp.{key}: the value is {json.dumps(value)}; allowed are {allowed}")
    if problems or (level := _msamp_level(deepspeed)) is None:
        return problems
    for key, value in MSAMP_LEVELS[level][1].items():
        given = getattr(precision, key)
        if given in (getattr(PrecisionConfig(), key), value):
            setattr(precision, key, value)
        else:
            problems.append(
                f'msamp.opt_level "{level}" sets precision.{key} to {value}, but it is {given}; remove one of them'
            )
    return problems + [f'msamp.opt_level "{level}": {problem}' for problem in precision.problems()]


def describe_msamp(deepspeed: dict[str, Any]) -> str | None:
    """Return a log line about the effect of the section "msamp", or None if it is off."""
    if (level := _msamp_level(deepspeed)) is None:
        return None
    theirs, ours = MSAMP_LEVELS[level]
    settings = ", ".join(f"precision.{key} {value}" for key, value in ours.items())
    return f"msamp {level} (in MS-AMP: {theirs}) is replaced by the closest settings here: {settings}"
