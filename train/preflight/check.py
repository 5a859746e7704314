"""Check a training run before its ranks start and its model is built. All problems are reported in one message.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from model.config import load_sizes, num_parameters
from model.errors import UserError
from model.fp8.hardware import Capability, fp8_gpu_problem, recipe_warning, uses_head_gradients
from model.hf_folder import WeightsError, check_init_from, find_weights
from model.variants import VARIANTS
from train.checkpoint.files import MANIFEST, CheckpointError, RunState, read_state, trained_tokenizer
from train.checkpoint.resume import allowed_changes, checkpoint_to_resume, is_new_run
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.config.load import resolve_arguments
from train.config.schedule import phase_precisions
from train.data.encoder import check_model_tokenizer
from train.data.source import TokenSource, check_fit, check_no_leak, check_same_tokenizer, open_sources
from train.files import nearest_existing_path
from train.monitor.lock import Lock
from train.planning.setting import Setting
from train.preflight.machine import Device
from train.preflight.sizes import check_disk, check_host_memory, check_memory, is_done
from train.record.run_folder import EXPORTED_FROM, RunFolder, export_folder_problem
from train.record.trackers import check_installed

T = TypeVar("T")

# The launcher sets this environment variable for its ranks, so that they do not repeat the check.
CHECKED = "FP8_PREFLIGHT_DONE"
# Training a model with more parameters on a CPU is so slow that it is probably a mistake.
CPU_PARAMETERS = 100e6


class PreflightError(UserError):
    """An error raised if a training run cannot start.

    If there is a single problem, the error has the `code` and `key` of that problem.

    Args:
        problems: All problems that were found, at least one.
    """

    code = "preflight"

    def __init__(self, problems: list[Exception]):
        texts = list(dict.fromkeys(str(problem) for problem in problems))
        first: Any = problems[0]
        if len(texts) == 1:
            super().__init__(texts[0], code=getattr(first, "code", None), key=getattr(first, "key", None))
        else:
            listed = "\n".join([f"The run cannot start because of {len(texts)} problems:", *texts])
            super().__init__(listed.replace("\n", "\n  "))
        self.problems = problems


def check(
    args: TrainingArguments, world_size: int, local_ranks: int, devices: list[Device] | None
) -> list[str]:
    """Check that a training run can start, and return warnings. This function changes no files.

    Args:
        args: The training arguments.
        world_size: The number of ranks in the run.
        local_ranks: The number of ranks on this node.
        devices: The result of `cuda_devices`.

    Raises:
        PreflightError: The run cannot start.
    """
    problems: list[Exception] = []

    def attempt(step: Callable[..., T], *values: Any) -> T | None:
        try:
            return step(*values)
        except (ValueError, UserError, OSError) as error:
            problems.append(error)
            return None

    capability = devices[0].capability if devices else None
    source = args.deepspeed if isinstance(args.deepspeed, str) else "deepspeed"
    sizes: Any = attempt(load_sizes, args.model.config)
    resolved = attempt(resolve_arguments, args, world_size)
    if resolved and resolved.precision.fp8_head_gradients is None:
        # as in resolve_head_gradients, but without loading Transformer Engine
        gpu = capability if resolved.precision.backend != "reference" else None
        supported = gpu is None or uses_head_gradients(gpu)
        resolved = replace(resolved, precision=replace(resolved.precision, fp8_head_gradients=supported))
    ds_config = resolved and sizes and attempt(resolve_ds_config, resolved, sizes, world_size, source)
    train = attempt(open_sources, args.data.sources, "train", args.max_seq_length)
    if train and sizes is not None:
        attempt(check_fit, train, sizes.vocab_size, sizes.max_position_embeddings)
    for folders in (args.data.sources, *({n: f} for n, f in (args.data.eval_sources or {}).items())):
        held_out = attempt(open_sources, folders, "eval", args.max_seq_length)
        if train and held_out:
            attempt(check_same_tokenizer, train[0], held_out[0])
            attempt(check_no_leak, train, held_out)
    attempt(check_output, args)
    attempt(check_installed, args.report_to)
    attempt(check_token, args)
    if sizes is not None and is_new_run(args):
        attempt(check_weights, args, sizes)
    if train and args.model.init_from and is_new_run(args):
        attempt(check_model_tokenizer, train[0].folder, args.model.init_from, "model.init_from")
    if resolved and ds_config:
        attempt(check_resume, resolved, ds_config, world_size, train and train[0])
    problems += contradictions(resolved or args)
    if devices is not None:
        problems += device_problems(args, sizes, local_ranks, len(devices), capability)
    warnings: list[str | None] = []
    if sizes is not None and resolved and ds_config:
        warnings.append(attempt(check_disk, args, sizes, ds_config["zero_optimization"]["stage"]))
        setting = Setting.from_run(resolved, ds_config, sizes, world_size)
        attempt(check_host_memory, setting, local_ranks)
        if devices:
            memory = min(device.memory for device in devices[:local_ranks])
            warnings.append(attempt(check_memory, resolved, setting, memory))
    if capability and args.precision.backend != "reference":
        recipes = {own.recipe for own in phase_precisions(args.precision) if own.compute == "fp8"}
        warnings += [recipe_warning(capability, recipe) for recipe in recipes]
    if problems:
        raise PreflightError(problems)
    return [warning for warning in warnings if warning]


def check_resume(
    args: TrainingArguments, ds_config: dict[str, Any], world_size: int, source: TokenSource | None
) -> None:
    """Check that the run may resume from its checkpoint with the resolved arguments.

    The tokenizer of the data is also compared with the checkpoint. The model and the rest of the data are compared
    later, when the run loads the checkpoint. A damaged checkpoint is ignored, because the run skips it.

    Args:
        source: A source of the training data, or None if the data could not be opened.

    Raises:
        CheckpointError, ConfigurationError: See `checkpoint_to_resume` and `allowed_changes`.
        DataError: The data was prepared with a tokenizer that differs from the tokenizer of the checkpoint.
    """
    path = checkpoint_to_resume(args)
    if path is None:
        return
    try:
        saved = read_state(path)
    except CheckpointError:
        return
    if source and source.manifest.tokenizer_sha256 not in saved.tokenizers:
        check_model_tokenizer(source.folder, trained_tokenizer(path, saved), "data.sources")
    if args.precision.auto:  # the precision is not known before the measurement
        return
    stage = ds_config["zero_optimization"]["stage"]
    now = RunState(
        saved.step, 0, 0, world_size, stage, args.to_dict(), saved.model_config, saved.data_fingerprint
    )
    allowed_changes(now, saved, path, args.allow_changes_on_resume)


def check_weights(args: TrainingArguments, sizes: Any) -> None:
    """Check that the folder model.init_from contains weights that fit the model configuration.

    Raises:
        WeightsError: The weights are missing or do not fit the model.
    """
    if args.model.init_from is None:
        return
    check_init_from(args.model.init_from, sizes)
    try:
        find_weights(args.model.init_from, sizes)
    except WeightsError as error:
        raise WeightsError(f"model.init_from: {error}", code=error.code, key="model.init_from") from error


def check_output(args: TrainingArguments) -> None:
    """Check that the run can write to its output_dir.

    Raises:
        ConfigurationError: The folder is not writable, or contains something other than a training run.
        LockError: Another run uses the folder.
    """
    folder, key = RunFolder(args.output_dir), "output_dir"
    if (folder.path / MANIFEST).is_file() or (folder.path / EXPORTED_FROM).is_file():
        raise ConfigurationError(
            f'output_dir "{args.output_dir}" is a checkpoint, an exported model or prepared data, not the folder of a '
            "run. Choose another output_dir. To resume from a checkpoint, pass the checkpoint as "
            "--resume_from_checkpoint",
            key=key,
        )
    saves = args.save_strategy != "no" and not is_done(args, folder)
    parts = [folder.metrics, *([folder.checkpoints, folder.hf] if saves else [])]
    places = [nearest_existing_path(folder.path), *(part for part in parts if part.exists())]
    if locked := [str(place) for place in places if not os.access(place, os.W_OK | os.X_OK * place.is_dir())]:
        raise ConfigurationError(
            f'output_dir "{args.output_dir}": {", ".join(locked)} cannot be written by this user; change the '
            "permissions, or choose another folder",
            key=key,
        )
    if saves and (reason := export_folder_problem(folder.hf)):
        raise ConfigurationError(
            f'output_dir "{args.output_dir}": {reason}, but the run exports its final model to this folder. '
            "Move the folder, or choose another output_dir",
            key=key,
        )
    Lock(folder.lock).check_unlocked()


def check_token(args: TrainingArguments) -> None:
    """Check that the access token for push_to_hub is set.

    Raises:
        ConfigurationError: The environment variable HF_TOKEN is missing.
    """
    if args.push_to_hub and not os.environ.get("HF_TOKEN"):
        raise ConfigurationError(
            "push_to_hub needs an access token. Set the environment variable HF_TOKEN to the token",
            key="push_to_hub",
        )


def device_problems(
    args: TrainingArguments, sizes: Any, local_ranks: int, devices: int, capability: Capability | None = None
) -> list[Exception]:
    """Return an error for each setting that the GPUs of this node do not support.

    Args:
        args: The training arguments.
        sizes: The model configuration, or None if it could not be loaded.
        local_ranks: The number of ranks on this node.
        devices: The number of visible CUDA devices.
        capability: The compute capability of the first device.
    """
    te, backend, attention = (
        VARIANTS[args.model.variant].te,
        args.precision.backend,
        args.model.attention_backend,
    )
    none = "this node has no visible CUDA device"
    too_large = sizes is not None and backend != "reference" and num_parameters(sizes) > CPU_PARAMETERS
    fp8_recipes = {own.recipe for own in phase_precisions(args.precision) if own.compute == "fp8"}
    no_fp8 = [
        reason
        for recipe in fp8_recipes
        if capability and backend != "reference" and not args.precision.auto
        if (reason := fp8_gpu_problem("the GPU", capability, recipe))
    ]
    problems = [
        ("precision.recipe", no_fp8, "; ".join(no_fp8)),
        (
            "ranks",
            0 < devices < local_ranks,
            f"{local_ranks} ranks would start on this node, but it has {devices} CUDA devices, and each rank needs "
            f"one. Start {devices} ranks (--nproc, or NPROC for run_training.sh), or check CUDA_VISIBLE_DEVICES. With "
            "srun, use --gpus-per-node instead of --gpus-per-task, so that every task sees all GPUs of its node",
        ),
        (
            "model.config",
            not devices and too_large,
            f"model.config {args.model.config}: the model has {num_parameters(sizes) / 1e6 if sizes else 0:,.0f} M "
            f"parameters, and {none}. Check nvidia-smi and CUDA_VISIBLE_DEVICES. To train slowly on the CPU, pass "
            "--precision.backend reference",
        ),
        (
            "precision.backend",
            not devices and te and backend == "transformer_engine",
            f'precision.backend "transformer_engine" needs a GPU, and {none}. Set precision.backend to auto or '
            "reference",
        ),
        (
            "precision.compute",
            not devices and args.precision.compute == "fp16",
            f'precision.compute "fp16" needs a GPU, and {none}. Set precision.compute to bf16 or fp32',
        ),
        (
            "model.attention_backend",
            te and attention != "auto" and (not devices or backend == "reference"),
            f'model.attention_backend "{attention}" needs Transformer Engine on a GPU, but this run uses the reference '
            "implementation, which supports only torch's attention. Set model.attention_backend to auto",
        ),
    ]
    return [ConfigurationError(text, key=key) for key, found, text in problems if found]


# ---------------------------------------------------------------- accelerate

# Training uses only the configuration of the run, so a different setting in accelerate would be ignored silently.
# accelerate 1.15 passes its settings to the processes that it starts as environment variables
# (accelerate/utils/launch.py).
MIXED_PRECISION = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "no"}
NOT_SUPPORTED = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
EXAMPLE = "For an example, see train_args/accelerate_fp8.yaml, which belongs to train_config_fp8.json"


def contradictions(args: TrainingArguments, environment: Mapping[str, str] = os.environ) -> list[Exception]:
    """Return an error for each setting that differs between accelerate and the training arguments.

    The settings of accelerate for FP8 recipes are not compared.

    Args:
        args: The training arguments.
        environment: The environment variables. The result is [] if `accelerate launch` did not start the process.
    """
    expected: dict[str, tuple[str, object]] = {
        "MIXED_PRECISION": ("precision.compute", MIXED_PRECISION[args.precision.compute]),
        "GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "GRADIENT_CLIPPING": ("max_grad_norm", args.max_grad_norm),
    }
    found: list[Exception] = []
    for name, (key, value) in expected.items():
        given = environment.get(f"ACCELERATE_{name}", "").lower()
        # accelerate may write the number 1 as 1.0.
        if given.removesuffix(".0") not in ("", "auto", "none", str(value).lower().removesuffix(".0")):
            text = (
                f"accelerate's ACCELERATE_{name} is {given}, but {key} requires {value}. Make the two settings equal. "
                f"{EXAMPLE}"
            )
            found.append(ConfigurationError(text, key=key))
    for name in NOT_SUPPORTED:
        if environment.get(name, "").lower() in ("true", "1"):
            text = (
                f"accelerate's {name} is not supported. Remove this setting, and set distributed_type to MULTI_GPU. "
                f"{EXAMPLE}"
            )
            found.append(ConfigurationError(text, key=name))
    return found
