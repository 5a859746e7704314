"""The DeepSpeed configuration that is really used: the user's, with "auto" filled in from the arguments.

DeepSpeed ignores top-level keys that it does not know, and those of some sections; here they are errors, as are those
that mean nothing here, and whatever contradicts the training arguments. Checked against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
import math
from typing import Any

from model.config import load_sizes
from model.variants import VARIANTS, compiles, why_no_graphs
from train.config.arguments import ConfigurationError, TrainingArguments, load_deepspeed
from train.config.differences import leaves
from train.config.schema import nearest

# The top-level keys of DeepSpeed that mean something in this trainer. It reads others too (pipelines, tensor
# parallelism, its own schedules and samplers, ...), which would be without effect here or break a run.
KNOWN_KEYS = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping "
    "bf16 fp16 zero_optimization optimizer zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "data_types communication_data_type prescale_gradients gradient_predivide_factor "
    "gradient_allreduce_op disable_allgather disable_python_gc steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state timers comms_logger flops_profiler tensorboard csv_monitor "
    "checkpoint log_level vocabulary_size".split()
)
# What stands for some of the others: a key of the training configuration, or DeepSpeed's other name.
INSTEAD = {
    "scheduler": "lr_scheduler_type and warmup_steps of the training configuration",
    "wandb": 'report_to "wandb" of the training configuration',
    "activation_checkpointing": "gradient_checkpointing of the training configuration",
    "torch_autocast": "the section precision of the training configuration",
    "bfloat16": "bf16, as its name is here",
}

# Sections whose unknown keys DeepSpeed ignores (the others it checks itself).
SECTION_KEYS = {
    "data_types": ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "timers": ("throughput",),
    "checkpoint": ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
}

OFFLOAD_KEYS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")

# "auto" values that DeepSpeed itself understands
NATIVE_AUTO = ("data_types.keep_in_fp32_modules",)


def resolve_ds_config(arguments: TrainingArguments, world_size: int) -> dict[str, Any]:
    """The configuration to give to deepspeed.initialize on `world_size` ranks, without "auto" and `optimizer` section.

    Raises ConfigurationError: every unknown or unsupported key, every contradiction, in one message.
    """
    arguments = arguments.resolve(world_size)
    config = load_deepspeed(arguments.deepspeed)
    config.pop("msamp", None)  # resolved
    problems = _key_problems(config)
    for key in ("bf16", "fp16", "zero_optimization", "optimizer", *SECTION_KEYS):
        if key in config and not isinstance(config[key], dict):
            problems.append(f"{key}: {json.dumps(config[key])} is given, an object is expected")
            del config[key]  # so that the rest can be checked
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
        if value == "auto" and key not in NATIVE_AUTO
    ]
    if problems:
        plural = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise ConfigurationError("\n  ".join([f"the DeepSpeed configuration has {plural}:", *problems]))
    return config


def _key_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    for key in [key for key in config if key not in KNOWN_KEYS]:
        near = f" (use {INSTEAD[key]})" if key in INSTEAD else nearest(key, KNOWN_KEYS)
        problems.append(
            f"{key}: not supported here{near or ', only ' + ', '.join(sorted(KNOWN_KEYS))}; remove it"
        )
    for section, known in SECTION_KEYS.items():
        if isinstance(config.get(section), dict):
            problems += [
                f"{section}.{key}: DeepSpeed has no such key and would ignore it{nearest(key, known)}"
                for key in config[section]
                if key not in known
            ]
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
    if str(kind).lower() not in ("adam", "adamw") or params.get("adam_w_mode") is False:
        problems.append(
            f"optimizer.type: {json.dumps(kind)} is not supported, only AdamW is; remove the section"
        )
    # fused and torch_adam choose an implementation, not other numbers
    expected = {
        "lr": (arguments.learning_rate, "learning_rate"),
        "betas": ([arguments.adam_beta1, arguments.adam_beta2], "adam_beta1 and adam_beta2"),
        "eps": (arguments.adam_epsilon, "adam_epsilon"),
        "weight_decay": (arguments.weight_decay, "weight_decay"),
    }
    for name in params.keys() - expected.keys() - {"torch_adam", "adam_w_mode", "fused"}:
        problems.append(f"optimizer.params.{name}: not supported{nearest(name, expected)}; remove it")
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
    leaf = zero.get("leaf_module")
    leaf = leaf if isinstance(leaf, dict) else {}
    classes = leaf.get("classes") or []
    named = classes if isinstance(classes, list) else [classes]
    found = any(str(name).rpartition(".")[2] == layer for name in named)
    if leaf.get("names") or leaf.get("name_suffixes") or found:
        return None
    return (
        "zero_optimization.leaf_module: with gradient_checkpointing ZeRO 3 has to gather a layer's weights at once, or "
        f'they are gone before its backward; add "leaf_module": {{"classes": ["{layer}"]}}, as in ds_config_zero3.json'
    )


def _zero_problems(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    zero, problems = config.setdefault("zero_optimization", {"stage": 0}), []
    stage = zero.setdefault("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage: {json.dumps(stage)} is given, 0, 1, 2 or 3 is expected")
    for key in OFFLOAD_KEYS:
        given = zero.get(key)
        if given not in (None, False) and not (isinstance(given, dict) and given.get("device") == "none"):
            problems.append(
                f"zero_optimization.{key}: offloading is not supported: what lies in host memory is stepped by another "
                "AdamW than the one that is checked here, and checkpoints, resharding and packed states do not know "
                "it; remove it (ZeRO 1 to 3 share the optimizer's memory between ranks, precision.optimizer_states "
                "packs it at ZeRO 1, gradient_checkpointing saves activations; train/plan.py says what fits)"
            )
    if zero.get("zero_quantized_gradients"):
        problems.append(
            "zero_optimization.zero_quantized_gradients: DeepSpeed 0.19.8 reduces gradients in 8 bits at no stage; "
            "with this in 4, at ZeRO 3 between nodes alone, which is not checked here, and elsewhere it does nothing; "
            "remove it. precision.gradient_communication has bf16 and fp32"
        )
    for section, name in (("zero_optimization", "compute_grad_norm"), ("bf16", "check_grad_overflow")):
        if config.get(section, {}).get(name, True) is not True:
            problems.append(
                f"{section}.{name}: {json.dumps(config[section][name])} would have steps taken whose gradients are not "
                "finite; remove it"
            )
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
    if stage == 0 and accumulate not in (None, dtype):
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
        problems += [
            f"bf16.{name}: {json.dumps(config['bf16'][name])} keeps other states than {key}; remove one of them"
            for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
            if config.get("bf16", {}).get(name)
        ]
    if (asked := precision.gradient_communication) is not None:
        given = config.setdefault("communication_data_type", asked)
        if given == "auto":
            config["communication_data_type"] = asked
        elif given != asked:
            problems.append(
                f"communication_data_type: {json.dumps(given)} contradicts the training configuration, where "
                f'precision.gradient_communication is {asked}; change one of them, or write "auto"'
            )
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
    return isinstance(given, int | float) and math.isclose(given, value, rel_tol=1e-12)
