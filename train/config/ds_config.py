"""Build the DeepSpeed configuration of a run: the user's, with "auto" filled in from the training arguments.

Only the keys in KEYS are accepted. Checked against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from model.config import load_sizes
from model.variants import VARIANTS, compiles, why_no_graphs
from train.config.arguments import (
    DEFAULT_DEEPSPEED,
    ConfigurationError,
    TrainingArguments,
    find_config,
    load_deepspeed,
)
from train.config.differences import leaves
from train.config.schema import nearest


class Kind(NamedTuple):
    """What a key takes."""

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


ANY = Kind("anything", lambda value: True)  # compared with the training arguments
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind("a name or a list of names", _is_name_or_names)
SIZE, COUNT = _whole(1), _whole(0)

RUN = "run on two ranks with other values: same gradients"
RESHARDED = f"{RUN}; tests/reliability/test_world_size.py reshards its checkpoints"
SOURCE = "read in DeepSpeed's source: has no effect on a step here"
FP16 = "read in DeepSpeed's source: the loss scale, which fp16 alone has"
EQUAL = "has to agree with the training arguments"

# Section ("" is the top level) -> key -> what it takes, a Kind or the only values; how it was checked, or why there are
# no others. A key that is a section itself has its path here.
KEYS: dict[str, dict[str, tuple[Kind | tuple[Any, ...], str]]] = {
    "": {
        "train_batch_size": (ANY, EQUAL),
        "train_micro_batch_size_per_gpu": (ANY, EQUAL),
        "gradient_accumulation_steps": (ANY, EQUAL),
        "gradient_clipping": (ANY, EQUAL),
        "communication_data_type": (ANY, EQUAL),
        "gradient_allreduce_op": (("mean",), "a sum is the gradient times the number of ranks"),
        "prescale_gradients": ((False,), "DeepSpeed stops with it at ZeRO 2"),
        "gradient_predivide_factor": ((1, 1.0), "DeepSpeed stops with another one at ZeRO 2 and 3"),
        "zero_allow_untested_optimizer": (FLAG, "the optimizers here are tested ones"),
        "steps_per_print": (SIZE, RUN),
        "wall_clock_breakdown": (FLAG, RUN),
        "memory_breakdown": (FLAG, RUN),
        "dump_state": (FLAG, RUN),
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
        "load_universal": ((False,), "runs resume from their own checkpoints, on any number of ranks")
    },
    "optimizer": {"type": (ANY, EQUAL)},
    "optimizer.params": {
        "lr": (ANY, EQUAL),
        "betas": (ANY, EQUAL),
        "eps": (ANY, EQUAL),
        "weight_decay": (ANY, EQUAL),
        "torch_adam": (FLAG, "chooses an implementation, and is not read here"),
        "fused": (FLAG, "chooses an implementation, and is not read here"),
        "adam_w_mode": ((True,), "false is Adam with L2 regularization"),
    },
    "timers": {},
    "timers.throughput": {"enabled": (FLAG, RUN), "synchronized": (FLAG, RUN)},
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
        "stage3_prefetch_bucket_size": (COUNT, RUN),
        "stage3_param_persistence_threshold": (COUNT, RUN),
        "stage3_model_persistence_threshold": (COUNT, RUN),
        "stage3_max_live_parameters": (COUNT, RUN),
        "stage3_max_reuse_distance": (COUNT, RUN),
        "stage3_gather_16bit_weights_on_model_save": (FLAG, SOURCE),
        "load_from_fp32_weights": ((True,), "with false a resume loses the float32 weights"),
        "elastic_checkpoint": ((False,), "nothing can load its checkpoints"),
        "offload_optimizer": (
            (None, {"device": "none"}),
            "offloading is not supported; precision.optimizer_states packs the states, ZeRO shares them",
        ),
        "offload_param": (
            (None, {"device": "none"}),
            "offloading is not supported; ZeRO 3 shares the weights between ranks",
        ),
    },
    "zero_optimization.leaf_module": {
        "classes": (NAMES, "ds_config_zero3.json"),
        "names": (NAMES, "as classes"),
        "name_suffixes": (NAMES, "as classes"),
    },
}
# What stands for some of the others.
INSTEAD = {
    "scheduler": "lr_scheduler_type and warmup_steps of the training configuration",
    "wandb": 'report_to "wandb" of the training configuration',
    "tensorboard": 'report_to "tensorboard" of the training configuration',
    "csv_monitor": "metrics.jsonl, which every run writes",
    "activation_checkpointing": "gradient_checkpointing of the training configuration",
    "torch_autocast": "the section precision of the training configuration",
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "precision.optimizer_states, or a higher ZeRO stage",
    "zero_optimization.cpu_offload_param": "ZeRO 3",
    "zero_optimization.zenflow": "precision.optimizer_states, or a higher ZeRO stage",
    "zero_optimization.zero_quantized_gradients": "precision.gradient_communication, bf16 or fp32",
}


def resolve_ds_config(arguments: TrainingArguments, world_size: int) -> dict[str, Any]:
    """Return the configuration for deepspeed.initialize on `world_size` ranks, without "auto" and `optimizer` section.

    Raises ConfigurationError: every unsupported key or value and every contradiction, in one message, which names the
    file where `arguments` are not resolved yet.
    """
    given = arguments.deepspeed
    arguments = arguments.resolve(world_size)
    config = load_deepspeed(arguments.deepspeed)
    config.pop("msamp", None)  # resolved
    problems = _key_problems(config)
    problems += _fill(config, _expected(arguments, world_size))
    problems += _take_optimizer(config, arguments)
    problems += _state_problems(config, arguments)
    problems += _zero_problems(config, arguments)
    # unless the user turned it on: they wait for the device every micro-batch
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    config.setdefault("wall_clock_breakdown", False)
    problems += [
        f'{key}: "auto" cannot be filled in here; give a value or remove the key'
        for key, value in leaves(config).items()
        if value == "auto"
    ]
    if problems:
        plural = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        source = "the section deepspeed"
        if not isinstance(given, dict):
            source = str(find_config(DEFAULT_DEEPSPEED if given is None else given, "deepspeed"))
        raise ConfigurationError(f"{source}: the DeepSpeed configuration has {plural}:", problems=problems)
    return config


def _key_problems(config: dict[str, Any], section: str = "") -> list[str]:
    """Remove what is not in KEYS from `config`, or has a value that it does not take; a line for each."""
    problems, known = [], KEYS[section]
    for key, value in list(config.items()):
        path = f"{section}.{key}" if section else key
        if path in KEYS:
            if isinstance(value, dict):
                problems += _key_problems(value, path)
                continue
            problems.append(f"{path}: {json.dumps(value)} is given, an object is expected")
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
                else nearest(key, elsewhere or [*known, *sections])
            )
            if not use:
                use = f"; supported are {', '.join(sorted([*known, *sections]))}"
            problems.append(f"{path}: this key is not supported{use}; remove it")
        del config[key]
    return problems


def _expected(arguments: TrainingArguments, world_size: int) -> dict[str, tuple[Any, str]]:
    """DeepSpeed key -> (value, which training arguments say so)."""
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
        # always written: DeepSpeed's own default is to clip at 1.0
        "gradient_clipping": (arguments.max_grad_norm, "max_grad_norm"),
        "bf16.enabled": (compute in ("fp8", "bf16"), f"precision.compute {compute}"),
        "fp16.enabled": (compute == "fp16", f"precision.compute {compute}"),
    }


def _fill(config: dict[str, Any], expected: dict[str, tuple[Any, str]]) -> list[str]:
    """Set each expected value where there is "auto" or nothing; problems where there is another."""
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
                f"{key}: {json.dumps(section[name])} contradicts the training configuration, where {source} "
                f'makes it {json.dumps(value)}; change one of them, or write "auto"'
            )
    return problems


def _take_optimizer(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    """Remove the optimizer section: it is built from the arguments; problems where this says something else."""
    optimizer = config.pop("optimizer", None)
    if optimizer is None:
        return []
    problems = []
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if arguments.optim == "muon" or str(kind).lower() == "muon":
        return [
            f"optimizer: the section has the type {json.dumps(kind)}, and Muon is asked for, and set, in the training "
            'configuration alone: optim "muon"; remove the section'
        ]
    if str(kind).lower() not in ("adam", "adamw"):
        problems.append(
            f"optimizer.type: {json.dumps(kind)} is not supported, only AdamW is; remove the section"
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


def _why_no_recomputation(zero: dict[str, Any], arguments: TrainingArguments) -> str | None:
    """At ZeRO 3; None where it goes. A module within a layer frees its weights after the layer's second forward, of
    which Transformer Engine's recomputation still has the backward to come."""
    if not (arguments.gradient_checkpointing and VARIANTS[arguments.model.variant].te):
        return None
    fused = "Fused" if arguments.speed.fused_rope else ""
    layer = {"te_linear": "MistralDecoderLayer", "te_layer": f"{fused}TransformerLayer"}[
        arguments.model.variant
    ]
    leaf = zero.get("leaf_module", {})
    classes = leaf.get("classes") or []
    named = classes if isinstance(classes, list) else [classes]
    found = any(name.rpartition(".")[2] == layer for name in named)
    if leaf.get("names") or leaf.get("name_suffixes") or found:
        return None
    return (
        "zero_optimization.leaf_module: with gradient_checkpointing ZeRO 3 has to gather a layer's weights at once, or "
        f'they are gone before its backward; add "leaf_module": {{"classes": ["{layer}"]}}, as in ds_config_zero3.json'
    )


def _zero_problems(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    zero, problems = config.setdefault("zero_optimization", {"stage": 0}), []
    stage = zero.setdefault("stage", 0)
    model = arguments.model
    if stage == 3 and compiles(model.variant, arguments.precision, model.compile):
        problems.append(
            "zero_optimization.stage: ZeRO 3 gathers weights in hooks that torch.compile cannot trace; use stage 0, "
            "1 or 2, or set model.compile to false"
        )
    if stage == 3 and (no_recomputation := _why_no_recomputation(zero, arguments)):
        problems.append(no_recomputation)
    if arguments.speed.cuda_graphs and (no_graphs := why_no_graphs(model.variant, zero_stage=stage)):
        problems.append(f"zero_optimization.stage: {no_graphs}")
    if stage == 0 and arguments.precision.compute == "fp16":
        problems.append(
            "zero_optimization.stage: without ZeRO DeepSpeed 0.19.8 does not scale fp16's loss, and divides its "
            "gradients as if it did; use stage 1, 2 or 3, or set precision.compute to bf16"
        )
    # DeepSpeed stops without ZeRO where gradients accumulate in another type than the parameters'
    dtype = {"fp8": "bf16"}.get(arguments.precision.compute, arguments.precision.compute)
    accumulate = config.get("data_types", {}).get("grad_accum_dtype")
    if accumulate not in (None, dtype, "fp32"):
        problems.append(
            f"data_types.grad_accum_dtype: {json.dumps(accumulate)} is given, fp32 or the weights' {dtype} is expected"
        )
    elif stage == 0 and accumulate not in (None, dtype):
        problems.append(
            f"data_types.grad_accum_dtype: ZeRO 0 accumulates in the parameters' {dtype}, not in "
            f"{json.dumps(accumulate)}; remove it or use ZeRO 1"
        )
    if arguments.optim == "muon":
        if no_muon := _why_no_muon(stage, dtype, accumulate):
            problems.append(no_muon)
        if (states := arguments.precision.optimizer_states) != "fp32":
            problems.append(
                f'precision.optimizer_states {states}: it packs what AdamW keeps; with optim "muon" set it to fp32'
            )
    _fill_sizes(zero, arguments)
    return problems


def _state_problems(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    """What AdamW's states and the ranks' communication cannot be at this ZeRO stage; sets the latter."""
    precision, problems = arguments.precision, []
    zero, types = config.get("zero_optimization", {}), config.get("data_types", {})
    stage, accumulate = zero.get("stage", 0), types.get("grad_accum_dtype")
    if (states := precision.optimizer_states) != "fp32":
        key = f"precision.optimizer_states {states}"
        if stage != 1 or accumulate != "fp32":
            why = {
                0: "without ZeRO DeepSpeed keeps float32 weights, one a parameter, and float32 copies of gradients",
                1: "without data_types.grad_accum_dtype fp32 ZeRO 1 keeps gradients and weights otherwise",
                2: "ZeRO 2 cuts gradients while it adds them up, into the optimizer's own float32 weights",
                3: "ZeRO 3 makes the weights anew from float32 ones that each rank has a part of",
            }.get(stage, "there is no such stage")
            problems.append(
                f"{key}: {why}; it works at ZeRO 1 with data_types.grad_accum_dtype fp32 (deepspeed: "
                "ds_config_zero1.json), on one rank too. Use that, or set it to fp32"
            )
    if (asked := precision.gradient_communication) or "communication_data_type" in config:
        problems += _fill(config, {"communication_data_type": (asked, "precision.gradient_communication")})
    return problems


def _why_no_muon(stage: int, dtype: str, accumulate: str | None) -> str | None:
    """Where DeepSpeed 0.19.8's Muon is none, as a problem; None: it is one."""
    if dtype == "fp16":
        return 'precision.compute: with optim "muon" fp16 is not supported; use bf16 or fp8'
    if stage == 0 or (stage == 1 and dtype == "bf16" and accumulate == "fp32"):
        return None
    what, instead = f"ZeRO {stage}", "stage 1 with data_types.grad_accum_dtype fp32 (ds_config_zero1.json)"
    if dtype == "fp32":
        what, instead = f"ZeRO {stage} in float32", "stage 0, or precision.compute bf16"
    elif stage == 1:
        what = "ZeRO 1 without float32 accumulation"
    return (
        f'zero_optimization.stage: with optim "muon" {what} is not supported: DeepSpeed 0.19.8 orthogonalizes fused '
        "matrices there as one, and clips the orthogonalized update, whose norm is the one that is logged, instead of "
        f"the gradient; use {instead}"
    )


def _fill_sizes(zero: dict[str, Any], arguments: TrainingArguments) -> None:
    """ZeRO's sizes (elements) that are "auto", by the model's hidden size as transformers does."""
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
