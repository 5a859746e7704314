"""What a run consists of, built from its resolved arguments in the order in which train.py asks for it.

streams_for -> starting_point -> model_for -> announce -> engine_for -> open_folder

Every rank calls all of it alike: some of it asks the other ranks.
"""

from __future__ import annotations

import gc
import json
import platform
import random
import shlex
import socket
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

# the optimizer imports it at its first use; here, without garbage collection (train.py, `main`), it takes less
import torch._dynamo
import torch.distributed as dist
from torch import nn

from model.build import build_model, choose_attention
from model.config import (
    flops_per_token,
    load_config,
    load_sizes,
    num_parameters,
    numbers_of,
)
from model.fp8.calibration import calibrate
from model.fp8.machine import describe
from model.fp8.modules import check_precision, fp8_modules
from model.fp8.precision import Precision, PrecisionError
from model.startup_check import attention_in_use, backend_in_use, check_startup
from train.checkpoint.files import RunState, is_of, name_of, read_state
from train.checkpoint.load import (
    choose_checkpoint,
    has_fp8_state_of,
    load_checkpoint,
    read_weights,
    set_aside,
)
from train.checkpoint.resume import is_cut_otherwise, resume_state
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.display import differing, table
from train.config.ds_config import describe_msamp
from train.config.schedule import order_problems, precisions_of, stage_text
from train.data.order import next_position
from train.data.source import check_fit
from train.data.stream import SampleStream, open_held_out, open_stream
from train.engine.distributed import make_deterministic
from train.engine.step import MicroStep, build_engine, without_prints
from train.files import discarded_name, note, size_text, tell
from train.planning.plan import Prediction
from train.planning.setting import Setting
from train.preflight.sizes import disk_plan
from train.record.metrics import MetricsLogger, peak_tflops
from train.record.provenance import origin as origin_of
from train.record.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import MistralConfig

NAMED_FOLDERS = 5  # of those that were set aside


def say(*lines: str) -> None:
    if dist.get_rank() == 0:
        tell(*lines)


def seed(args: TrainingArguments) -> None:
    """The random generators of this rank, and with full_determinism kernels that give the same bits each time."""
    own = args.seed + dist.get_rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    if args.full_determinism:
        make_deterministic()


@dataclass(frozen=True)
class StartupReport:
    """Results of the startup check."""

    fp8: str  # in short: how many modules of how many, and how
    attention: str  # of this rank
    attention_by_rank: dict[str, list[int]]
    lines: list[str]  # as the log has them


# ---------------------------------------------------------------- model and data


def model_for(
    args: TrainingArguments, resume_from: Path | None = None, levels: dict[str, str] | None = None
) -> tuple[nn.Module, Precision]:
    """The model, with the attention that the arguments name; nothing of it has run. Its weights are those of
    model.init_from only in a run that begins. levels: see Precision.

    Raises ValueError: model.config names none; as `build_model`; BackendError: no such Transformer Engine or attention.
    """
    config, precision = load_config(args.model.config), Precision(args.precision, levels=levels)
    choose_attention(
        args.model.attention_backend, args.model.variant, precision, config, args.data.document_mask
    )
    model = build_model(
        config,
        args.model.variant,
        precision,
        seed=args.seed,
        init_from=None if resume_from else args.model.init_from,
        gradient_checkpointing=args.gradient_checkpointing,
        compile=args.model.compile,
        speed=args.speed,
        document_mask=args.data.document_mask,
    )
    return model, precision


def streams_for(
    args: TrainingArguments, config: MistralConfig
) -> tuple[SampleStream, dict[str, SampleStream]]:
    """The training data, and the evaluation data by the name of their loss, which fit the model. Raises DataError,
    ValueError: they do not."""
    data = args.data
    train = open_stream(
        data.sources, data.weights, args.max_seq_length, args.seed, document_mask=data.document_mask
    )
    held_out = open_held_out(train, data.sources, data.eval_sources or {}, args.max_eval_samples)
    check_fit(train.sources, config.vocab_size, config.max_position_embeddings)
    return train, held_out


def verify_data(*streams: SampleStream) -> None:
    """data.verify; each rank takes its share of the shards. Raises DataError."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = sum(stream.verify(rank, world) for stream in streams)
    say(f"data.verify: hashes and token ids hold in {shards} shards, the share of rank 0 of {world}")


# ---------------------------------------------------------------- where it begins


def starting_point(
    args: TrainingArguments, ds_config: dict[str, Any], config: MistralConfig, stream: SampleStream
) -> tuple[RunState, Path | None]:
    """Where the run begins, and the checkpoint that it goes on from. Raises CheckpointError: it is damaged, or of a
    run that this one does not continue; ConfigurationError: it is at a later step than max_steps, or stages do not
    follow each other from there on."""
    state = RunState(
        step=0,
        consumed_samples=0,
        consumed_tokens=0,
        world_size=dist.get_world_size(),
        zero_stage=ds_config.get("zero_optimization", {}).get("stage", 0),
        train_config=args.to_dict(),
        model_config=numbers_of(config),
        data_fingerprint=stream.fingerprint(),
    )
    checkpoints = RunFolder(args.output_dir).checkpoints
    resume_from = choose_checkpoint(checkpoints, args.resume_from_checkpoint)
    if resume_from is not None:
        saved = read_state(resume_from)
        say(*resume_state(state, saved, resume_from, args.allow_changes_on_resume))
    if problems := order_problems(args, state.step, state.consumed_tokens):
        raise ConfigurationError("\n  ".join(problems))
    return state, resume_from


# ---------------------------------------------------------------- what is about to run


def announce(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    stream: SampleStream,
    unigram_loss: float,
    state: RunState,
) -> StartupReport:
    """Log what is about to run, and check it, before the first step.

    Raises StartupCheckError: something else would run; PrecisionError: a later stage of
    precision.schedule could not, or a level of on_trouble."""
    if dist.get_rank() == 0:
        note(table(args))
        tell(differing(args))
    say(*_report(args, model, precision, stream, unigram_loss, state))
    sections = precisions_of(args.precision)
    changes = len(sections) > 1 or sections[0].on_trouble == "escalate"
    for number, section in enumerate(sections if changes else ()):
        try:
            if (later := Precision(section, precision.device, state.levels)).fp8:
                check_precision(model, later)
                if section.on_trouble == "escalate":
                    later.require("block", "escalate takes modules there; set precision.on_trouble to warn")
        except PrecisionError as error:
            stage = stage_text(args.precision, number) if args.precision.schedule else "precision.on_trouble"
            raise PrecisionError(f"{stage}: {error}") from error
    return prove_all(args, model, precision)


def prove_all(args: TrainingArguments, model: nn.Module, precision: Precision) -> StartupReport:
    """Run the startup check and log it. Raises StartupCheckError: something else would run."""
    lines = check_startup(model, precision, args.model.attention_backend, args.seed, args.max_seq_length)
    say(*lines)
    every: list[Any] = [None] * dist.get_world_size()
    proven = attention_in_use(model, precision)
    dist.all_gather_object(every, proven)  # so that one odd node shows
    ranks = {backend: [r for r, b in enumerate(every) if b == backend] for backend in dict.fromkeys(every)}
    say("attention by rank: " + "; ".join(f"{backend}: ranks {rs}" for backend, rs in ranks.items()))
    report = fp8_modules(model, precision)
    fp8 = f"{len(report.planned)}/{len(report.planned) + len(report.kept)} {precision.config.recipe}"
    how = f", {len(report.levels)} of them at another level" if report.levels else ""
    how += ", emulated" if precision.emulated else ""
    return StartupReport(fp8 + how if precision.fp8 else precision.config.compute, proven, ranks, lines)


def _report(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    stream: SampleStream,
    unigram_loss: float,
    state: RunState,
) -> list[str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    tokens_per_step = args.train_batch_size_tokens or 0
    left = max(0, args.max_steps - state.step)
    total, steps = state.consumed_tokens + left * tokens_per_step, f"{state.step + left} steps"
    if state.consumed_tokens != state.step * tokens_per_step:  # a resume with steps of another size
        steps = f"{state.step} steps, which had {state.consumed_tokens:,} tokens in all, and {left}"
    flops = flops_per_token(model.config, args.max_seq_length)
    lines = [
        f"{state.world_size} x {device}; Python {platform.python_version()}, {versions}, "
        f"{backend_in_use(model, precision)}",
        f"model: {args.model.variant}, {num_parameters(model.config) / 1e6:,.1f} M parameters, "
        f"{flops / 1e9:.3f} GFLOP a token at {args.max_seq_length} tokens",
        f"data: {stream.describe()}; a unigram model of these tokens has an evaluation loss of "
        f"{unigram_loss:.4f}",
        f"{steps} x {tokens_per_step:,} tokens = {total:,} tokens, "
        f"{total / stream.num_tokens:.2f} times the training data",
    ]
    if stream.vocab_size < model.config.vocab_size:
        lines.append(
            f"vocabulary: the tokenizer of the data has {stream.vocab_size:,} of the model's "
            f"{model.config.vocab_size:,} ids; the others never occur"
        )
    if args.data.document_mask:
        shards = [shard for source in stream.sources for shard in source.shards]
        length = stream.num_tokens / sum(shard.documents for shard in shards)
        lines.append(
            f"data.document_mask: attention stays within documents, {length:,.0f} tokens on average, and their last "
            "tokens predict nothing; FLOPs and mfu count attention over whole samples, which is too much"
        )
    peak = peak_tflops(device)
    if peak is not None:
        lines.append(
            f"mfu is of {peak:.0f} TFLOP/s, the dense bf16 peak of this GPU's data sheet, also for FP8"
        )
    if args.save_strategy == "no":
        lines.append("save_strategy is no: nothing of the trained model will be saved")
    assert isinstance(args.deepspeed, dict)
    if said := describe_msamp(args.deepspeed):
        lines.append(said)
    variant, most = args.model.variant, args.max_steps
    levels = (own.described_levels(variant, most) for own in precisions_of(args.precision))
    lines += dict.fromkeys(filter(None, levels))
    if precision.emulated:
        lines.append(
            "no GPU work: the CPU reference of the FP8 modules runs; it has their numbers, not their speed"
        )
    return lines


def planned_for(
    args: TrainingArguments, ds_config: dict[str, Any], config: MistralConfig, evaluates: bool
) -> Prediction | None:
    """On rank 0 what the plan expects of this run, which is told; None where there is no GPU, an optimizer that it does
    not count, or a fault in it: a run does not need it."""
    if dist.get_rank() != 0 or not torch.cuda.is_available():
        return None
    try:
        setting = Setting.of(args, ds_config, config, dist.get_world_size())
        if not evaluates:
            setting = replace(setting, eval_batch=0)
        prediction = Prediction.of(setting, torch.cuda.get_device_name())
        say(prediction.line())
    except Exception as error:
        say(f"warning: no plan of this run: {type(error).__name__}: {error}")
        return None
    return prediction


# ---------------------------------------------------------------- engine and run


def engine_for(
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    stream: SampleStream,
    ds_config: dict[str, Any],
    state: RunState,
    resume_from: Path | None,
) -> tuple[Any, MicroStep]:
    """DeepSpeed's engine, with what the checkpoint holds or, of a run that begins or has no FP8 state there, the FP8
    scales of its first micro-batch; and what takes micro-batches through it."""
    if resume_from is None or not has_fp8_state_of(read_state(resume_from), precision):
        if resume_from is not None and precision.has_state:  # scales are of weights
            model.load_state_dict(read_weights(resume_from))
        size = args.per_device_train_batch_size
        first = state.consumed_samples + dist.get_rank() * size
        ids, labels, documents = stream.batch(first, size).to(precision.device)
        say(*calibrate(model, precision, ids, labels, args.gradient_accumulation_steps or 1, documents))
    engine = build_engine(model, args, ds_config)
    if resume_from is not None:
        with without_prints():
            load_checkpoint(engine, resume_from, precision, is_cut_otherwise(read_state(resume_from), state))
    micro_step = MicroStep(engine, precision, args)
    begins = f"starting from {args.model.init_from or 'random weights'}"
    if resume_from is not None:
        begins = f"resumed from {resume_from}: step {state.step}, {state.consumed_tokens:,} tokens"
    say("; ".join(micro_step.notes), begins)
    return engine, micro_step


def clear_memory() -> None:
    """Give back what a model and an engine held that nobody has any more."""
    gc.collect()  # they are cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rehearse(
    args: TrainingArguments,
    stream: SampleStream,
    held_out: dict[str, SampleStream],
    ds_config: dict[str, Any],
    state: RunState,
) -> None:
    """With dry_run, in place of the first step: read what it and an evaluation begin with, and say what would follow.
    Raises DataError."""
    micro, size = args.per_device_train_batch_size, args.train_batch_size_tokens or 0
    first = next_position(state.consumed_samples, size // args.max_seq_length, state.skipped_samples)
    stream.batch(first + dist.get_rank() * micro, micro)
    for each in held_out.values():
        each.batch(0, 1)
    then = f"the run would go on with step {state.step + 1} of {args.max_steps}"
    if state.step >= args.max_steps:
        then = f"the run has its {args.max_steps} steps already"
    sizes, stage = load_sizes(args.model.config), ds_config["zero_optimization"]["stage"]
    say(disk_plan(args, sizes, stage), f"dry_run: {then}, from sample {first:,}; nothing was written")


def open_folder(
    args: TrainingArguments,
    ds_config: dict[str, Any],
    state: RunState,
    resume_from: Path | None,
) -> MetricsLogger:
    """From here on the run writes: whatever could refuse it has had its say. First what makes room; then what this
    start has otherwise than the checkpoint that it goes on from.

    Raises OSError, ValueError: output_dir cannot be written; as MetricsLogger."""
    main, folder = dist.get_rank() == 0, RunFolder(args.output_dir)
    if main:
        aside = set_aside(folder.checkpoints, state.step)
        if aside is not None:
            say(f"checkpoints of later steps were moved to {aside}")
        if folder.exported()[0] > name_of(state.step):  # of what this run is not going on from
            aside = folder.hf.rename(discarded_name(folder.hf))
            say(f"the export of a later step was moved to {aside}")
    metrics = MetricsLogger(folder, args.to_dict(), main, state.step, state.evaluation_due)
    if main:
        folder.stopped.unlink(missing_ok=True)
        for path, content in ((folder.train_config, args.to_dict()), (folder.ds_config, ds_config)):
            path.write_text(json.dumps(content, indent=2) + "\n")
    changed = [change for change in state.changes if change["step"] == state.step]
    notes: dict[str, Any] = {"changes": changed} if changed else {}
    if resume_from is not None and not is_of(resume_from, folder.checkpoints):
        notes["began_at"] = state.began_at
    if notes:
        metrics.log({"step": state.step, "tokens": state.consumed_tokens, **notes})
    if main:
        say(*_set_aside_before(folder))
    return metrics


def _set_aside_before(folder: RunFolder) -> list[str]:
    """What earlier starts have moved out of the way, and how to be rid of it."""
    if not (found := folder.discarded()):
        return []
    kinds = dict.fromkeys(path.with_name(path.name.partition(".discarded-")[0]) for path, _ in found)
    total = size_text(sum(size for _, size in found))
    return [
        f"set aside by this start or earlier ones, {total} in all:",
        *(f"  {size_text(size):>10}  {path}" for path, size in found[-NAMED_FOLDERS:]),
        *([f"  and {len(found) - NAMED_FOLDERS} older ones"] if len(found) > NAMED_FOLDERS else []),
        "  to remove them: rm -r " + " ".join(f"{shlex.quote(str(kind))}.discarded-*" for kind in kinds),
    ]


def start_of(
    args: TrainingArguments,
    model: nn.Module,
    proven: StartupReport,
    stream: SampleStream,
    state: RunState,
    resume_from: Path | None,
) -> dict[str, Any]:
    """What run.json says of this start besides its time; every rank calls it."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if dist.get_rank() != 0:
        return {}
    machine, versions = describe()
    return {
        "step": state.step,
        "tokens": state.consumed_tokens,
        "resumed_from": resume_from and str(resume_from.resolve()),
        **origin_of(args.to_dict()),
        "hosts": {host: [rank for rank, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)},
        "gpus": len(hosts) if torch.cuda.is_available() else 0,
        "machine": machine,
        "versions": versions,
        "model": {
            "config": args.model.config,
            "variant": args.model.variant,
            "parameters": num_parameters(model.config),
        },
        "data": stream.describe(),
        "fp8": proven.fp8,
        "attention": proven.attention_by_rank,
        "proof": proven.lines,
    }
