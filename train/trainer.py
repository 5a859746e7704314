"""Train a run: build its parts, take its steps, save and export. Read from top to bottom.

run -> run_training -> start_run -> Trainer -> Trainer.fit -> export_last

A Trainer trains one phase of precision.schedule. Its model, engine and precision never change. If the next step needs
another precision, `fit` saves and returns, and `run_training` builds the next Trainer from that checkpoint. This also
happens when a module falls back to a safer recipe (precision.on_trouble).

A step waits for the GPU only for logging, FP8 health checks, evaluation and saving. It waits for a background save only
if the next save is due. All ranks must call the functions and methods at the same points.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import random
import shlex
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import MistralConfig

from model.build import build_model, choose_attention
from model.config import (
    GIB,
    flops_per_token,
    load_config,
    model_name,
    num_parameters,
    numeric_settings,
)
from model.errors import UserError
from model.fp8.calibration import MAX_GRADIENT_ERROR, Gradients, calibrate, decoder_gradients, relative_error
from model.fp8.gemms import Gemms, count_gemms
from model.fp8.health import HealthCheck, check_due, has_health_checks
from model.fp8.machine import describe, headline
from model.fp8.modules import check_precision, fp8_modules, uses_transformer_engine
from model.fp8.precision import HEAD_GRADIENTS_ADVICE, Precision, resolve_head_gradients
from model.fp8.recipes import PrecisionConfig
from model.numeric_check import choose_kernels
from model.startup_check import (
    attention_in_use,
    backend_in_use,
    check_attention,
    check_startup,
    verify_attention,
)
from model.variants import VARIANTS
from train.checkpoint.files import (
    RunState,
    checkpoint_name,
    identity,
    is_in_folder,
    read_state,
    trained_tokenizer,
)
from train.checkpoint.load import (
    choose_checkpoint,
    fits_fp8_state,
    load_checkpoint,
    move_later_checkpoints,
    read_weights,
)
from train.checkpoint.resume import (
    is_partitioned_differently,
    resume_option,
    resume_state,
    starting_precision,
)
from train.checkpoint.rollback import roll_back
from train.checkpoint.save import SaveError, Saver
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import msamp_settings, resolve_ds_config
from train.config.load import resolve_arguments
from train.config.schedule import (
    describe_phase,
    phase_arguments,
    phase_at,
    phase_end_problems,
    phase_precisions,
)
from train.data.format import count
from train.data.order import next_position
from train.data.source import check_fit
from train.data.stream import MicroBatches, SampleStream, compute_unigram_loss, open_held_out, open_stream
from train.engine import distributed
from train.engine.held_out import held_out_losses
from train.engine.optimizer import learning_rate_at
from train.engine.states import check_packed_adamw
from train.engine.step import MicroStep, SkipDecision, build_engine, free_memory, release
from train.export import export
from train.files import total_bytes, unused_backup_path
from train.monitor.fp8_alarms import find_fallbacks
from train.monitor.health import Health, ranks_without_finite_loss, samples_record, samples_text
from train.monitor.lock import hold_lock
from train.monitor.replicas import check_replicas
from train.monitor.signals import (
    STOPPED,
    Interrupted,
    Stopped,
    StopVote,
    defer_stop,
    write_stopped,
)
from train.monitor.watchdog import Watchdog
from train.planning.autotune import resolve_auto
from train.planning.plan import Prediction
from train.planning.setting import Setting
from train.preflight.gradients import check_gradients
from train.preflight.ranks import check_alike, check_configured_alike, is_enabled
from train.preflight.sizes import disk_plan
from train.record.fp8_health import FP8_HEALTH, health_record
from train.record.history import typical_speed
from train.record.log import configure_logging, open_log_file
from train.record.metrics import MetricsLogger, mfu, peak_tflops
from train.record.provenance import RunRecord, origin
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)


FP8_ADVICE = (
    "Resume from an earlier checkpoint (--resume_from_checkpoint) with a lower learning_rate or another "
    "precision.recipe, and allow the change (--allow_changes_on_resume)"
)


class TrainingError(UserError):
    """An error raised if the training cannot continue. The message names the step and a remedy."""

    code = "training"


# ---------------------------------------------------------------- a run


def run(args: TrainingArguments) -> int:
    """Initialize the process group, lock the run folder and train. Return the exit status, 0 or STOPPED."""
    distributed.init_distributed()
    status = 0
    with contextlib.ExitStack() as folder:
        with Watchdog(args.hang_timeout_s) as watchdog:
            watchdog.set_position("comparing the configurations of all ranks")
            args = resolve_arguments(args, dist.get_world_size())
            check_configured_alike(args)
            watchdog.phase("waiting for run.lock")
            if not args.dry_run:
                folder.enter_context(hold_lock(RunFolder(args.output_dir)))
        try:
            run_training(args)
        except Stopped:
            status = STOPPED
    dist.destroy_process_group()
    return status


def run_training(args: TrainingArguments) -> None:
    """Train with one Trainer for each precision of the run, then export the model.

    Args:
        args: The resolved arguments.
    """
    began, is_main = round(time.time(), 1), dist.get_rank() == 0
    configure_logging(args.log_level, dist.get_rank(), has_file=True)
    with Watchdog(args.hang_timeout_s) as watchdog:
        trainer = start_run(args, watchdog)
        args, state, folder = trainer.args, trainer.state, trainer.folder
        watchdog.phase("opening the output folder")
        if args.dry_run:
            plan = disk_plan(args, trainer.data.config, state.zero_stage)
            return log_lines(
                plan, f"dry_run: training would start with step {state.step + 1}; no files were written"
            )
        metrics = open_run_folder(args, trainer.data.ds_config, state, trainer.first_checkpoint)
        record = RunRecord(
            folder,
            {"time": began, **describe_start(trainer)},
            lambda: (state.step, state.consumed_tokens),
            {Stopped: "stopped", Interrupted: "interrupted"},
            is_main,
        )
        # describe_start is collective, so rank 0 has created the folder
        open_log_file(folder.log if is_main else folder.logs / f"rank-{dist.get_rank():03d}.log")
        stop_vote = StopVote()
    try:
        with contextlib.closing(metrics), record:
            with defer_stop():
                checkpoint = trainer.fit(metrics, stop_vote)
            while state.step < args.max_steps:
                trainer, change = build_next_trainer(trainer)
                record.add_phase(change)
                with defer_stop():
                    checkpoint = trainer.fit(metrics, stop_vote)
            record.part = "export"
            with Watchdog(args.hang_timeout_s) as watchdog:
                watchdog.phase(f"waiting for rank 0 to export {checkpoint}", reads=bytes_to_read(checkpoint))
                if is_main:
                    export_last(args, folder, checkpoint)
                    metrics.draw_last()
                watchdog.set_position("waiting for all ranks to exit")
                dist.barrier()
    except Stopped as stopped:
        with Watchdog(args.hang_timeout_s) as watchdog:
            watchdog.set_position("waiting for all ranks to stop")
            # ignore a full disk, because the checkpoint exists and the exit status reports the stop
            if is_main:
                with contextlib.suppress(OSError):
                    write_stopped(folder.path, stopped)
            logger.info(str(stopped))
            dist.barrier()
        raise


def start_run(args: TrainingArguments, watchdog: Watchdog) -> Trainer:
    """Run the preflight checks and build the first Trainer, without writing to the run folder.

    Raises:
        PreflightError: The software, files or configuration of the ranks differ, or the gradients of the first step are
            wrong.
        Other errors: See the functions called here.
    """
    if is_enabled(args):
        watchdog.phase("comparing the ranks and measuring the links between them")
        check_alike(args)
    seed_generators(args)
    watchdog.phase("timing precisions for precision.auto")
    if VARIANTS[args.model.variant].te:
        args = replace(args, precision=resolve_head_gradients(args.precision))
    args = resolve_auto(args, dist.get_world_size())
    watchdog.phase("opening the data")
    data = open_data(args, watchdog)
    state, checkpoint = load_start_position(args, data, watchdog)
    describe_run(args, data, state)
    trainer = Trainer(args, data, state, checkpoint, watchdog)
    if is_enabled(args) and state.step < args.max_steps:
        watchdog.phase("checking the gradients of one step")
        check_gradients(args, trainer.engine, trainer.micro_step, trainer.precision, data.train, state)
    return trainer


def export_last(args: TrainingArguments, folder: RunFolder, checkpoint: Path | None) -> None:
    """Export the last checkpoint to hf/, unless it was already exported or does not exist. Call on rank 0 only."""
    if checkpoint is not None and folder.exported()[1] != identity(checkpoint):
        logger.info(
            f"training is complete; exporting {checkpoint}. If the export fails, run the same "
            f"command{resume_option(args)} to repeat only the export"
        )
        log_lines(*export(checkpoint, folder.hf, trained_tokenizer(checkpoint, read_state(checkpoint))))
        run, root = str(folder.path), Path(__file__).resolve().parent.parent
        generate, evaluate = (
            os.path.relpath(root / script)
            for script in ("fp8_inference_demo/fp8_inference.py", "train/evaluate.py")
        )
        log_lines(
            f"wrote the trained model to the Hugging Face folder {folder.hf}. Next steps:",
            f"  generate text:      {shlex.join(['python', generate, '--model', run, '--prompt', 'TEXT'])}",
            f"  evaluate the model: {shlex.join(['python', evaluate, run])}",
        )


def log_lines(*lines: str) -> None:
    for line in lines:
        logger.info(line)


def seed_generators(args: TrainingArguments) -> None:
    """Seed the random generators of this rank. With full_determinism, also select deterministic kernels."""
    own = args.seed + dist.get_rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    if args.full_determinism:
        distributed.make_deterministic()


def bytes_to_read(*places: Path | str | None) -> int:
    """Return the total size in bytes of the files in the given folders.

    Collective: all ranks must call this function.

    Only rank 0 reads the file sizes, to limit the load on a shared file system.
    """
    return distributed.call_on_rank_0(lambda: total_bytes(*(Path(place) for place in places if place)))


def ranks_by_value(value: str) -> dict[str, list[int]]:
    """Return a dictionary from each value to the ranks that passed this value.

    Collective: all ranks must call this function.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return {found: [r for r, other in enumerate(every) if other == found] for found in dict.fromkeys(every)}


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class RunData:
    """Training data, evaluation data and configuration files of a run, which are read once when the run starts.

    All phases of precision.schedule and all fallbacks use them, even if the user edits a file during the run.
    """

    config: MistralConfig  # model configuration
    ds_config: dict[str, Any]  # DeepSpeed configuration, which is the same in every phase
    train: SampleStream
    held_out: dict[str, SampleStream]  # evaluation data, keyed by loss name
    unigram_loss: float  # loss of a unigram model on the samples of eval_loss, in nats per token


def open_data(args: TrainingArguments, watchdog: Watchdog) -> RunData:
    """Open the data and read the model and DeepSpeed configurations.

    With data.verify, each rank verifies its share of the shards.

    Raises:
        DataError, ValueError: The data is damaged or does not fit the model.
    """
    data, config = args.data, load_config(args.model.config)
    train = open_stream(
        data.sources, data.weights, args.max_seq_length, args.seed, document_mask=data.document_mask
    )
    held_out = open_held_out(train, data.sources, data.eval_sources or {}, args.max_eval_samples)
    check_fit(train.sources, config.vocab_size, config.max_position_embeddings)
    unigram_loss = compute_unigram_loss(train, held_out["eval_loss"])
    if data.verify:
        streams, share = [train, *held_out.values()], (dist.get_rank(), dist.get_world_size())
        watchdog.phase(
            "verifying this rank's share of the data", reads=sum(stream.num_bytes for stream in streams)
        )
        shards = sum(stream.verify(*share) for stream in streams)
        logger.info(f"data.verify: rank 0 verified the hashes and token ids of {count(shards, 'shard')}")
    return RunData(config, resolve_ds_config(args, dist.get_world_size()), train, held_out, unigram_loss)


# ---------------------------------------------------------------- where the run starts


def load_start_position(
    args: TrainingArguments, data: RunData, watchdog: Watchdog
) -> tuple[RunState, Path | None]:
    """Find the position at which the run starts, and the checkpoint to resume from.

    Returns:
        The run state, and the path of the checkpoint. The path is None for a new run.

    Raises:
        CheckpointError: The checkpoint is damaged, or this run cannot continue from it.
        ConfigurationError: The checkpoint is past max_steps, or a later phase of precision.schedule has no steps.
    """
    state = RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        world_size=dist.get_world_size(),
        zero_stage=data.ds_config["zero_optimization"]["stage"],
        train_config=args.to_dict(),
        model_config=numeric_settings(data.config),
        data_fingerprint=data.train.fingerprint(),
    )
    checkpoints, given = RunFolder(args.output_dir).checkpoints, args.resume_from_checkpoint
    watchdog.phase("waiting for rank 0 to verify the checkpoint", reads=bytes_to_read(checkpoints, given))
    checkpoint = choose_checkpoint(checkpoints, given)
    if checkpoint is not None:
        saved = read_state(checkpoint)
        log_lines(*resume_state(state, saved, checkpoint, args.allow_changes_on_resume))
    data.train.seek(state.consumed_samples, state.sources)
    if problems := phase_end_problems(args, state.step, state.consumed_tokens):
        raise ConfigurationError(problems=problems)
    return state, checkpoint


# ---------------------------------------------------------------- model, startup check, engine


def build_model_and_precision(
    args: TrainingArguments,
    config: MistralConfig,
    checkpoint: Path | None = None,
    fallbacks: dict[str, str] | None = None,
) -> tuple[nn.Module, Precision]:
    """Build the model on this rank's device with the configured attention backend.

    Args:
        args: The arguments of one phase.
        config: The model configuration.
        checkpoint: The checkpoint to resume from. If None, the weights come from model.init_from.
        fallbacks: Module name -> recipe (see `Precision`).

    Raises:
        ValueError: `build_model` refuses the configuration.
        BackendError: Transformer Engine or the attention backend is not available.
    """
    precision = Precision(args.precision, fallbacks=fallbacks)
    choose_attention(
        args.model.attention_backend, args.model.variant, precision, config, args.data.document_mask
    )
    init_from = None if checkpoint else args.model.init_from
    return build_configured_model(args, config, precision, init_from), precision


def build_configured_model(
    args: TrainingArguments, config: MistralConfig, precision: Precision, init_from: str | None = None
) -> nn.Module:
    """Build the configured model in `precision`, with the weights of the folder `init_from` or random weights."""
    return build_model(
        config,
        args.model.variant,
        precision,
        seed=args.seed,
        initialization=args.model.initialization,
        init_from=init_from,
        gradient_checkpointing=args.gradient_checkpointing,
        compile=args.model.compile,
        speed=args.speed,
        document_mask=args.data.document_mask,
    )


@dataclass(frozen=True)
class StartupReport:
    """Results of the startup check for the log and run.json."""

    fp8: str  # summary: number of FP8 modules, total number of modules, recipe
    attention: str  # attention backend of this rank
    attention_by_rank: dict[str, list[int]]  # attention backend -> ranks
    lines: list[str]  # log lines of the check


def check_later_phases(
    args: TrainingArguments, model: nn.Module, device: torch.device, fallbacks: dict[str, str]
) -> None:
    """Check that the hardware supports all phases of precision.schedule and the fallbacks of precision.on_trouble.

    Raises:
        PrecisionError: A phase or fallback is not supported.
    """
    for section in phase_precisions(args.precision):
        precision = Precision(section, device, fallbacks)
        if precision.fp8:
            check_precision(model, precision)
            if section.on_trouble == "escalate":
                precision.require(
                    "block",
                    'set precision.on_trouble to "warn", because "escalate" needs recipe "block" as a fallback',
                )


def disable_wrong_kernels(
    args: TrainingArguments, config: MistralConfig
) -> tuple[TrainingArguments, list[str]]:
    """Check the kernels of a phase against float32, and disable optional kernels that compute wrong results.

    Args:
        args: The arguments of one phase.
        config: The model configuration.

    Returns:
        The arguments, and lines for the log.

    Raises:
        StartupCheckError: Results are also wrong without optional kernels.
    """
    model = args.model
    if not VARIANTS[model.variant].te:
        return args, []
    precision = Precision(args.precision)
    choose_attention(model.attention_backend, model.variant, precision, config, args.data.document_mask)
    try:
        speed, lines = choose_kernels(
            config,
            model.variant,
            precision,
            args.speed,
            args.per_device_train_batch_size,
            args.max_seq_length,
            document_mask=args.data.document_mask,
            gradient_checkpointing=args.gradient_checkpointing,
            seed=args.seed,
        )
    except Exception:
        # these causes have clearer errors
        if precision.head_gradients:
            precision.require("block", HEAD_GRADIENTS_ADVICE)
        verify_attention(
            config, precision, model.attention_backend, args.max_seq_length, args.data.document_mask
        )
        raise
    if args.precision.optimizer_states != "fp32":
        lines.append(check_packed_adamw(args.precision.moment_type, precision.device))
    free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the check may need more memory than the run
    return replace(args, speed=speed), lines


def run_startup_check(
    args: TrainingArguments, model: nn.Module, precision: Precision, numeric_lines: list[str]
) -> StartupReport:
    """Run the startup check of the FP8 GEMMs and the attention backend, and log the results.

    Args:
        numeric_lines: Result of `disable_wrong_kernels`.

    Raises:
        StartupCheckError: The GEMMs or the attention backend in use differ from the configuration.
    """
    lines = check_startup(model, precision, args.model.attention_backend, args.seed, args.max_seq_length)
    lines += numeric_lines
    log_lines(f"modules: {backend_in_use(model, precision)}", *lines)
    attention = attention_in_use(model, precision)
    ranks = ranks_by_value(attention)
    logger.log(
        logging.INFO if len(ranks) > 1 else logging.DEBUG,
        "attention by rank: " + "; ".join(f"{backend}: ranks {rs}" for backend, rs in ranks.items()),
    )
    fp8: str = precision.config.compute
    if precision.fp8:
        report = fp8_modules(model, precision)
        fp8 = f"{len(report.planned)}/{len(report.planned) + len(report.kept)} {precision.config.recipe}"
        fallbacks = f", {len(report.fallbacks)} of these with a fallback" if report.fallbacks else ""
        fp8 += fallbacks + (", emulated" if precision.emulated else "")
    return StartupReport(fp8, attention, ranks, lines)


def build_engine_and_resume(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    data: RunData,
    state: RunState,
    checkpoint: Path | None,
) -> tuple[Any, MicroStep]:
    """Build the DeepSpeed engine and load the checkpoint into it.

    Args:
        args: The arguments of one phase.
    """
    engine = build_engine(model, args, copy.deepcopy(data.ds_config))
    if checkpoint is not None:
        with distributed.suppress_prints():
            is_partitioned = is_partitioned_differently(read_state(checkpoint), state)
            load_checkpoint(engine, checkpoint, precision, is_partitioned)
    micro_step = MicroStep(engine, precision, args)
    log_lines(
        "; ".join(micro_step.notes),
        f"starting from {checkpoint or args.model.init_from or 'random weights'} at step {state.step}, after "
        f"{state.consumed_tokens:,} tokens",
    )
    return engine, micro_step


def calibrate_scales(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    data: RunData,
    state: RunState,
    checkpoint: Path | None,
) -> float | None:
    """Calibrate the FP8 scales on the next micro-batch, unless the checkpoint has FP8 state for this precision.

    For new random weights, also log how much the FP8 gradients differ from those in bf16.

    Args:
        args: The arguments of one phase.

    Returns:
        The relative error of the first FP8 gradients on rank 0. None on other ranks, or if it was not measured.
    """
    if not precision.fp8 or precision.torchao:
        return None
    if checkpoint is not None:
        if fits_fp8_state(read_state(checkpoint), precision):
            return None
        if precision.has_state:  # the scales depend on the weights
            model.load_state_dict(read_weights(checkpoint))
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    samples = size * accumulation * dist.get_world_size()
    first = next_position(state.consumed_samples, samples, state.skipped_samples) + dist.get_rank() * size
    ids, labels, documents = data.train.batch(first, size).to(precision.device)
    exact: Gradients = {}
    if checkpoint is None and args.model.init_from is None and dist.get_rank() == 0:
        exact = bf16_gradients(args, data.config, ids, labels, accumulation, documents)
    gradients = calibrate(model, precision, ids, labels, accumulation, documents)
    if precision.has_state and gradients:
        passes = precision.config.calibration_passes
        logger.info(f"delayed scaling: scales from {passes} passes over the first micro-batch")
    if not (exact and gradients):
        return None
    error = relative_error(gradients, exact)
    found = f"FP8 changes the first gradients of the decoder layers by {error:.1%}, compared with bf16"
    if error <= MAX_GRADIENT_ERROR:
        logger.info(found)
    else:
        remedy = (
            "Start in bf16 (precision.schedule)"
            if args.model.initialization == "scaled"
            else 'Set model.initialization to "scaled"'
        )
        logger.warning(
            f"{found}. Above {MAX_GRADIENT_ERROR:.0%}, the model may train worse than in bf16. {remedy}"
        )
    return error


def bf16_gradients(args: TrainingArguments, config: MistralConfig, *micro_batch: Any) -> Gradients:
    """Return `decoder_gradients` of new weights in bf16, in CPU memory. Recomputation limits the GPU memory."""
    section = PrecisionConfig(compute="bf16", backend=args.precision.backend)
    in_bf16 = replace(args, precision=section, gradient_checkpointing=True)
    model = build_configured_model(in_bf16, copy.deepcopy(config), Precision(in_bf16.precision))
    gradients = {name: g.cpu() for name, g in decoder_gradients(model, *micro_batch).items()}
    del model
    free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return gradients


# ---------------------------------------------------------------- what is logged


def describe_run(args: TrainingArguments, data: RunData, state: RunState) -> None:
    """Log a summary of the configuration, the model and the data."""
    config, stream, most = data.config, data.train, args.max_steps
    tokens_per_step = args.train_batch_size_tokens or 0
    total = state.consumed_tokens + (most - state.step) * tokens_per_step
    log_lines(
        f"output folder: {RunFolder(args.output_dir).path.resolve()} (settings in train_config.json, messages "
        "in train.log)",
        f"hardware: {state.world_size} ranks, {headline(*describe())}",
        f"model: {model_name(args.model.config)} ({args.model.variant}), {num_parameters(config) / 1e6:,.1f} M "
        f"parameters, {flops_per_token(config, args.max_seq_length) / 1e9:.3f} GFLOP per token",
        f"data: {stream.describe()}",
        f"training: steps {state.step + 1:,} to {most:,} with {tokens_per_step:,} tokens each, {args.optim} with a "
        f"learning rate of up to {args.learning_rate:g}; {total:,} tokens in total, "
        f"{total / stream.num_tokens:.2f} times the training data",
    )
    if isinstance(args.deepspeed, dict) and (settings := msamp_settings(args.deepspeed)):
        logger.info(
            f"the msamp section of the DeepSpeed configuration was converted to these precision settings: {settings}"
        )


def predict(args: TrainingArguments, data: RunData, state: RunState) -> dict[str, Any] | None:
    """Predict the memory and speed of the current phase, and log them. Return None if they cannot be predicted."""
    phase_args = phase_arguments(args, phase_at(args, state.step, state.consumed_tokens))
    setting = Setting.from_run(phase_args, data.ds_config, data.config, dist.get_world_size())
    if not (torch.cuda.is_available() and setting.is_planned):
        return None
    prediction = Prediction.make(setting, torch.cuda.get_device_name())
    logger.info(prediction.line())
    return prediction.to_json()


# ---------------------------------------------------------------- the run folder


def open_run_folder(
    args: TrainingArguments, ds_config: dict[str, Any], state: RunState, checkpoint: Path | None
) -> MetricsLogger:
    """Open the run folder for writing. Call this after all checks have passed.

    On a resume, checkpoints and exports of later steps are moved to another folder, and configuration changes are
    recorded in metrics.jsonl.

    Raises:
        OSError, ValueError: output_dir or a file in it cannot be read or written.
    """
    is_main, folder = dist.get_rank() == 0, RunFolder(args.output_dir)
    if is_main:
        if backup := move_later_checkpoints(folder.checkpoints, state.step):
            logger.info(f"checkpoints after step {state.step} were moved to {backup}")
        if folder.exported()[0] > checkpoint_name(state.step):
            backup = folder.hf.rename(unused_backup_path(folder.hf))
            logger.info(f"the export of a later step was moved to {backup}")
    metrics = MetricsLogger(folder, args.to_dict(), is_main, state.step, state.evaluation_due)
    if is_main:
        folder.stopped.unlink(missing_ok=True)
        for path, content in (
            (folder.train_config, args.to_dict()),
            (folder.ds_config, ds_config),
        ):
            path.write_text(json.dumps(content, indent=2) + "\n")
    changed = [change for change in state.changes if change["step"] == state.step]
    notes: dict[str, Any] = {"changes": changed} if changed else {}
    if checkpoint is not None and not is_in_folder(checkpoint, folder.checkpoints):
        notes["began_at"] = state.began_at
    if notes:
        metrics.log({"step": state.step, "tokens": state.consumed_tokens, **notes})
    return metrics


def describe_start(trainer: Trainer) -> dict[str, Any]:
    """Return the facts about this start of the run for run.json, or {} on ranks other than 0.

    Collective: all ranks must call this function.
    """
    args, state, checkpoint = trainer.args, trainer.state, trainer.first_checkpoint
    hosts = ranks_by_value(socket.gethostname())
    if dist.get_rank() != 0:
        return {}
    machine, versions = describe()
    return {
        "step": state.step,
        "tokens": state.consumed_tokens,
        "resumed_from": checkpoint and str(checkpoint.resolve()),
        **origin(args.to_dict()),
        "hosts": hosts,
        "gpus": dist.get_world_size() if torch.cuda.is_available() else 0,
        "machine": machine,
        "versions": versions,
        "model": {
            "config": args.model.config,
            "variant": args.model.variant,
            "parameters": num_parameters(trainer.data.config),
        },
        "data": trainer.data.train.describe(),
        "fp8": trainer.report.fp8,
        "attention": trainer.report.attention_by_rank,
        "startup_checks": trainer.report.lines,
        "initial_gradient_error": trainer.gradient_error,
        "plan": predict(args, trainer.data, state),
        "escalations": state.escalations,  # the list grows during training
    }


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Step:
    """Result of an optimizer step. Reading a tensor of the result waits for the GPU."""

    loss: torch.Tensor  # mean over the micro-batches of this rank; float32 scalar on the device
    share: torch.Tensor | None  # fraction of the tokens that have a label; None if all tokens have one
    skipped: bool  # whether the step was skipped, so that no weight changed on any rank
    gemms: Gemms | None  # counts of the FP8 GEMMs that ran, if the step is logged
    health_check: HealthCheck | None  # FP8 health check, if one was due


class Trainer:
    """Trainer for one precision of a run. Trains until the precision changes or the run ends.

    Collective: all ranks must build a Trainer and call its methods at the same points.

    Args:
        args: The resolved arguments of the whole run.
        data: The training and evaluation data.
        state: The position of the run, which the Trainer updates in place.
        checkpoint: The checkpoint at this position, or None for a new run.
        watchdog: Watchdog that reports a startup phase that hangs.
    """

    def __init__(
        self,
        args: TrainingArguments,
        data: RunData,
        state: RunState,
        checkpoint: Path | None,
        watchdog: Watchdog,
    ):
        self.args, self.data, self.state = args, data, state
        self.first_checkpoint, self.first_step = checkpoint, state.step
        self.folder = RunFolder(args.output_dir)
        self.phase, fallbacks = starting_precision(args, state)
        phase_args = phase_arguments(args, self.phase)
        read = bytes_to_read(checkpoint or args.model.init_from)
        watchdog.phase("building the model", read)
        config = copy.deepcopy(data.config)  # transformers adds attributes
        phase_args, numeric_lines = disable_wrong_kernels(phase_args, config)
        self.model, self.precision = build_model_and_precision(phase_args, config, checkpoint, fallbacks)
        watchdog.phase("running the startup check")
        check_later_phases(args, self.model, self.precision.device, state.fallbacks)
        self.report = run_startup_check(args, self.model, self.precision, numeric_lines)
        watchdog.phase("building the engine", read)
        self.gradient_error = calibrate_scales(
            phase_args, self.model, self.precision, data, state, checkpoint
        )
        self.engine, self.micro_step = build_engine_and_resume(
            phase_args, self.model, self.precision, data, state, checkpoint
        )
        state.precision = phase_args.to_dict()["precision"]
        self.accumulation = args.gradient_accumulation_steps or 1
        self.samples = args.per_device_train_batch_size * self.accumulation * dist.get_world_size()
        self.tokens = self.samples * args.max_seq_length
        self.speeds: list[float] = []  # tokens/s over all ranks in each logged interval

    def fit(self, metrics: MetricsLogger, stop_vote: StopVote) -> Path | None:
        """Train until the precision changes or the run ends.

        After an error, a background save that is in progress is completed before the error is raised.

        Returns:
            The checkpoint of the last step, or None if save_strategy is "no".

        Raises:
            Stopped: A signal requested a stop. The current step and its checkpoint are complete.
            TrainingError: max_skipped_steps consecutive steps were skipped, the loss of a step is not finite although
                the step was not skipped, or GEMMs no longer run in FP8.
            ReplicaError: The weights differ between ranks.
            SaveError: A save failed, and on_save_failure is "stop" or it was the last save.
        """
        args, engine, samples = self.args, self.engine, self.data.train
        self.metrics, self.stop_vote = metrics, stop_vote
        self.watchdog = Watchdog(args.hang_timeout_s)
        self.saver = Saver(
            engine, self.folder.checkpoints, self.precision, args.save_total_limit, args.keep_every_steps
        )
        self.skip_decision = SkipDecision(engine, self.precision)
        self.health = Health(args.spike_window, args.spike_threshold)
        self.health.load_state_dict(self.state.health)
        self.flops = flops_per_token(self.model.config, args.max_seq_length)
        self.peak = peak_tflops(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
        is_main = dist.get_rank() == 0
        # Without a terminal, disable=None disables the bar, and the log lines show the progress.
        bar = tqdm(
            total=args.max_steps,
            initial=self.state.step,
            unit="step",
            file=sys.stdout,
            leave=False,
            disable=None if is_main else True,
        )
        with self.watchdog, bar:
            self._evaluate_first()
            self.batches = MicroBatches(
                samples, args.per_device_train_batch_size, dist.get_rank(), dist.get_world_size()
            )
            engine.train()
            self.last_save = time.monotonic()
            self._start_clock()
            try:
                while not self._is_over():
                    self._run_step()
                    bar.update(self.state.step - bar.n)  # negative after a rollback
            except Exception:
                # The save belongs to an earlier step, and its threads do not need the main thread. So the save is
                # committed even if only this rank has failed. The watchdog limits the wait.
                try:
                    self._finish_save()
                except Exception as error:  # the original exception decides the exit status
                    logger.warning(f"the background save of an earlier step also failed: {error}")
                raise
            finally:
                self.batches.close()
        return self.checkpoint

    @property
    def checkpoint(self) -> Path | None:
        """Path of the checkpoint of the current step, or None if save_strategy is "no"."""
        if self.state.step == self.first_step:
            return self.first_checkpoint
        return (
            None
            if self.args.save_strategy == "no"
            else self.folder.checkpoints / checkpoint_name(self.state.step)
        )

    # ---------------------------------------------------------------- a step

    def _run_step(self) -> None:
        """Run one optimizer step, then check, log, evaluate and save as configured."""
        args, state, record = self.args, self.state, dict[str, Any]()
        step = self.take_step()
        number = state.step
        if number == self.first_step + 1:
            check_attention(self.model, self.precision, self.report.attention)
        if step.skipped:
            self._report_skip(step, record)
        stop, save_by_time = self._vote()
        if _is_due(number, args.replica_check_steps):
            check_replicas(self.engine, self.precision, number)

        is_last = number == args.max_steps
        ends = not is_last and self._is_over()  # the next step has another precision
        log = ends or self._is_logged(number)
        save = is_last or ends or save_by_time or _is_due(number, args.save_steps)
        evaluate = is_last or _is_due(number, args.eval_steps)
        judge = step.health_check is not None and self.precision.config.on_trouble == "escalate"
        waits = log or save or evaluate or stop or judge  # wait for the GPU

        if waits and self._roll_back(record):
            return
        if waits:
            loss = self._mean_loss(step)
            if log:
                self._log(step, loss, record, ends_phase=is_last or ends)
        if self._check_fp8(step, record):
            save = ends = True
        if evaluate:  # if a stop is requested, this step is evaluated when the run resumes
            stop = state.evaluation_due = stop or not self._evaluate(record)
        if record:
            self._write_metrics(record)
        if (save or stop) and args.save_strategy != "no":
            self._save(is_last=is_last or stop or ends)
        if stop:
            raise Stopped(number, self.checkpoint, resume_option(args))

    def take_step(self) -> Step:
        """Run the forward and backward passes of all micro-batches and the optimizer step.

        This method does not wait for the GPU.
        """
        args, state, engine, stream = self.args, self.state, self.engine, self.data.train
        learning_rate = learning_rate_at(state.step, args)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)  # Muon sets lr_scale
        first_sample = next_position(state.consumed_samples, self.samples, state.skipped_samples)
        loss_sum, share_sum = torch.zeros(2, device=engine.device)
        self.skip_decision.keep_fp8_state()
        # GEMMs in torchao's compiled layers cannot be counted. The startup check has verified these layers.
        counts = self._is_logged(state.step + 1) and uses_transformer_engine(self.model)
        check = check_due(self.model, self.precision, state.step + 1, self.health.fp8_alarms.check_again)
        with count_gemms(self.model, self.precision) if counts else contextlib.nullcontext() as gemms:
            for index in range(self.accumulation):
                self.watchdog.set_position(
                    f"step {state.step + 1}, micro-batch {index + 1} of {self.accumulation}"
                )
                batch = self.batches.get(first_sample, index).to(engine.device)
                with check.collecting() if check and index == 0 else contextlib.nullcontext():
                    loss_sum += self.micro_step(batch, index)
                if batch.documents is not None:
                    share_sum += batch.labelled()
        loss = loss_sum / self.accumulation
        share = share_sum / self.accumulation if args.data.document_mask else None
        state.step += 1
        state.consumed_samples = first_sample + self.samples
        state.consumed_tokens += self.tokens
        skipped = self.skip_decision.is_skipped(state.step)
        if skipped:
            self.health.skipped_in_a_row += 1
        else:
            weights = stream.weights_at(state.consumed_samples - 1)
            norm = engine.get_global_grad_norm()
            self.health.record(state.step, first_sample, weights, loss, share, norm)
        return Step(loss, share, skipped, gemms, check)

    def _is_over(self) -> bool:
        """Return whether this Trainer has finished.

        This is the case if the run has no more steps or the next step needs a different precision.
        """
        state = self.state
        return (
            state.step >= self.args.max_steps
            or state.fallbacks != self.precision.fallbacks
            or phase_at(self.args, state.step, state.consumed_tokens) != self.phase
        )

    def _is_logged(self, number: int) -> bool:
        return number == self.args.max_steps or number % self.args.logging_steps == 0

    def _report_skip(self, step: Step, record: dict[str, Any]) -> None:
        """Log a skipped step, and add the reason to `record`.

        Raises:
            TrainingError: max_skipped_steps consecutive steps were skipped.
        """
        number, most = self.state.step, self.args.max_skipped_steps
        found = samples_record(self.data.train, self.state.consumed_samples - self.samples, self.samples)
        losses = ranks_without_finite_loss(step.loss)
        reason = (
            f"non-finite losses by rank: {losses}" if losses else "the loss is finite, but a gradient is not"
        )
        logger.info(
            f"step {number} was skipped on all ranks without changing weights: {reason}. The step used "
            f"{samples_text(found)}"
        )
        record["skipped"] = {**found, "ranks": list(losses)}
        if self.health.skipped_in_a_row >= most:
            self._write_metrics(record)
            raise TrainingError(
                f"the last {most} steps, up to step {number}, were skipped because their gradients were not "
                f"finite. {FP8_ADVICE}"
            )

    def _vote(self) -> tuple[bool, bool]:
        """Return whether to stop and whether a save is due after save_minutes, with the same result on all ranks.

        Only rank 0 checks the time, because clocks differ. It requests no save while a background save is in progress,
        because the step would have to wait for that save.
        """
        minutes = self.args.save_minutes if self.args.save_strategy != "no" else 0
        is_late = bool(minutes) and time.monotonic() - self.last_save >= 60 * minutes
        due = is_late and dist.get_rank() == 0 and not self.saver.pending
        stop, saving, save_by_time = self.stop_vote.ask(self.saver.busy, due)
        self.watchdog.renew(f"step {self.state.step} is done", after_step=True)
        if self.saver.pending and not saving:
            self._finish_save()
        return stop, save_by_time

    def _roll_back(self, record: dict[str, Any]) -> bool:
        """Log recent spikes of the loss and gradient norm, and roll the run back if on_spike is "rollback".

        The call waits for the GPU.

        Returns:
            Whether the run was rolled back to a checkpoint before the spikes.
        """
        spikes = self.health.find_spikes(self.tokens)
        for spike in spikes:
            samples = samples_record(self.data.train, spike.first_sample, self.samples)
            logger.info(f"spike at step {spike.step}: {spike}. The step used {samples_text(samples)}")
            value = {spike.what: spike.value, "threshold": spike.threshold}
            record.setdefault("spikes_found", []).append({"step": spike.step, **value, **samples})
        if not spikes or self.args.on_spike != "rollback":
            return False
        began = time.perf_counter()
        self._finish_save()  # the rollback may need this checkpoint
        rolls_back = roll_back(
            spikes,
            self.samples,
            root=self.folder.checkpoints,
            engine=self.engine,
            precision=self.precision,
            state=self.state,
            health=self.health,
            metrics=self.metrics,
            stream=self.data.train,
        )
        self.watchdog.renew(f"finished the spike check; continuing after step {self.state.step}")
        if rolls_back:
            self._start_clock()
        else:  # exclude this pause from the speed of the current interval
            self.clock += time.perf_counter() - began
        return rolls_back

    def _mean_loss(self, step: Step) -> float:
        """Return the mean loss of a step over all ranks.

        Collective: all ranks must call this method. The call waits for the GPU.

        Raises:
            TrainingError: The loss is not finite although the step was not skipped, or GEMMs did not run in FP8.
        """
        loss = _mean_over_ranks(step.loss)
        if step.share is not None:
            loss /= _mean_over_ranks(step.share)
        if not (step.skipped or math.isfinite(loss)):
            raise TrainingError(
                f"the loss of step {self.state.step} is {loss}, but the step was not skipped. {FP8_ADVICE}"
            )
        if step.gemms is not None and (problem := step.gemms.problem(self.accumulation)):
            raise TrainingError(f"step {self.state.step}: {problem}")
        return loss

    # ---------------------------------------------------------------- after a step

    def _log(self, step: Step, loss: float, record: dict[str, Any], ends_phase: bool) -> None:
        rate = (self.state.step - self.clock_step) * self.tokens / (time.perf_counter() - self.clock)
        self.speeds.append(rate)
        norm = self.engine.get_global_grad_norm()
        record |= {
            "loss": self.health.interval_loss(),
            "step_loss": loss,
            "grad_norm": None if norm is None else float(norm),
            "learning_rate": learning_rate_at(self.state.step - 1, self.args),
            "tokens_per_second": rate,
            "mfu": mfu(rate / dist.get_world_size(), self.flops, self.peak),
            "memory_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
            "skipped_steps": self.engine.skipped_steps,
            "spikes": self.health.spikes,
        }
        if ends_phase and self.args.precision.schedule:
            record["precision_stage"] = {
                "number": self.phase + 1,
                "tokens_per_second": typical_speed(self.speeds),
                "compute": self.state.precision["compute"],
                "recipe": self.state.precision["recipe"],
            }
        self._start_clock()

    def _check_fp8(self, step: Step, record: dict[str, Any]) -> bool:
        """Evaluate the FP8 health check of a step, if one was due.

        Return whether modules must fall back to a safer recipe.
        """
        number, alarms = self.state.step, self.health.fp8_alarms
        if step.health_check is None:
            # end the alarms of an earlier precision that had health checks
            if alarms.active and not has_health_checks(self.model, self.precision):
                record |= alarms.judge(number, {})
            return False
        # waits for the GPU
        found = record[FP8_HEALTH] = health_record(step.health_check, self.model.config.num_hidden_layers)
        if step.skipped:  # the statistics contain the inf or NaN that caused the skip
            return False
        record |= alarms.judge(number, found)
        fallbacks = find_fallbacks(number, found, alarms, self.model, self.precision)
        if fallbacks:
            self.state.escalations += fallbacks  # in place: run.json refers to this list
            record["fp8_escalations"] = {"changes": fallbacks, "count": len(self.state.escalations)}
        return bool(fallbacks)

    def _evaluate_first(self) -> None:
        """Evaluate before the first step, if necessary.

        An evaluation that a stopped run did not complete is repeated. The weights of model.init_from are evaluated as
        step 0.

        Raises:
            Stopped: A stop was requested during a repeated evaluation. During the evaluation of step 0, a stop request
                takes effect only after the first step.
        """
        state, losses = self.state, dict[str, Any]()
        if not (state.evaluation_due or (state.step == 0 and self.args.model.init_from)):
            return
        if self._evaluate(losses):
            state.evaluation_due = False
            self._write_metrics(losses)
        elif state.evaluation_due:
            raise Stopped(state.step, self.checkpoint, resume_option(self.args))

    def _evaluate(self, record: dict[str, Any]) -> bool:
        """Add the losses on the evaluation data, and the loss of a unigram model, to `record`.

        Returns:
            Whether the evaluation was completed. All ranks return False if a stop is requested during the evaluation.
        """

        def should_stop() -> bool:
            stop, _, _ = self.stop_vote.ask()
            self.watchdog.renew(f"evaluating step {self.state.step}")
            return stop

        losses = held_out_losses(
            self.engine,
            self.precision,
            self.data.held_out,
            self.args.per_device_eval_batch_size or self.args.per_device_train_batch_size,
            should_stop,
        )
        if losses is not None:
            record |= losses | {"unigram_loss": self.data.unigram_loss}
        self._start_clock()
        return losses is not None

    def _save(self, is_last: bool) -> None:
        """Save a checkpoint. With save_async, all saves except the last one of this Trainer run in the background.

        Raises:
            SaveError: See `_finish_save`.
        """
        self.state.health = self.health.state_dict()
        self.state.sources = self.state.sources | self.data.train.drawn_at(self.state.consumed_samples)
        self.watchdog.renew(f"saving step {self.state.step}")
        self._finish_save()
        background = self.args.save_async and not is_last
        self.last_save = time.monotonic()
        self.saver.begin(self.state, background)
        if not background:
            self._finish_save(is_last)
        self.watchdog.renew(
            f"continuing from step {self.state.step}; its checkpoint is saved or still being written in the background"
        )
        self._start_clock()

    def _finish_save(self, is_last: bool = False) -> None:
        """Wait for the pending save, if there is one, and log its result.

        Collective: all ranks must call this method, except after an error.

        Args:
            is_last: Whether this is the last save.

        Raises:
            SaveError: The save failed, and on_save_failure is "stop" or this is the last save.
        """
        if not self.saver.pending:
            return
        self.watchdog.set_position("waiting for the background save")
        try:
            saved = self.saver.finish()
            assert saved is not None
            logger.info(
                f"saved {saved.path} in {saved.seconds:.1f} s (training waited {saved.waited_s:.1f} s)"
            )
        except SaveError as error:
            logger.warning(f"{error}. on_save_failure is {self.args.on_save_failure}")
            if is_last or self.args.on_save_failure == "stop":
                raise
        finally:  # all ranks agree on the result
            self.watchdog.renew("the save is complete")

    def _write_metrics(self, values: dict[str, Any]) -> None:
        self.metrics.log({"step": self.state.step, "tokens": self.state.consumed_tokens, **values})

    def _start_clock(self) -> None:
        """Restart the throughput measurement at the current step."""
        self.clock, self.clock_step = time.perf_counter(), self.state.step


def build_next_trainer(trainer: Trainer) -> tuple[Trainer, dict[str, Any]]:
    """Build a Trainer that resumes from the previous Trainer's last checkpoint in the precision of the next step.

    The memory of the previous Trainer is freed first.

    Returns:
        The new Trainer, and the entry for run.json that describes the change.
    """
    began, phase = time.monotonic(), trainer.phase
    args, data, state, checkpoint = trainer.args, trainer.data, trainer.state, trainer.checkpoint
    with Watchdog(args.hang_timeout_s) as watchdog:
        watchdog.set_position("freeing model and engine")
        release(trainer.engine)
        vars(trainer).clear()
        free_memory()
        following = Trainer(args, data, state, checkpoint, watchdog)
    is_new_phase = following.phase != phase
    change = describe_phase(args.precision, following.phase) if is_new_phase else "precision.on_trouble"
    took_s = round(time.monotonic() - began, 2)
    logger.info(f"{change}: the model and the engine were rebuilt in {took_s:.1f} s")
    return following, {
        "step": state.step,
        "phase": change,
        "new_phase": is_new_phase,
        "took_s": took_s,
        "fp8": following.report.fp8,
        "startup_checks": following.report.lines,
    }


def _is_due(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def _mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks.

    Collective: all ranks must call this function.

    All ranks have the same number of tokens, so this is also the mean over tokens.
    """
    value = value.clone()
    dist.all_reduce(value)
    return float(value / dist.get_world_size())
