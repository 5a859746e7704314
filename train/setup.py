"""Build the parts of a run. train.py and the Trainer call these functions in this order:

open_data -> find_start -> describe_run -> (Trainer: build_model_and_precision -> run_startup_check ->
build_engine_and_resume) -> open_run_folder, or rehearse with dry_run

All functions are collective: every rank must call them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import socket
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

# The optimizer imports it at its first use. Importing it here is faster: garbage collection is off (train.py, `main`).
import torch._dynamo
import torch.distributed as dist
from torch import nn

from model.build import build_model, choose_attention
from model.config import GIB, flops_per_token, load_config, load_sizes, num_parameters, numbers_of
from model.fp8.calibration import calibrate
from model.fp8.machine import describe
from model.fp8.modules import check_precision, fp8_modules
from model.fp8.precision import Precision, PrecisionError
from model.startup_check import attention_in_use, backend_in_use, check_startup
from train.checkpoint.files import RunState, belongs_to, name_of, read_state
from train.checkpoint.load import (
    choose_checkpoint,
    fits_fp8_state,
    load_checkpoint,
    move_later_checkpoints,
    read_weights,
)
from train.checkpoint.resume import is_partitioned_differently, resume_state
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import msamp_settings, resolve_ds_config
from train.config.load import describe_arguments
from train.config.schedule import (
    arguments_of_phase,
    describe_phase,
    phase_at,
    phase_end_problems,
    precisions_of,
)
from train.data.order import next_position
from train.data.source import check_fit
from train.data.stream import SampleStream, open_held_out, open_stream, unigram_loss_of
from train.engine.distributed import from_rank_0, make_deterministic, without_prints
from train.engine.step import MicroStep, build_engine
from train.files import bytes_of, discarded_name
from train.monitor.watchdog import Watchdog
from train.planning.autotune import resolve_auto
from train.planning.plan import Prediction
from train.planning.setting import Setting
from train.preflight.ranks import check_alike, is_on
from train.preflight.sizes import disk_plan
from train.record.history import typical_speed
from train.record.metrics import MetricsLogger
from train.record.provenance import origin as origin_of
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)


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
        make_deterministic()


def check_ranks_and_choose_precision(args: TrainingArguments, watchdog: Watchdog) -> TrainingArguments:
    """Run the preflight checks, seed the random generators, and return the arguments with precision.auto resolved.

    Raises:
        PreflightError: The ranks differ.
    """
    logger.info(f"output: {os.path.abspath(RunFolder(args.output_dir).path)}")
    if is_on(args):
        watchdog.phase("comparing the ranks and measuring their links")
        check_alike(args)
    seed_generators(args)
    watchdog.phase(
        "waiting for the measurements of precision.auto" if args.precision.auto else "opening the data"
    )
    return resolve_auto(args, dist.get_world_size())


def ds_config_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the DeepSpeed configuration. It is the same in every phase."""
    return resolve_ds_config(args, dist.get_world_size())


def bytes_to_read(*places: Path | str | None) -> int:
    """Return the total size in bytes of the files in these folders.

    Only rank 0 reads the sizes, to keep the load on a shared file system low.
    """
    return from_rank_0(lambda: bytes_of(*(Path(place) for place in places if place)))


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    train: SampleStream
    held_out: dict[str, SampleStream]  # evaluation data by name of the loss
    unigram_loss: float  # loss of a unigram model on the samples of eval_loss, nats per token


def open_data(args: TrainingArguments, watchdog: Watchdog) -> RunData:
    """Open the data. With data.verify, each rank verifies its share of the shards.

    Raises:
        DataError, ValueError: The data are damaged or do not fit the model.
    """
    data, config = args.data, load_config(args.model.config)
    train = open_stream(
        data.sources, data.weights, args.max_seq_length, args.seed, document_mask=data.document_mask
    )
    held_out = open_held_out(train, data.sources, data.eval_sources or {}, args.max_eval_samples)
    check_fit(train.sources, config.vocab_size, config.max_position_embeddings)
    unigram_loss = unigram_loss_of(train, held_out["eval_loss"])
    if data.verify:
        streams, rank, world = [train, *held_out.values()], dist.get_rank(), dist.get_world_size()
        watchdog.phase("verifying a share of the data", reads=sum(stream.num_bytes for stream in streams))
        shards = sum(stream.verify(rank, world) for stream in streams)
        logger.info(
            f"data.verify: hashes and token ids of {shards} shards are correct (share of rank 0 of {world})"
        )
    return RunData(train, held_out, unigram_loss)


# ---------------------------------------------------------------- where the run starts


def find_start(
    args: TrainingArguments, stream: SampleStream, watchdog: Watchdog
) -> tuple[RunState, Path | None]:
    """Return the position at which the run starts, and the checkpoint to resume from (None: a new run).

    Raises:
        CheckpointError: The checkpoint is damaged or belongs to a run that this one does not continue.
        ConfigurationError: The checkpoint is past max_steps, or a later phase of precision.schedule has no step.
    """
    state = RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        world_size=dist.get_world_size(),
        zero_stage=ds_config_of(args).get("zero_optimization", {}).get("stage", 0),
        train_config=args.to_dict(),
        model_config=numbers_of(load_config(args.model.config)),
        data_fingerprint=stream.fingerprint(),
    )
    checkpoints, given = RunFolder(args.output_dir).checkpoints, args.resume_from_checkpoint
    read = bytes_to_read(checkpoints, None if given in ("auto", "never") else given)
    watchdog.phase("waiting for rank 0 to verify the checkpoint", reads=read)
    checkpoint = choose_checkpoint(checkpoints, given)
    if checkpoint is not None:
        saved = read_state(checkpoint)
        log_lines(*resume_state(state, saved, checkpoint, args.allow_changes_on_resume))
    if problems := phase_end_problems(args, state.step, state.consumed_tokens):
        raise ConfigurationError(problems=problems)
    return state, checkpoint


# ---------------------------------------------------------------- model, startup check, engine


def build_model_and_precision(
    args: TrainingArguments, checkpoint: Path | None = None, fallbacks: dict[str, str] | None = None
) -> tuple[nn.Module, Precision]:
    """Build the model on this rank's device with the configured attention backend.

    Args:
        args: The arguments of one phase.
        checkpoint: The checkpoint to resume from. None: the weights come from model.init_from.
        fallbacks: Module name -> recipe (see `Precision`).

    Raises:
        ValueError: model.config does not name a model, or see `build_model`.
        BackendError: Transformer Engine or the attention backend is not available.
    """
    config, precision = load_config(args.model.config), Precision(args.precision, levels=fallbacks)
    choose_attention(
        args.model.attention_backend, args.model.variant, precision, config, args.data.document_mask
    )
    model = build_model(
        config,
        args.model.variant,
        precision,
        seed=args.seed,
        init_from=None if checkpoint else args.model.init_from,
        gradient_checkpointing=args.gradient_checkpointing,
        compile=args.model.compile,
        speed=args.speed,
        document_mask=args.data.document_mask,
    )
    return model, precision


@dataclass(frozen=True)
class StartupReport:
    """Results of the startup check."""

    fp8: str  # summary: number of FP8 modules, number of modules, recipe
    attention: str  # attention backend of this rank
    attention_by_rank: dict[str, list[int]]
    lines: list[str]  # as logged


def check_later_phases(
    args: TrainingArguments, model: nn.Module, device: torch.device, fallbacks: dict[str, str]
) -> None:
    """Check that this machine supports all phases of precision.schedule and the fallbacks of precision.on_trouble.

    Raises:
        PrecisionError: A phase or a fallback is not supported.
    """
    sections = precisions_of(args.precision)
    if len(sections) == 1 and sections[0].on_trouble != "escalate":
        return
    for number, section in enumerate(sections):
        try:
            precision = Precision(section, device, fallbacks)
            if precision.fp8:
                check_precision(model, precision)
                if section.on_trouble == "escalate":
                    precision.require(
                        "block", "escalate needs it as a fallback; set precision.on_trouble to warn"
                    )
        except PrecisionError as error:
            phase = (
                describe_phase(args.precision, number) if args.precision.schedule else "precision.on_trouble"
            )
            raise PrecisionError(f"{phase}: {error}") from error


def run_startup_check(args: TrainingArguments, model: nn.Module, precision: Precision) -> StartupReport:
    """Check and log which FP8 GEMMs and which attention backend run.

    Raises:
        StartupCheckError: They differ from the configuration.
    """
    lines = check_startup(model, precision, args.model.attention_backend, args.seed, args.max_seq_length)
    modules = f"modules: {backend_in_use(model, precision)}"
    if precision.emulated:
        modules += "; it computes the same numbers as FP8 on a GPU, but not at its speed"
    log_lines(modules, *lines)
    attention = attention_in_use(model, precision)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, attention)  # shows a node that differs from the others
    ranks = {backend: [r for r, b in enumerate(every) if b == backend] for backend in dict.fromkeys(every)}
    logger.info("attention by rank: " + "; ".join(f"{backend}: ranks {rs}" for backend, rs in ranks.items()))
    if not precision.fp8:
        return StartupReport(precision.config.compute, attention, ranks, lines)
    report = fp8_modules(model, precision)
    count = len(report.planned) + len(report.kept)
    fp8 = f"{len(report.planned)}/{count} {precision.config.recipe}"
    if report.levels:
        fp8 += f", {len(report.levels)} of these with a fallback"
    if precision.emulated:
        fp8 += ", emulated"
    return StartupReport(fp8, attention, ranks, lines)


def build_engine_and_resume(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    stream: SampleStream,
    state: RunState,
    checkpoint: Path | None,
) -> tuple[Any, MicroStep]:
    """Build the DeepSpeed engine and load the checkpoint into it.

    In a new run, or if the checkpoint has no FP8 state for this precision, the FP8 scales are calibrated on the first
    micro-batch.

    Args:
        args: The arguments of one phase.
    """
    saved = None if checkpoint is None else read_state(checkpoint)
    if saved is None or not fits_fp8_state(saved, precision):
        if checkpoint is not None and precision.has_state:  # scales depend on the weights
            model.load_state_dict(read_weights(checkpoint))
        size = args.per_device_train_batch_size
        first = state.consumed_samples + dist.get_rank() * size
        ids, labels, documents = stream.batch(first, size).to(precision.device)
        log_lines(*calibrate(model, precision, ids, labels, args.gradient_accumulation_steps or 1, documents))
    engine = build_engine(model, args, ds_config_of(args))
    if checkpoint is not None and saved is not None:
        with without_prints():
            load_checkpoint(engine, checkpoint, precision, is_partitioned_differently(saved, state))
    micro_step = MicroStep(engine, precision, args)
    begins = f"starting from {args.model.init_from or 'random weights'}"
    if checkpoint is not None:
        begins = f"resumed from {checkpoint}: step {state.step}, {state.consumed_tokens:,} tokens"
    log_lines("; ".join(micro_step.notes), begins)
    return engine, micro_step


# ---------------------------------------------------------------- what is logged


def describe_run(args: TrainingArguments, data: RunData, state: RunState) -> None:
    """Log the configuration, the model and the data."""
    log_lines(*describe_arguments(args), *_description(args, data, state))


def _description(args: TrainingArguments, data: RunData, state: RunState) -> list[str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    config, stream = load_config(args.model.config), data.train
    tokens_per_step = args.train_batch_size_tokens or 0
    left = max(0, args.max_steps - state.step)
    total = state.consumed_tokens + left * tokens_per_step
    flops = flops_per_token(config, args.max_seq_length)
    lines = [
        f"{state.world_size} x {device}; Python {platform.python_version()}, {versions}",
        f"model: {args.model.variant}, {num_parameters(config) / 1e6:,.1f} M parameters, "
        f"{flops / 1e9:.3f} GFLOP per token at {args.max_seq_length} tokens",
        f"data: {stream.describe()}; the evaluation loss of a unigram model of these tokens is "
        f"{data.unigram_loss:.4f}",
        f"{left} of {args.max_steps} steps are left, {tokens_per_step:,} tokens each; the run will see "
        f"{total:,} tokens, {total / stream.num_tokens:.2f} times the training data",
    ]
    if args.data.document_mask:
        shards = [shard for source in stream.sources for shard in source.shards]
        length = stream.num_tokens / sum(shard.documents for shard in shards)
        lines.append(
            f"data.document_mask: attention is restricted to documents, {length:,.0f} tokens on average, and their "
            "last tokens have no label; FLOPs and mfu are too high, since they count attention over whole samples"
        )
    if args.save_strategy == "no":
        lines.append("save_strategy is no: the trained model will not be saved")
    assert isinstance(args.deepspeed, dict)
    if settings := msamp_settings(args.deepspeed):
        lines.append(
            f"the section msamp of the DeepSpeed configuration is replaced by {settings} in precision"
        )
    return lines


def predict(args: TrainingArguments, state: RunState) -> Prediction | None:
    """Return and log the predicted memory and speed of the first phase, on rank 0.

    Returns None on other ranks, without a GPU, or after an error (for example an optimizer that planning does not
    support), since the run does not need the prediction.
    """
    if dist.get_rank() != 0 or not torch.cuda.is_available():
        return None
    try:
        phase_args = arguments_of_phase(args, phase_at(args, state.step, state.consumed_tokens))
        config = load_config(args.model.config)
        setting = Setting.of(phase_args, ds_config_of(args), config, dist.get_world_size())
        prediction = Prediction.of(setting, torch.cuda.get_device_name())
        logger.info(prediction.line())
    except Exception as error:
        logger.warning(f"no prediction for this run: {type(error).__name__}: {error}")
        return None
    return prediction


def compare_with_prediction(prediction: Prediction, speeds: list[float], record: dict[str, Any]) -> None:
    """Compare measured memory and speed with the prediction, in the log and in `record` (run.json).

    An error only logs a warning.
    """
    try:
        speed, peak = typical_speed(speeds), torch.cuda.max_memory_allocated() / GIB
        record["measured"] = {"peak_gib": peak, "tokens_per_second": speed}
        logger.info(prediction.compare(peak, speed))
    except Exception as error:
        logger.warning(f"no comparison with the prediction: {type(error).__name__}: {error}")


# ---------------------------------------------------------------- the run folder


def rehearse(args: TrainingArguments, data: RunData, state: RunState) -> None:
    """Complete a dry run: read the first training and evaluation samples, and log the step that would follow.

    Raises:
        DataError: The samples cannot be read.
    """
    micro, size = args.per_device_train_batch_size, args.train_batch_size_tokens or 0
    first = next_position(state.consumed_samples, size // args.max_seq_length, state.skipped_samples)
    data.train.batch(first + dist.get_rank() * micro, micro)
    for stream in data.held_out.values():
        stream.batch(0, 1)
    then = f"the run would continue with step {state.step + 1} of {args.max_steps}"
    if state.step >= args.max_steps:
        then = f"the run is already at step {state.step}, and max_steps is {args.max_steps}"
    plan = disk_plan(args, load_sizes(args.model.config), state.zero_stage)
    log_lines(plan, f"dry_run: {then}, from sample {first:,}; nothing was written")


def open_run_folder(args: TrainingArguments, state: RunState, checkpoint: Path | None) -> MetricsLogger:
    """Open the run folder for writing, after all checks have passed.

    Moves checkpoints and exports of steps after `checkpoint` to another folder, and records the configuration changes
    of a resume in metrics.jsonl.

    Raises:
        OSError, ValueError: output_dir cannot be written, or see `MetricsLogger`.
    """
    main, folder = dist.get_rank() == 0, RunFolder(args.output_dir)
    if main:
        aside = move_later_checkpoints(folder.checkpoints, state.step)
        if aside is not None:
            logger.info(f"checkpoints of later steps were moved to {aside}")
        if folder.exported()[0] > name_of(state.step):
            aside = folder.hf.rename(discarded_name(folder.hf))
            logger.info(f"the export of a later step was moved to {aside}")
    metrics = MetricsLogger(folder, args.to_dict(), main, state.step, state.evaluation_due)
    if main:
        folder.stopped.unlink(missing_ok=True)
        for path, content in ((folder.train_config, args.to_dict()), (folder.ds_config, ds_config_of(args))):
            path.write_text(json.dumps(content, indent=2) + "\n")
    changed = [change for change in state.changes if change["step"] == state.step]
    notes: dict[str, Any] = {"changes": changed} if changed else {}
    if checkpoint is not None and not belongs_to(checkpoint, folder.checkpoints):
        notes["began_at"] = state.began_at
    if notes:
        metrics.log({"step": state.step, "tokens": state.consumed_tokens, **notes})
    return metrics


def describe_start(
    args: TrainingArguments,
    report: StartupReport,
    stream: SampleStream,
    state: RunState,
    checkpoint: Path | None,
) -> dict[str, Any]:
    """Return the entry of this start in run.json, without its time. {} on ranks other than 0."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if dist.get_rank() != 0:
        return {}
    machine, versions = describe()
    return {
        "step": state.step,
        "tokens": state.consumed_tokens,
        "resumed_from": checkpoint and str(checkpoint.resolve()),
        **origin_of(args.to_dict()),
        "hosts": {host: [rank for rank, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)},
        "gpus": len(hosts) if torch.cuda.is_available() else 0,
        "machine": machine,
        "versions": versions,
        "model": {
            "config": args.model.config,
            "variant": args.model.variant,
            "parameters": num_parameters(load_config(args.model.config)),
        },
        "data": stream.describe(),
        "fp8": report.fp8,
        "attention": report.attention_by_rank,
        "proof": report.lines,
        "escalations": state.escalations,  # the list grows during training
    }
