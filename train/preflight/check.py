"""What keeps a run from starting, as far as it is known before a model is built: all of it in one message."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from model import install_command
from model.config import load_sizes, num_parameters
from model.errors import UserError
from model.fp8.recipes import EIGHT_BITS, RECIPES
from model.hf_folder import check_init_from, find_weights
from model.variants import VARIANTS
from train.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    RunState,
    branch_at,
    check_given,
    committed,
    read_state,
)
from train.checkpoint.resume import allowed_changes
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.source import TokenSource, check_fit, check_no_leak, check_same_tokenizer, open_sources
from train.files import existing
from train.guard.lock import Lock
from train.planning.setting import Setting
from train.preflight.accelerate import contradictions
from train.preflight.sizes import disk_findings, is_done, memory_findings
from train.record.run_folder import EXPORTED_FROM, RunFolder, why_not_replaced
from train.record.trackers import check_installed

T = TypeVar("T")

# Set in the environment of ranks whose launcher has checked.
CHECKED = "FP8_PREFLIGHT_DONE"
# Parameters of a model that trains on a CPU within a coffee break; a larger one there is a mistake, or asked for.
CPU_PARAMETERS = 100e6


class PreflightError(UserError):
    """The run cannot start; the message has every reason, each with what to do."""

    code = "preflight"


def check(args: TrainingArguments, world_size: int, local_ranks: int, devices: list[int] | None) -> list[str]:
    """Remarks for the log about a run of `world_size` ranks, `local_ranks` of them on this node, where `devices` are
    `cuda_devices()`. Reads files and changes nothing.

    Raises PreflightError.
    """
    problems: list[str] = []
    remarks: list[str] = []

    def attempt(step: Callable[[], T]) -> T | None:
        try:
            return step()
        except (ValueError, UserError, OSError) as error:
            problems.append(str(error))
            return None

    sizes: Any = attempt(partial(load_sizes, args.model.config))
    resolved = attempt(partial(args.resolve, world_size))
    ds_config = resolved and attempt(partial(resolve_ds_config, args, world_size))
    train = attempt(partial(open_sources, args.data.sources, "train", args.max_seq_length))
    if train and sizes is not None:
        attempt(partial(check_fit, train, sizes.vocab_size, sizes.max_position_embeddings))
    for folders in (args.data.sources, *({n: f} for n, f in (args.data.eval_sources or {}).items())):
        attempt(partial(check_evaluation, folders, args.max_seq_length, train))
    attempt(partial(check_output, args))
    attempt(partial(check_installed, args.report_to))
    attempt(partial(check_states, resolved or args))
    if sizes is not None and begins(args):
        attempt(partial(check_weights, args, sizes))
    if resolved and ds_config:
        attempt(partial(check_resume, resolved, ds_config, world_size))
    problems += contradictions(resolved or args)
    if devices is not None:
        problems += device_problems(args, sizes, local_ranks, len(devices))
    if sizes is not None and resolved and ds_config:
        stage = ds_config["zero_optimization"]["stage"]
        found = [disk_findings(args, sizes, stage)]
        if devices:
            setting = Setting.of(resolved, ds_config, sizes, world_size)
            found.append(memory_findings(resolved, setting, min(devices[:local_ranks])))
        problems += [problem for problem, _ in found if problem]
        remarks += [remark for _, remark in found if remark]
    problems = list(dict.fromkeys(problems))
    if len(problems) > 1:
        lines = (problem.replace("\n", "\n  ") for problem in problems)
        raise PreflightError("\n  ".join([f"{len(problems)} problems keep this run from starting:", *lines]))
    if problems:
        raise PreflightError(problems[0])
    return remarks


def check_evaluation(folders: dict[str, str], seq_length: int, train: list[TokenSource] | None) -> None:
    """Raises DataError: the eval split of folders cannot be used beside the training data."""
    held_out = open_sources(folders, "eval", seq_length)
    if train:
        check_same_tokenizer(train[0], held_out[0])
        check_no_leak(train, held_out)


def begins(args: TrainingArguments) -> bool:
    """Whether the run goes on from no checkpoint."""
    setting = args.resume_from_checkpoint
    return setting == "never" or (setting == "auto" and not committed(RunFolder(args.output_dir).checkpoints))


def goes_on_from(args: TrainingArguments) -> Path | None:
    """The checkpoint that a run is about to go on from, by what is there, unread; None where it begins, or that is for
    the run to say. Raises CheckpointError: see `branch_at`, `check_given`."""
    setting, own = args.resume_from_checkpoint, RunFolder(args.output_dir).checkpoints
    if setting == "never":
        return None
    if setting == "auto":
        return next(iter(committed(own)[-1:]), None)
    path = Path(setting)
    if newest := branch_at(own, path):
        return newest
    check_given(path, own, hashes=False)
    return path


def check_states(args: TrainingArguments) -> None:
    """Raises ConfigurationError: precision.optimizer_states needs a package that is not there."""
    states, package = args.precision.optimizer_states, RECIPES["tensorwise"].package
    if states in EIGHT_BITS and importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"precision.optimizer_states {states} needs the package {package}, which is not installed. Install it "
            f"with {install_command(package)}, or set it to bf16_remainder"
        )


def check_resume(args: TrainingArguments, ds_config: dict[str, Any], world_size: int) -> None:
    """Compare the resolved arguments with the checkpoint that the run resumes from. The run itself compares the content
    of data and model, and skips a damaged checkpoint.

    Raises:
        CheckpointError, ConfigurationError: as `allowed_changes`; or see `branch_at`.
    """
    path = goes_on_from(args)
    if path is None or args.precision.auto:  # what that chooses is not known yet
        return
    try:
        saved = read_state(path)
    except CheckpointError:
        return
    stage = ds_config["zero_optimization"]["stage"]
    same = (saved.model_config, saved.data_fingerprint)
    now = RunState(saved.step, 0, 0, world_size, stage, args.to_dict(), *same)
    allowed_changes(now, saved, path, args.allow_changes_on_resume)


def check_weights(args: TrainingArguments, sizes: Any) -> None:
    """Raises ValueError: model.init_from is of another model, or has weights that cannot be used."""
    if args.model.init_from is None:
        return
    check_init_from(args.model.init_from, sizes)
    try:
        find_weights(args.model.init_from, sizes)
    except ValueError as error:
        raise ValueError(f"model.init_from: {error}") from error


def check_output(args: TrainingArguments) -> None:
    """Raises ConfigurationError: output_dir cannot be written, or is what another program replaces or a run removes, or
    has an hf/ that the run's own could not replace in the end; LockError: another run is in it."""
    folder = RunFolder(args.output_dir)
    if (folder.path / MANIFEST).is_file() or (folder.path / EXPORTED_FROM).is_file():
        raise ConfigurationError(
            f'output_dir "{args.output_dir}" is a checkpoint, an export or prepared data, with which the run in it '
            "would be removed; choose another folder. A run goes on from a checkpoint with --resume_from_checkpoint"
        )
    places = existing(folder.path), *written_parts(args, folder)
    if locked := [str(place) for place in places if not os.access(place, os.W_OK | os.X_OK * place.is_dir())]:
        raise ConfigurationError(
            f'output_dir "{args.output_dir}": {", ".join(locked)} cannot be written by this user; have that made '
            "writable, or choose another folder"
        )
    if args.save_strategy != "no" and not is_done(args, folder) and (why := why_not_replaced(folder.hf)):
        raise ConfigurationError(
            f'output_dir "{args.output_dir}": {why}, and what this run trains would be exported there in the end; move '
            "it away, or choose another output_dir"
        )
    Lock(folder.lock).look()


def written_parts(args: TrainingArguments, folder: RunFolder) -> list[Path]:
    """What is there of a run's folder, perhaps by another user, and is written to by a run that goes on in it. Without
    train.log and logs/ it goes on, and other files are replaced."""
    parts = [folder.metrics]
    if args.save_strategy != "no" and not is_done(args, folder):
        parts += [folder.checkpoints, folder.hf]
    return [part for part in parts if part.exists()]


def device_problems(args: TrainingArguments, sizes: Any, local_ranks: int, devices: int) -> list[str]:
    """What does not go with so many CUDA devices."""
    problems: list[str] = []
    te, backend = VARIANTS[args.model.variant].te, args.precision.backend
    if devices:
        if local_ranks > devices:
            problems.append(
                f"{local_ranks} ranks are to start on this node, and it has {devices} CUDA devices, one a rank; start "
                f"{devices} (--nproc, or NPROC of run_training.sh), or look at CUDA_VISIBLE_DEVICES; srun has to "
                "give them to all tasks of the node: --gpus-per-node, not --gpus-per-task"
            )
    else:
        none = "no CUDA device is found here"
        if sizes is not None and backend != "reference" and num_parameters(sizes) > CPU_PARAMETERS:
            problems.append(
                f"model.config {args.model.config}: {num_parameters(sizes) / 1e6:,.0f} M parameters, and {none}; look "
                "at nvidia-smi and CUDA_VISIBLE_DEVICES, or, to train on the CPU all the same, very slowly, give "
                "--precision.backend reference"
            )
        if te and backend == "transformer_engine":
            problems.append(f'precision.backend "transformer_engine": {none}; set it to auto or reference')
        if args.precision.compute == "fp16":
            problems.append(f'precision.compute "fp16" needs a GPU, and {none}; set it to bf16 or fp32')
    named = args.model.attention_backend
    if te and named != "auto" and (not devices or backend == "reference"):
        problems.append(
            f'model.attention_backend "{named}" is Transformer Engine\'s on a GPU; the CPU reference, which would run '
            "here, has torch's alone; set it to auto"
        )
    return problems
