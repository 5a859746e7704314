"""Execute a training run from startup to export. Read this file from top to bottom.

run -> run_training -> start_run -> build_phase (phase.py) -> Trainer.fit (trainer.py) -> export_last

A Trainer trains one phase of precision.schedule. If the next step needs another precision, `fit` saves and returns, and
`run_training` builds the next phase from that checkpoint. All ranks must call the functions at the same points.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from model.config import flops_per_token, model_name, num_parameters, numeric_settings
from model.fp8.machine import describe, headline
from model.fp8.precision import resolve_head_gradients
from model.variants import VARIANTS
from train.checkpoint.files import (
    RunState,
    checkpoint_name,
    identity,
    is_in_folder,
    read_state,
    trained_tokenizer,
)
from train.checkpoint.load import choose_checkpoint, move_later_checkpoints
from train.checkpoint.resume import resume_option, resume_state
from train.checkpoint.save import Ranks
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.config.load import Inputs, open_inputs, resolve_arguments
from train.config.schedule import describe_phase, phase_end_problems
from train.data.format import count
from train.data.source import check_fit
from train.data.stream import SampleStream, compute_unigram_loss
from train.engine import process_group
from train.engine.step import free_memory, release
from train.export import export
from train.files import unused_backup_path
from train.monitor.lock import hold_lock
from train.monitor.signals import (
    STOPPED,
    Interrupted,
    Stopped,
    StopVote,
    defer_stop,
    write_stopped,
)
from train.monitor.watchdog import Watchdog
from train.phase import Phase, Run, build_phase, log_lines, ranks_by_value, resolve_auto
from train.planning.prediction import describe_prediction
from train.planning.setting import Setting
from train.preflight.gradients import check_gradients
from train.preflight.ranks import check_alike, check_configured_alike, is_enabled
from train.preflight.sizes import disk_plan
from train.record.log import configure_logging, open_log_file
from train.record.metrics import MetricsLogger
from train.record.provenance import RunRecord, origin
from train.record.run_folder import RunFolder
from train.trainer import Trainer

logger = logging.getLogger(__name__)


def run(args: TrainingArguments) -> int:
    """Initialize the process group, lock the run folder and train. Return the exit status, 0 or STOPPED."""
    process_group.init_distributed()
    status = 0
    with contextlib.ExitStack() as folder:
        with Watchdog(args.hang_timeout_s, hang_folder(args)) as watchdog:
            watchdog.set_position("opening the data and comparing the configurations of all ranks")
            args = resolve_arguments(args, dist.get_world_size())
            inputs = process_group.call_on_all_ranks(partial(open_inputs, args))
            check_configured_alike(args, inputs.config)
            watchdog.phase("waiting for run.lock")
            if not args.dry_run:
                folder.enter_context(hold_lock(RunFolder(args.output_dir)))
        try:
            run_training(args, inputs)
        except Stopped:
            status = STOPPED
        is_main = dist.get_rank() == 0
        dist.destroy_process_group()  # the other ranks do not wait for the upload
        if args.push_to_hub and is_main and status == 0 and not args.dry_run:
            upload(RunFolder(args.output_dir).hf, str(args.hub_model_id))
    return status


def hang_folder(args: TrainingArguments) -> Path | None:
    """Return the folder for reports about a hang, or None for a dry run, which writes no files."""
    return None if args.dry_run else RunFolder(args.output_dir).hang


def run_training(args: TrainingArguments, inputs: Inputs) -> None:
    """Train each phase of the run with its own Trainer, then export the model.

    Args:
        args: The resolved arguments.
        inputs: The model configuration and the data of the run.
    """
    began, is_main = round(time.time(), 1), dist.get_rank() == 0
    configure_logging(args.log_level, dist.get_rank(), has_file=True)
    with Watchdog(args.hang_timeout_s, hang_folder(args)) as watchdog:
        run, state, phase = start_run(args, inputs, watchdog)
        args, folder = run.args, run.folder
        watchdog.phase("opening the output folder")
        if args.dry_run:
            plan = disk_plan(args, run.config, state.zero_stage)
            return log_lines(
                plan, f"dry_run: training would start with step {state.step + 1}; no files were written"
            )
        metrics = open_run_folder(run, state, phase.first_checkpoint)
        record = RunRecord(
            folder,
            {"time": began, **describe_start(run, state, phase)},
            lambda: (state.step, state.consumed_tokens),
            {Stopped: "stopped", Interrupted: "interrupted"},
            is_main,
        )
        # describe_start is collective, so rank 0 has created the folder
        open_log_file(folder.log if is_main else folder.logs / f"rank-{dist.get_rank():03d}.log")
        # for the whole run, because each of them holds a process group
        stop_vote, save_ranks = StopVote(), Ranks()
    try:
        with contextlib.closing(metrics), record:
            with defer_stop():
                checkpoint = Trainer(run, phase, state, metrics, stop_vote, save_ranks).fit()
            while state.step < args.max_steps:
                number, change_began = phase.number, time.monotonic()
                release(phase.engine)
                del phase  # before the memory of the next phase is allocated
                phase = build_next_phase(run, state, checkpoint)
                record.add_phase(describe_change(args, state, phase, number, time.monotonic() - change_began))
                with defer_stop():
                    checkpoint = Trainer(run, phase, state, metrics, stop_vote, save_ranks).fit()
            record.part = "export"
            with Watchdog(args.hang_timeout_s, folder.hang) as watchdog:
                watchdog.phase(f"waiting for rank 0 to export {checkpoint}")
                if is_main:
                    export_last(args, folder, checkpoint)
                    metrics.draw_last()
                watchdog.set_position("waiting for all ranks to exit")
                dist.barrier()
    except Stopped as stopped:
        with Watchdog(args.hang_timeout_s, folder.hang) as watchdog:
            watchdog.set_position("waiting for all ranks to stop")
            # ignore a full disk, because the checkpoint exists and the exit status reports the stop
            if is_main:
                with contextlib.suppress(OSError):
                    write_stopped(folder.path, stopped)
            logger.info(str(stopped))
            dist.barrier()
        raise


def start_run(args: TrainingArguments, inputs: Inputs, watchdog: Watchdog) -> tuple[Run, RunState, Phase]:
    """Run the preflight checks and build the first phase, without writing to the run folder.

    Returns:
        The arguments and data of the run, the run state before the next step, and the phase of the next step.

    Raises:
        PreflightError: The software, files or configuration of the ranks differ, or the gradients of the first step are
            wrong.
    """
    train = SampleStream(inputs.train, args.data.weights, args.seed, args.data.document_mask)
    if is_enabled(args):
        watchdog.phase("comparing the ranks and measuring the links between them")
        check_alike(args, train)
    seed_generators(args)
    watchdog.phase("timing precisions for precision.auto")
    if VARIANTS[args.model.variant].te:
        args = replace(args, precision=resolve_head_gradients(args.precision))
    args = resolve_auto(args, inputs.config, dist.get_world_size())
    watchdog.phase("reading the evaluation data")
    run = open_run(args, inputs, train, watchdog)
    state, checkpoint = load_start_position(run, watchdog)
    describe_run(run, state)
    phase = build_phase(run, state, checkpoint, watchdog)
    if is_enabled(args) and state.step < args.max_steps:
        watchdog.phase("checking the gradients of one step")
        check_gradients(args, phase.engine, phase.micro_step, phase.precision, run.train, state)
    return run, state, phase


def build_next_phase(run: Run, state: RunState, checkpoint: Path | None) -> Phase:
    """Free the memory of the previous phase, and build the phase of the next step from the last checkpoint."""
    with Watchdog(run.args.hang_timeout_s, run.folder.hang) as watchdog:
        watchdog.set_position("freeing model and engine")
        free_memory()
        return build_phase(run, state, checkpoint, watchdog)


def describe_change(
    args: TrainingArguments, state: RunState, phase: Phase, before: int, took_s: float
) -> dict[str, Any]:
    """Return the entry for run.json that describes a new phase, and log it.

    Args:
        before: Index of the previous phase in precision.schedule. If the phase was rebuilt because a module fell back
            to a safer recipe, this is also the index of `phase`.
        took_s: Time in seconds to rebuild the model and the engine.
    """
    is_new_phase = phase.number != before
    change = describe_phase(args.precision, phase.number) if is_new_phase else "precision.on_trouble"
    logger.info(f"{change}: the model and the engine were rebuilt in {took_s:.1f} s")
    return {
        "step": state.step,
        "phase": change,
        "new_phase": is_new_phase,
        "took_s": round(took_s, 2),
        "fp8": phase.report.fp8,
        "startup_checks": phase.report.lines,
    }


def export_last(args: TrainingArguments, folder: RunFolder, checkpoint: Path | None) -> None:
    """Export the last checkpoint to hf/, unless there is none or it is already exported. Call on rank 0 only."""
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


def upload(folder: Path, repository: str) -> None:
    """Upload an exported model to the Hugging Face Hub in a separate process. If the upload fails, log a warning.

    The process reads the access token from the environment variable HF_TOKEN.
    """
    arguments = ["upload", repository, str(folder), "--private"]
    logger.info(f"push_to_hub: uploading {folder} to {repository}")
    # -P: without the current folder, whose files may have the names of modules
    command = [sys.executable, "-P", "-m", "huggingface_hub.cli.hf", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        logger.info(f"push_to_hub: uploaded {folder} to {repository}")
        return
    logger.warning(
        f"push_to_hub: the upload failed:\n{done.stderr.strip()}\n"
        f"To repeat the upload: {shlex.join(['hf', *arguments])}"
    )


def seed_generators(args: TrainingArguments) -> None:
    """Seed the random generators of this rank. With full_determinism, also select deterministic kernels."""
    own = args.seed + dist.get_rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    if args.full_determinism:
        process_group.make_deterministic()


def open_run(args: TrainingArguments, inputs: Inputs, train: SampleStream, watchdog: Watchdog) -> Run:
    """Return the `Run` that all phases use: the configurations, the data, and the loss of a unigram model.

    With data.verify, each rank verifies its share of the shards.

    Raises:
        DataError, ValueError: The data is damaged or does not fit the model.
    """
    data, config = args.data, inputs.config
    held_out = {
        loss: SampleStream(sources, None, args.seed, data.document_mask, args.max_eval_samples)
        for loss, sources in inputs.held_out.items()
    }
    check_fit(train.sources, config.vocab_size, config.max_position_embeddings)
    unigram_loss = compute_unigram_loss(train, held_out["eval_loss"])
    if data.verify:
        streams, share = [train, *held_out.values()], (dist.get_rank(), dist.get_world_size())
        watchdog.phase("verifying this rank's share of the data")
        shards = sum(stream.verify(*share) for stream in streams)
        logger.info(f"data.verify: rank 0 verified the hashes and token ids of {count(shards, 'shard')}")
    ds_config = resolve_ds_config(args, config, dist.get_world_size())
    return Run(args, config, ds_config, RunFolder(args.output_dir), train, held_out, unigram_loss)


def load_start_position(run: Run, watchdog: Watchdog) -> tuple[RunState, Path | None]:
    """Choose the checkpoint to resume from, and return the run state before the next step.

    Returns:
        The run state, and the path of the checkpoint. The path is None for a new run.

    Raises:
        CheckpointError: The checkpoint is damaged, or this run cannot resume from it.
        ConfigurationError: The checkpoint is past max_steps, or a later phase of precision.schedule has no steps.
    """
    args = run.args
    state = RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        world_size=dist.get_world_size(),
        zero_stage=run.ds_config["zero_optimization"]["stage"],
        train_config=args.to_dict(),
        model_config=numeric_settings(run.config),
        data_fingerprint=run.train.fingerprint(),
    )
    checkpoints, given = run.folder.checkpoints, args.resume_from_checkpoint
    watchdog.phase("waiting for rank 0 to verify the checkpoint")
    checkpoint = choose_checkpoint(checkpoints, given)
    if checkpoint is not None:
        saved = read_state(checkpoint)
        log_lines(*resume_state(state, saved, checkpoint, args.allow_changes_on_resume))
    run.train.seek(state.consumed_samples, state.sources)
    if problems := phase_end_problems(args, state.step, state.consumed_tokens):
        raise ConfigurationError(problems=problems)
    return state, checkpoint


def describe_run(run: Run, state: RunState) -> None:
    """Log a summary of the configuration, the model and the data."""
    args, config, stream, most = run.args, run.config, run.train, run.args.max_steps
    tokens_per_step = args.train_batch_size_tokens or 0
    total = state.consumed_tokens + (most - state.step) * tokens_per_step
    scales = ", ".join(f"{key} {scale:g}" for key, scale in asdict(args.lr_scales).items() if scale != 1)
    log_lines(
        f"output folder: {run.folder.path.resolve()} (settings in train_config.json, messages in train.log)",
        f"hardware: {state.world_size} ranks, {headline(*describe())}",
        f"model: {model_name(args.model.config)} ({args.model.variant}), {num_parameters(config) / 1e6:,.1f} M "
        f"parameters, {flops_per_token(config, args.max_seq_length) / 1e9:.3f} GFLOP per token",
        f"data: {stream.describe()}",
        f"training: steps {state.step + 1:,} to {most:,} with {tokens_per_step:,} tokens each, {args.optim} with a "
        f"learning rate of up to {args.learning_rate:g}{scales and f' (lr_scales: {scales})'}; {total:,} tokens in "
        f"total, {total / stream.num_tokens:.2f} times the training data",
    )


def predict(run: Run, phase: Phase) -> dict[str, Any] | None:
    """Predict and log the memory and speed of a phase. Return the predicted values, or None without a prediction."""
    setting = Setting.from_run(phase.args, run.ds_config, run.config, dist.get_world_size())
    if not (torch.cuda.is_available() and setting.is_planned):
        return None
    line, values = describe_prediction(setting, torch.cuda.get_device_name())
    logger.info(line)
    return values


def open_run_folder(run: Run, state: RunState, checkpoint: Path | None) -> MetricsLogger:
    """Open the run folder for writing. Call this after all checks have passed.

    On a resume, checkpoints and exports of later steps are moved to another folder, and configuration changes are
    recorded in metrics.jsonl.

    Raises:
        OSError, ValueError: output_dir or a file in it cannot be read or written.
    """
    args, folder, is_main = run.args, run.folder, dist.get_rank() == 0
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
            (folder.ds_config, run.ds_config),
        ):
            path.write_text(json.dumps(content, indent=2) + "\n")
    changed = [change for change in state.changes if change["step"] == state.step]
    notes: dict[str, Any] = {"changes": changed} if changed else {}
    if checkpoint is not None and not is_in_folder(checkpoint, folder.checkpoints):
        notes["began_at"] = state.began_at
    if notes:
        metrics.log({"step": state.step, "tokens": state.consumed_tokens, **notes})
    return metrics


def describe_start(run: Run, state: RunState, phase: Phase) -> dict[str, Any]:
    """Return the entry of this job for run.json, or {} on ranks other than 0. A resumed run adds a new entry.

    Collective: all ranks must call this function.
    """
    args, checkpoint = run.args, phase.first_checkpoint
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
            "parameters": num_parameters(run.config),
        },
        "data": run.train.describe(),
        "fp8": phase.report.fp8,
        "attention": phase.report.attention_by_rank,
        "startup_checks": phase.report.lines,
        "initial_gradient_error": phase.gradient_error,
        "plan": predict(run, phase),
        "escalations": state.escalations,  # the list grows during training
    }
