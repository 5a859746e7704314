#!/usr/bin/env python3
"""Train a Mistral: arguments -> model -> proof -> data -> engine -> resume -> loop -> export.

    deepspeed train/train.py train_args/train_config_fp8.json [--learning_rate 3e-4] [--precision.recipe current]
    torchrun --nproc-per-node 8 train/train.py train_config_fp8.json
    python train/train.py train_config_tiny.json          (one process)

`--help` lists every key of the configuration.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from train.guard import signals

if __name__ == "__main__":
    signals.install()  # the imports below take seconds

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import MistralConfig

from model.build import build_model
from model.config import ARCHITECTURE, flops_per_token, load_config, num_parameters, state_memory_gib
from model.fp8 import te_backend
from model.fp8.calibration import calibrate
from model.fp8.precision import Precision
from model.proof import ProofError, attention_of, backend_of, prove
from train import autotune
from train.checkpoint.files import CheckpointError, RunState, identity, read_state
from train.checkpoint.load import choose_checkpoint, load_checkpoint, set_aside
from train.checkpoint.resume import resume_state
from train.checkpoint.rollback import left_out_since
from train.checkpoint.save import Saver
from train.config.arguments import TrainingArguments, load_arguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import open_stream
from train.engine.distributed import init_distributed, make_deterministic
from train.engine.step import MicroStep, build_engine, without_prints
from train.evaluation import evaluate_late
from train.export import export, tokenizer_of
from train.guard.replicas import ReplicaError
from train.guard.watchdog import Watchdog
from train.loop import TrainingError, train
from train.metrics import MetricsLogger, peak_tflops, plot_loss
from train.run import Run
from train.run_folder import RunFolder

# What a user can mend: shown as one message, without a traceback. Started again as it is, the run would end so again,
# unless it is the system's fault (OSError).
USER_ERRORS = (
    ValueError,
    OSError,
    ProofError,
    TrainingError,
    ReplicaError,
    CheckpointError,
    te_backend.BackendError,
)


NOT_AS_IT_IS = 2
CRASHED = 1


def main(argv: list[str]) -> int:
    """Exit status: 0 done; signals.STOPPED (75) on request, with a checkpoint; NOT_AS_IT_IS (2): what was asked for
    cannot be done, or the numbers went wrong; CRASHED (1): all else, worth another start from the last checkpoint."""
    try:
        arguments = load_arguments(argv)
        init_distributed()
        run_training(arguments.resolve(dist.get_world_size()))
    except USER_ERRORS as error:
        if os.environ.get("FP8_TRACEBACK") == "1":
            traceback.print_exc()
        status = CRASHED if isinstance(error, OSError) else NOT_AS_IT_IS
        return fail(f"error: {error}\n(FP8_TRACEBACK=1 shows where)", status)
    except signals.Stopped:
        dist.destroy_process_group()
        return signals.STOPPED
    except Exception:
        return fail(traceback.format_exc(), CRASHED)
    dist.destroy_process_group()
    return 0


def fail(message: str, status: int) -> int:
    """Tell why this rank ends, and end it without waiting for ranks that may hang in a collective; the launcher then
    ends those. Rank 0 speaks first: what every rank finds is told once."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank:
        # no step is left that a stop would have to wait for, and it does not change why this rank ends
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        time.sleep(2)
    print(f"rank {rank}: {message}" if world > 1 else message, file=sys.stderr, flush=True)
    if world > 1:
        sys.stdout.flush()
        os._exit(status)
    return status


def run_training(args: TrainingArguments) -> None:
    """One run from its resolved arguments; every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print_line if rank == 0 else (lambda line: None)
    random.seed(args.seed + rank)
    np.random.seed((args.seed + rank) % 2**32)
    torch.manual_seed(args.seed + rank)
    if args.full_determinism:
        make_deterministic()
    args, tuned = autotune.resolve_auto(args, world, say)

    # model
    attention = args.model.attention_backend
    te_backend.choose_attention_backend(attention)
    precision = Precision(args.precision)
    if args.data.document_mask:
        attention = te_backend.document_attention(attention, precision.te, precision.dtype)
        te_backend.choose_attention_backend(attention)
    config = load_config(args.model.config)
    model = build_model(
        config,
        args.model.variant,
        precision,
        seed=args.seed,
        init_from=args.model.init_from,
        gradient_checkpointing=args.gradient_checkpointing,
        compile=args.model.compile,
        speed=args.speed,
        document_mask=args.data.document_mask,
    )

    # data
    train_stream, eval_stream = (
        open_stream(
            args.data.sources,
            args.data.weights,
            args.max_seq_length,
            args.seed,
            split=split,
            document_mask=args.data.document_mask,
        )
        for split in ("train", "eval")
    )
    train_stream.check_vocabulary(config.vocab_size)
    if args.data.verify:
        shards = sum(stream.verify(rank, world) for stream in (train_stream, eval_stream))
        say(f"data.verify: hashes and token ids hold in {shards} shards, the share of rank 0 of {world}")
    if args.max_seq_length > config.max_position_embeddings:
        raise ValueError(
            f"max_seq_length {args.max_seq_length} exceeds the model's max_position_embeddings "
            f"{config.max_position_embeddings}; lower the one or raise the other"
        )

    # what to resume from
    ds_config, notes = resolve_ds_config(args, world)
    output_dir = Path(args.output_dir or "output")
    state = RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        world_size=world,
        zero_stage=ds_config.get("zero_optimization", {}).get("stage", 0),
        train_config=args.to_dict(),
        model_config=model_description(config),
        data_fingerprint=train_stream.fingerprint(),
    )
    resume_from = choose_checkpoint(output_dir / "checkpoints", args.resume_from_checkpoint, say)
    if resume_from is not None:
        saved = read_state(resume_from)
        for line in resume_state(state, saved, resume_from, args.data.allow_changes_on_resume):
            say(line)
        state.health, state.evaluation_due = saved.health, saved.evaluation_due
        if saved.data_fingerprint == state.data_fingerprint:  # else it is another order of samples
            state.skipped_samples = left_out_since(resume_from, saved)

    # proof, before the first step
    flops = flops_per_token(config, args.max_seq_length)
    report = start_report(args, model, precision, flops, train_stream, state)
    for line in [*report, *(f"DeepSpeed: {note}" for note in notes)]:
        say(line)
    for line in prove(model, precision, args.model.attention_backend, args.seed):
        say(line)
    say(attention_of_all_ranks(model, precision))
    if resume_from is None:
        size = args.per_device_train_batch_size
        ids, labels, documents = train_stream.batch(rank * size, size).to(precision.device)
        passes = calibrate(model, precision, ids, labels, args.gradient_accumulation_steps or 1, documents)
        for line in passes:
            say(line)

    # engine
    engine = build_engine(model, args, ds_config)
    if resume_from is not None:
        with without_prints():
            load_checkpoint(engine, resume_from, precision)
    micro_step = MicroStep(engine, precision, args)
    for line in micro_step.notes:
        say(line)
    if resume_from is not None:
        say(f"resumed from {resume_from}: step {state.step}, {state.consumed_tokens:,} tokens")
    else:
        say(f"starting from {args.model.init_from or 'random weights'}")

    # from here on the run writes: whatever could refuse it has had its say. First what makes room
    if rank == 0:
        aside = set_aside(output_dir / "checkpoints", state.step)
        if aside is not None:
            say(f"checkpoints of later steps were moved to {aside}")
    metrics = MetricsLogger(
        output_dir,
        args.to_dict(),
        args.report_to,
        run_name=args.run_name,
        project=args.wandb_project,
        total_steps=args.max_steps,
        start_step=state.step,
        is_main=rank == 0,
    )
    if rank == 0:
        RunFolder(output_dir).stopped.unlink(missing_ok=True)
        write_configurations(output_dir, args, ds_config)
        if tuned is not None:
            autotune.save(tuned, output_dir)
    saver = Saver(engine, output_dir / "checkpoints", precision, args.save_total_limit, metrics.message)
    vote, watchdog = signals.StopVote(args.hang_timeout_s), Watchdog(args.hang_timeout_s)
    run = Run(
        arguments=args,
        output_dir=output_dir,
        engine=engine,
        micro_step=micro_step,
        precision=precision,
        train_stream=train_stream,
        eval_stream=eval_stream,
        metrics=metrics,
        state=state,
        saver=saver,
        flops_per_token=flops,
        stop_vote=vote,
        watchdog=watchdog,
    )
    try:
        with watchdog:
            last = what_is_left(run, resume_from)
    except signals.Stopped as stopped:
        if rank == 0:
            signals.write_stopped(output_dir, stopped)
        metrics.message(str(stopped))
        metrics.close()
        dist.barrier()
        raise
    if rank == 0:
        if last is None:
            metrics.message(
                f"wrote {plot_loss(output_dir)}; save_strategy is no: the trained model is not saved"
            )
        else:
            if not RunFolder(output_dir).is_exported(identity(last)):
                export(last, output_dir / "hf", tokenizer_of(args.data.sources))
            metrics.message(f"wrote {output_dir / 'hf'}, a Hugging Face folder, and {plot_loss(output_dir)}")
    metrics.close()
    dist.barrier()


def what_is_left(run: Run, resumed_from: Path | None) -> Path | None:
    """Train, if there are steps left; returns the last checkpoint, None if there is none."""
    state, steps = run.state, run.arguments.max_steps
    if state.step < steps:
        return train(run)
    run.metrics.message(f"this run has its {steps} steps already; nothing to train")
    if state.evaluation_due:
        evaluate_late(run)
    return resumed_from


def print_line(line: str) -> None:
    print(line, flush=True)


def model_description(config: MistralConfig) -> dict[str, Any]:
    """The configuration without what changes no number (where it was read, by which version)."""
    keys = (
        *ARCHITECTURE,
        "max_position_embeddings",
        "initializer_range",
        "hidden_act",
        "bos_token_id",
        "eos_token_id",
    )
    return {key: getattr(config, key, None) for key in keys}


def write_configurations(output_dir: Path, args: TrainingArguments, ds_config: dict[str, Any]) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, content in (("train_config.json", args.to_dict()), ("ds_config.json", ds_config)):
        (output_dir / name).write_text(json.dumps(content, indent=2) + "\n")


def start_report(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    flops: float,
    train_stream: Any,
    state: RunState,
) -> list[str]:
    """The lines that say what is about to run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    tokens_per_step = args.train_batch_size_tokens or 0
    parameters = num_parameters(model.config)
    memory = state_memory_gib(model.config, state.zero_stage, state.world_size, args.precision.compute)
    lines = [
        args.table(),
        f"{state.world_size} x {device}; Python {platform.python_version()}, {versions}, "
        f"{backend_of(model, precision)}",
        f"model: {args.model.variant}, {parameters / 1e6:,.1f} M parameters, {flops / 1e9:.3f} GFLOP a token at "
        f"{args.max_seq_length} tokens; about {memory:.2f} GiB of weights, gradients and optimizer a rank",
        f"data: {train_stream.describe()}; a unigram model of these tokens has an evaluation loss of "
        f"{train_stream.unigram_loss:.4f}",
        f"{args.max_steps} steps x {tokens_per_step:,} tokens = {args.max_steps * tokens_per_step:,} tokens, "
        f"{args.max_steps * tokens_per_step / train_stream.num_tokens:.2f} times the training data",
    ]
    if train_stream.vocab_size < model.config.vocab_size:
        lines.append(
            f"vocabulary: the tokenizer of the data has {train_stream.vocab_size:,} of the model's "
            f"{model.config.vocab_size:,} ids; the others never occur"
        )
    if args.data.document_mask:
        shards = [shard for source in train_stream.sources for shard in source.shards]
        length = train_stream.num_tokens / sum(shard.documents for shard in shards)
        lines.append(
            f"data.document_mask: attention stays within documents, {length:,.0f} tokens on average, and their last "
            "tokens predict nothing; FLOPs and mfu count attention over whole samples, which is too much"
        )
    peak = peak_tflops(device, "bf16")
    if peak is not None:
        lines.append(
            f"mfu is of {peak:.0f} TFLOP/s, the dense bf16 peak of this GPU's data sheet, also for FP8"
        )
    if args.save_strategy == "no":
        lines.append("save_strategy is no: nothing of the trained model will be saved")
    if precision.emulated:
        lines.append(
            "no GPU work: the CPU reference of the FP8 modules runs; it has their numbers, not their speed"
        )
    return lines


def attention_of_all_ranks(model: nn.Module, precision: Precision) -> str:
    """One line that names each rank's attention, so that one odd node shows."""
    mine = attention_of(model, precision)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    ranks = {backend: [r for r, b in enumerate(every) if b == backend] for backend in dict.fromkeys(every)}
    return "attention by rank: " + "; ".join(f"{backend}: ranks {rs}" for backend, rs in ranks.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
