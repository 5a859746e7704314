"""Check the DeepSpeed configuration of a run, and replace "auto" by values from the training arguments.

Only the keys in KEYS are accepted. They were checked with DeepSpeed 0.19.8.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from model.variants import VARIANTS, compiles, cuda_graphs_problem
from train.config.arguments import TrainingArguments, raise_problems
from train.config.schema import flatten, suggest


class Kind(NamedTuple):
    """The allowed values of a DeepSpeed key, described in words and as a predicate."""

    words: str
    accepts: Callable[[Any], bool]


def _integer(least: int) -> Kind:
    return Kind(
        f"an integer of at least {least}",
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and value >= least
            and value == int(value)
        ),
    )


def _one_of(*values: Any) -> Kind:
    texts = [json.dumps(value) for value in values]
    return Kind(" or ".join(texts), lambda value: json.dumps(value) in texts)


ANY = Kind("anything", lambda value: True)  # the value is compared with the training arguments
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind(
    "a name or a list of names",
    lambda value: all(isinstance(name, str) for name in (value if isinstance(value, list) else [value])),
)
SIZE, COUNT = _integer(1), _integer(0)

# How each key was checked
RUN = "tested with several values on two ranks: the gradients do not change"
RESHARDED = f"{RUN}; tests/reliability/test_world_size.py reshards checkpoints written with this key"
SOURCE = "according to DeepSpeed's source, this key does not affect the training step"
FP16 = "according to DeepSpeed's source, this key affects only the fp16 loss scale"
EQUAL = "must agree with the training arguments"
REPORTS = "tested with several values on two ranks: only DeepSpeed's reports change"
GATHERS = "tested with several values on two ranks: only the time at which ZeRO 3 gathers weights changes"
IGNORED = "selects an optimizer implementation and is ignored"
OFFLOADS = "tested on two ranks, also switched in a resume: results change only by rounding"
# The values of keys with one of these remarks may change when a run resumes.
FREE = (EQUAL, REPORTS, GATHERS, IGNORED, OFFLOADS)

# Maps each supported dotted key to its allowed values and a remark. The remark states how the key was checked, or why
# other values are not allowed.
KEYS: dict[str, tuple[Kind, str]] = {
    "train_batch_size": (ANY, EQUAL),
    "train_micro_batch_size_per_gpu": (ANY, EQUAL),
    "gradient_accumulation_steps": (ANY, EQUAL),
    "gradient_clipping": (ANY, EQUAL),
    "communication_data_type": (ANY, EQUAL),
    "gradient_allreduce_op": (_one_of("mean"), "a sum multiplies the gradient by the number of ranks"),
    "prescale_gradients": (_one_of(False), "DeepSpeed fails with true at ZeRO 2"),
    "gradient_predivide_factor": (_one_of(1, 1.0), "DeepSpeed fails with other values at ZeRO 2 and 3"),
    "zero_allow_untested_optimizer": (FLAG, "this project tests the optimizers that it uses"),
    "zero_force_ds_cpu_optimizer": (FLAG, IGNORED),
    "steps_per_print": (SIZE, REPORTS),
    "wall_clock_breakdown": (FLAG, REPORTS),
    "memory_breakdown": (FLAG, REPORTS),
    "dump_state": (FLAG, REPORTS),
    "bf16.enabled": (ANY, EQUAL),
    "fp16.enabled": (ANY, EQUAL),
    "fp16.loss_scale": (COUNT, FP16),
    "fp16.initial_scale_power": (COUNT, FP16),
    "fp16.loss_scale_window": (SIZE, FP16),
    "fp16.hysteresis": (SIZE, FP16),
    "fp16.min_loss_scale": (SIZE, FP16),
    "data_types.grad_accum_dtype": (
        _one_of("fp32", "bf16", "fp16"),
        "tests/train/preflight/test_gradients.py",
    ),
    "checkpoint.load_universal": (
        _one_of(False),
        "runs resume on any number of ranks without universal checkpoints",
    ),
    "optimizer.type": (_one_of("AdamW", "Adam", "adamw", "adam"), EQUAL),
    "optimizer.params.lr": (ANY, EQUAL),
    "optimizer.params.betas": (ANY, EQUAL),
    "optimizer.params.eps": (ANY, EQUAL),
    "optimizer.params.weight_decay": (ANY, EQUAL),
    "optimizer.params.torch_adam": (FLAG, IGNORED),
    "optimizer.params.fused": (FLAG, IGNORED),
    "optimizer.params.adam_w_mode": (_one_of(True), EQUAL),
    "timers.throughput.enabled": (FLAG, REPORTS),
    "timers.throughput.synchronized": (FLAG, REPORTS),
    "zero_optimization.stage": (_one_of(0, 1, 2, 3), "tests/train/test_training.py"),
    "zero_optimization.overlap_comm": (FLAG, RUN),
    "zero_optimization.contiguous_gradients": (FLAG, RUN),
    "zero_optimization.reduce_scatter": (FLAG, RUN),
    "zero_optimization.reduce_bucket_size": (SIZE, RUN),
    "zero_optimization.allgather_bucket_size": (SIZE, RUN),
    "zero_optimization.allgather_partitions": (FLAG, SOURCE),
    "zero_optimization.use_multi_rank_bucket_allreduce": (FLAG, RUN),
    "zero_optimization.round_robin_gradients": (FLAG, RESHARDED),
    "zero_optimization.parameter_alignment": (FLAG, RESHARDED),
    "zero_optimization.sub_group_size": (SIZE, RESHARDED),
    "zero_optimization.stage3_prefetch_bucket_size": (COUNT, GATHERS),
    "zero_optimization.stage3_param_persistence_threshold": (COUNT, GATHERS),
    "zero_optimization.stage3_model_persistence_threshold": (COUNT, RUN),
    "zero_optimization.stage3_max_live_parameters": (COUNT, RUN),
    "zero_optimization.stage3_max_reuse_distance": (COUNT, RUN),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (FLAG, SOURCE),
    "zero_optimization.load_from_fp32_weights": (
        _one_of(True),
        "with false, a resume loses the float32 weights",
    ),
    "zero_optimization.elastic_checkpoint": (
        _one_of(False),
        "checkpoints written with true cannot be loaded",
    ),
    "zero_optimization.offload_optimizer.device": (_one_of("none", "cpu"), OFFLOADS),
    "zero_optimization.offload_optimizer.pin_memory": (FLAG, OFFLOADS),
    "zero_optimization.offload_param": (
        _one_of(None, {"device": "none"}),
        "parameters cannot be offloaded; to save GPU memory, use ZeRO 3 or offload_optimizer",
    ),
    "zero_optimization.leaf_module.classes": (NAMES, GATHERS),
    "zero_optimization.leaf_module.names": (NAMES, GATHERS),
    "zero_optimization.leaf_module.name_suffixes": (NAMES, GATHERS),
}
SECTIONS = {"timers", *(key.rpartition(".")[0] for key in KEYS)} - {""}
# Maps unsupported keys to their replacement.
REPLACEMENTS = {
    "scheduler": "lr_scheduler_type and warmup_steps in the training configuration",
    "wandb": 'report_to "wandb" in the training configuration',
    "tensorboard": 'report_to "tensorboard" in the training configuration',
    "csv_monitor": "metrics.jsonl, which every run writes",
    "activation_checkpointing": "gradient_checkpointing in the training configuration",
    "torch_autocast": "the section precision in the training configuration",
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "ZeRO 3",
    "zero_optimization.zenflow": "zero_optimization.offload_optimizer",
    "zero_optimization.zero_quantized_gradients": "precision.gradient_communication with bf16 or fp32",
}


def resolve_ds_config(
    arguments: TrainingArguments, sizes: Any, world_size: int, source: str = "deepspeed"
) -> dict[str, Any]:
    """Return the configuration for deepspeed.initialize.

    The "auto" values are replaced, and the `optimizer` section is removed.

    Args:
        arguments: The training arguments, resolved for `world_size` ranks.
        sizes: The model configuration.
        world_size: The number of ranks.
        source: The name of the DeepSpeed configuration for error messages.

    Raises:
        ConfigurationError: The configuration has unsupported keys or values, or contradicts the training arguments. The
            message lists all problems.
    """
    assert isinstance(arguments.deepspeed, dict), "call resolve_arguments first"
    config = copy.deepcopy(arguments.deepspeed)
    problems = _remove_unsupported(config)
    if arguments.optim == "muon" and "optimizer" in config:
        problems.append(
            "optimizer: Muon is configured in the training configuration, not in the DeepSpeed "
            "configuration; remove this section"
        )
    else:
        problems += _fill(config, _expected(arguments, world_size))
    config.pop("optimizer", None)
    if (asked := arguments.precision.gradient_communication) or "communication_data_type" in config:
        problems += _fill(config, {"communication_data_type": (asked, "precision.gradient_communication")})
    config.setdefault("zero_optimization", {}).setdefault("stage", 0)
    problems += _combination_problems(config, arguments)
    _fill_sizes(config["zero_optimization"], sizes.hidden_size)
    # off by default, because these timers wait for the GPU in every micro-batch
    config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    config.setdefault("wall_clock_breakdown", False)
    if arguments.optim == "muon" and config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed refuses true
    if offloads_optimizer(config):  # torch's AdamW runs on the CPU, so DeepSpeed's need not be compiled
        config["zero_force_ds_cpu_optimizer"] = False
    problems += [
        f'{key}: "auto" is not supported for this key; set a value or remove the key'
        for key, value in flatten(config).items()
        if value == "auto"
    ]
    raise_problems(source, problems)
    return config


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration keeps the optimizer states in host memory."""
    return (config["zero_optimization"].get("offload_optimizer") or {}).get("device") == "cpu"


def _remove_unsupported(config: dict[str, Any], section: str = "") -> list[str]:
    """Remove unsupported keys and values from a DeepSpeed configuration. Return one problem per removed key."""
    problems = []
    for key, value in list(config.items()):
        path = f"{section}.{key}".lstrip(".")
        if "." in key:
            problems.append(
                f"{key}: DeepSpeed keys cannot contain dots. Write each section as a nested object"
            )
        elif path in SECTIONS and isinstance(value, dict):
            problems += _remove_unsupported(value, path)
        elif problem := _key_problem(path, value):
            problems.append(f"{path}: {problem}")
            del config[key]
    return problems


def _key_problem(path: str, value: Any) -> str:
    """Return why a DeepSpeed key is not supported with this value, or "" if it is supported."""
    if path == "zero_optimization.offload_optimizer" and value is None:
        return ""
    if path in SECTIONS:
        return f"the value is {json.dumps(value)}, but it must be an object"
    if path not in KEYS:
        use = f" (use {REPLACEMENTS[path]})" if path in REPLACEMENTS else suggest(path, [*KEYS, *SECTIONS])
        return f"this key is not supported{use}; remove this key"
    allowed, remark = KEYS[path]
    if allowed.accepts(value) or value == "auto":
        return ""
    return f"{json.dumps(value)} is not supported; use {allowed.words}, or remove this key (remark: {remark})"


def _expected(arguments: TrainingArguments, world_size: int) -> dict[str, tuple[Any, str]]:
    """Return the DeepSpeed values that the training arguments determine.

    Returns:
        A dictionary from each dotted DeepSpeed key to its value and the training arguments that determine the value.
    """
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
        "optimizer.params.lr": (arguments.learning_rate, "learning_rate"),
        "optimizer.params.betas": (
            [arguments.adam_beta1, arguments.adam_beta2],
            "adam_beta1 and adam_beta2",
        ),
        "optimizer.params.eps": (arguments.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (arguments.weight_decay, "weight_decay"),
    }


def _fill(config: dict[str, Any], expected: dict[str, tuple[Any, str]]) -> list[str]:
    """Fill in expected values where a DeepSpeed configuration has "auto" or no value.

    Args:
        config: The DeepSpeed configuration, which is modified.
        expected: Maps each dotted key to its value and the training arguments that determine this value.

    Returns:
        One problem per value in `config` that contradicts the expected value.
    """
    problems = []
    for path, (value, source) in expected.items():
        *sections, name = path.split(".")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
        if target.get(name, "auto") == "auto":
            target[name] = value
        elif target[name] != value:
            problems.append(
                f"{path}: the value {json.dumps(target[name])} contradicts {source} in the training "
                f"configuration, which requires {json.dumps(value)}; change one of the two, or set this key "
                'to "auto"'
            )
    return problems


def _layer_freed_early(zero: dict[str, Any], arguments: TrainingArguments) -> str:
    """Return the name of the decoder layer class to add to ZeRO 3's leaf modules, or "" if none is missing.

    With gradient checkpointing, ZeRO 3 frees the weights of each module after the recomputed forward pass. However,
    Transformer Engine's backward pass still needs these weights. ZeRO 3 frees the weights of a leaf module only after
    the backward pass of the whole module.
    """
    variant, leaf = arguments.model.variant, zero.get("leaf_module", {})
    if not (arguments.gradient_checkpointing is True and VARIANTS[variant].te):
        return ""
    layer = {"te_linear": "MistralDecoderLayer", "te_layer": "FusedTransformerLayer"}[variant]
    is_named = leaf.get("names") or leaf.get("name_suffixes") or layer in json.dumps(leaf.get("classes"))
    return "" if is_named else layer


def _combination_problems(config: dict[str, Any], arguments: TrainingArguments) -> list[str]:
    """Return the unsupported combinations of ZeRO stage, data types and optimizer, one line per problem."""
    zero = config["zero_optimization"]
    stage, accumulate = zero["stage"], config.get("data_types", {}).get("grad_accum_dtype")
    precision, model, muon = arguments.precision, arguments.model, arguments.optim == "muon"
    dtype = {"fp8": "bf16"}.get(precision.compute, precision.compute)  # dtype of the weights
    in_float32 = accumulate == "fp32"
    zero_1_in_float32 = stage == 1 and in_float32
    # without ZeRO, DeepSpeed fails unless gradients accumulate in the data type of the weights
    types = {None, dtype} if stage == 0 else {None, dtype, "fp32"}
    layer = _layer_freed_early(zero, arguments) if stage == 3 else ""
    no_graphs = arguments.speed.cuda_graphs and cuda_graphs_problem(model.variant, zero_stage=stage)
    packed = precision.optimizer_states != "fp32"
    states = f"precision.optimizer_states {precision.optimizer_states}"
    offloads = offloads_optimizer(config)
    rules: list[tuple[object, str]] = [  # (whether the combination is unsupported, the problem)
        (
            stage == 3 and compiles(model.variant, precision, model.compile),
            "zero_optimization.stage: torch.compile cannot trace the hooks in which ZeRO 3 gathers weights; use stage "
            "0, 1 or 2, or set model.compile to false",
        ),
        (
            layer,
            "zero_optimization.leaf_module: with gradient_checkpointing true, ZeRO 3 must gather all weights of a "
            f'layer together; add "leaf_module": {{"classes": ["{layer}"]}}, as in ds_config_zero3.json',
        ),
        (no_graphs, f"zero_optimization.stage: {no_graphs}"),
        (
            precision.fp8_weight_gather and stage != 3,
            f"zero_optimization.stage: precision.fp8_weight_gather needs stage 3, because ZeRO {stage} does not gather "
            "weights in each pass; set deepspeed to ds_config_zero3.json, or remove fp8_weight_gather",
        ),
        (
            stage == 0 and dtype == "fp16",
            "zero_optimization.stage: fp16 is not supported at stage 0, where DeepSpeed 0.19.8 divides the gradients "
            "by the loss scale without scaling the loss; use stage 1, 2 or 3, or set precision.compute to bf16",
        ),
        (
            accumulate not in types,
            f"data_types.grad_accum_dtype: {json.dumps(accumulate)} is not supported with ZeRO {stage} and {dtype} "
            f"weights; use {' or '.join(sorted(filter(None, types)))}",
        ),
        (
            muon and dtype == "fp16",
            'precision.compute: optim "muon" does not support fp16; set precision.compute to bf16 or fp8',
        ),
        (
            muon and dtype != "fp16" and stage != 0 and not (in_float32 and dtype == "bf16"),
            'zero_optimization.stage: optim "muon" needs stage 0, or stage 1, 2 or 3 with data_types.grad_accum_dtype '
            "fp32 and precision.compute bf16 or fp8, as in ds_config_zero1.json. In other settings, DeepSpeed 0.19.8 "
            "does not orthogonalize gradients",
        ),
        (
            offloads and stage < 2,
            f"zero_optimization.offload_optimizer: ZeRO {stage} does not support offloading, because DeepSpeed's "
            "BF16_Optimizer keeps its states on the GPU; use stage 2 or 3, or remove this key",
        ),
        (
            offloads and stage >= 2 and not (dtype == "bf16" and in_float32),
            "zero_optimization.offload_optimizer: offloading is not supported with precision.compute "
            f"{precision.compute} and data_types.grad_accum_dtype {json.dumps(accumulate)}; set compute to bf16 or fp8 "
            "and grad_accum_dtype to fp32, as in ds_config_zero2.json, or remove this key",
        ),
        (
            offloads and muon,
            'zero_optimization.offload_optimizer: offloading is not supported with optim "muon", which orthogonalizes '
            "matrices on the GPU; set optim to adamw, or remove this key",
        ),
        (
            packed and muon,
            f'{states}: packed optimizer states are not supported with optim "muon"; set optimizer_states to fp32',
        ),
        (
            packed and not zero_1_in_float32,
            f"{states}: packed optimizer states need ZeRO 1 with data_types.grad_accum_dtype fp32, even on a single "
            "rank; set deepspeed to ds_config_zero1.json, or set optimizer_states to fp32",
        ),
    ]
    return [problem for is_unsupported, problem in rules if is_unsupported]


def _fill_sizes(zero: dict[str, Any], hidden: int) -> None:
    """Replace "auto" bucket sizes with values derived from the hidden size.

    The sizes are in elements. The transformers library uses the same values.
    """
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    if autos := [key for key in keys if zero.get(key) == "auto"]:
        sizes = dict(zip(keys, (hidden**2, int(0.9 * hidden**2), 10 * hidden), strict=True))
        zero.update((key, sizes[key]) for key in autos)
