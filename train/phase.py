"""Build and check the model of a precision.schedule phase, calibrate its FP8 scales, and build its engine.

`resolve_auto` applies precision.auto to a run, before its first phase.

A phase begins at the start of a run, when the next step has another precision, and when a module falls back to a safer
recipe (precision.on_trouble). The model, engine and precision of a phase never change. All ranks must call the
functions at the same points.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import MistralConfig

from model.autotune import Choice, Task, autotune
from model.build import build_model, choose_attention
from model.checks.numerics import choose_kernels
from model.checks.startup import attention_in_use, backend_in_use, check_startup, verify_attention
from model.config import GIB, num_parameters, state_parts_gib
from model.fp8.modules import check_precision, fp8_modules
from model.fp8.precision import HEAD_GRADIENTS_ADVICE, Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import MAX_GRADIENT_ERROR, Gradients, calibrate, decoder_gradients, relative_error
from model.variants import VARIANTS, cuda_graphs_problem
from train.checkpoint.files import RunState, read_state
from train.checkpoint.load import fits_fp8_state, load_checkpoint, read_weights
from train.checkpoint.resume import checkpoint_to_resume, is_partitioned_differently
from train.config.arguments import TrainingArguments
from train.config.ds_config import offloads_optimizer, resolve_ds_config
from train.config.schedule import phase_arguments, phase_at, phase_precisions
from train.data.order import next_position
from train.data.stream import SampleStream
from train.engine import process_group
from train.engine.packed_adamw import check_packed_adamw
from train.engine.step import MicroStep, build_engine, free_memory
from train.monitor.watchdog import Watchdog
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Arguments, configurations and data of a run, which are read once at startup.

    All phases use this object, so editing a file during the run has no effect.
    """

    args: TrainingArguments  # resolved
    config: MistralConfig  # model configuration
    ds_config: dict[str, Any]  # DeepSpeed configuration, which is the same in every phase
    folder: RunFolder
    train: SampleStream
    held_out: dict[str, SampleStream]  # evaluation data, keyed by loss name
    unigram_loss: float  # loss of a unigram model on the samples of eval_loss, in nats per token


def log_lines(*lines: str) -> None:
    for line in lines:
        logger.info(line)


def ranks_by_value(value: str) -> dict[str, list[int]]:
    """Return a dictionary from each value to the ranks that passed this value.

    Collective: all ranks must call this function.
    """
    every = process_group.all_gather(value)
    return {found: [r for r, other in enumerate(every) if other == found] for found in dict.fromkeys(every)}


@dataclass(frozen=True)
class StartupReport:
    """Results of the startup check for the log and run.json."""

    fp8: str  # summary: number of FP8 modules, total number of modules, recipe
    attention: str  # attention backend of this rank
    attention_by_rank: dict[str, list[int]]  # attention backend -> ranks
    lines: list[str]  # log lines of the check


@dataclass(frozen=True)
class Phase:
    """The model, engine and settings with which a Trainer trains one phase of precision.schedule."""

    number: int  # index in precision.schedule; 0 without a schedule
    args: TrainingArguments  # the arguments of this phase
    first_step: int  # steps before this phase
    first_checkpoint: Path | None  # checkpoint of that step, or None for a new run
    model: nn.Module
    precision: Precision
    report: StartupReport
    gradient_error: float | None  # see `calibrate_scales`
    engine: Any  # DeepSpeed engine
    micro_step: MicroStep


def resolve_auto(args: TrainingArguments, config: MistralConfig, world_size: int) -> TrainingArguments:
    """Replace precision.auto with the fastest precision settings. Time training steps to find these settings.

    Collective: all ranks must call this function.

    Args:
        args: The resolved training arguments. Without precision.auto, they are returned unchanged.
        config: The model configuration.

    Raises:
        PrecisionError: The model or GPU does not support the configured precision.
        CheckpointError: The checkpoint to resume from is damaged.
    """
    precision = args.precision
    if not precision.auto:
        return args
    if precision.emulated:
        logger.info(
            "precision.auto: no GPU is available for measurements. Keeping the configured values of "
            "precision.compute, speed.cuda_graphs and model.attention_backend"
        )
        return replace(args, precision=replace(precision, auto=False))
    task = make_task(args, config, world_size)

    def choose() -> Choice:
        checkpoint = checkpoint_to_resume(args)
        if checkpoint is None:
            return autotune(task)
        logger.info(f"precision.auto: reusing the settings stored in checkpoint {checkpoint}")
        saved = read_state(checkpoint).train_config
        return Choice(
            saved["precision"]["compute"], saved["speed"]["cuda_graphs"], saved["model"]["attention_backend"]
        )

    choice = process_group.call_on_rank_0(choose)
    if choice.compute != "fp8" and args.gradient_checkpointing == "mlp":  # "mlp" needs FP8
        args = replace(args, gradient_checkpointing=False)
    return replace(
        args,
        precision=replace(precision, auto=False, compute=choice.compute),
        # The checkpoint may come from a run with CUDA graphs, which this configuration may not support.
        speed=replace(args.speed, cuda_graphs=choice.cuda_graphs and task.graphs_allowed),
        model=replace(args.model, attention_backend=choice.attention_backend),
    )


def make_task(args: TrainingArguments, config: MistralConfig, world_size: int) -> Task:
    """Return the training settings that `autotune` needs for its measurements."""
    ds_config = resolve_ds_config(args, config, world_size)
    stage = ds_config["zero_optimization"]["stage"]
    main_grad = (
        args.speed.main_grad
        and stage == 1
        and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    )
    state = state_parts_gib(
        config,
        stage,
        world_size,
        optimizer_bytes=args.precision.optimizer_bytes,
        optim=args.optim,
        offloads=offloads_optimizer(ds_config),
    )
    # weights and, with main_grad, float32 gradients
    measured_gib = num_parameters(config) * (2 + 4 * main_grad) / GIB
    return Task(
        config=config,
        variant=args.model.variant,
        precision=args.precision,
        batch_size=args.per_device_train_batch_size,
        seq_length=args.max_seq_length,
        speed=args.speed,
        attention_backend=args.model.attention_backend,
        gradient_checkpointing=args.gradient_checkpointing,
        # ZeRO 3 gathers the weights for each micro-batch and keeps no FP8 copies of them.
        accumulation=(args.gradient_accumulation_steps or 1) if stage < 3 else 1,
        main_grad=main_grad,
        graphs_allowed=cuda_graphs_problem(
            args.model.variant, recomputes=args.gradient_checkpointing is True, zero_stage=stage
        )
        is None,
        document_mask=args.data.document_mask,
        other_memory_gib=max(0.0, sum(state.values()) - measured_gib),
    )


def build_phase(run: Run, state: RunState, checkpoint: Path | None, watchdog: Watchdog) -> Phase:
    """Build the model, check it, and build the engine for the next step of a run.

    Collective: all ranks must call this function.

    Args:
        state: The run state before the next step. The field `precision` is updated.
        checkpoint: The checkpoint with this run state, or None for a new run.
        watchdog: Watchdog that ends the run if a startup step hangs.
    """
    number = phase_at(run.args, state.step, state.consumed_tokens)
    args = phase_arguments(run.args, number)
    watchdog.phase("building the model")
    config = copy.deepcopy(run.config)  # transformers adds attributes
    args, numeric_lines = disable_wrong_kernels(args, config)
    model, precision = build_model_and_precision(args, config, checkpoint, state.fallbacks)
    watchdog.phase("running the startup check")
    check_later_phases(run.args, model, precision.device, state.fallbacks)
    report = run_startup_check(args, model, precision, numeric_lines)
    watchdog.phase("building the engine")
    gradient_error = calibrate_scales(run, args, model, precision, state, checkpoint)
    engine, micro_step = build_engine_and_resume(run, args, model, precision, state, checkpoint)
    state.precision = args.to_dict()["precision"]
    return Phase(
        number,
        args,
        state.step,
        checkpoint,
        model,
        precision,
        report,
        gradient_error,
        engine,
        micro_step,
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


def build_model_and_precision(
    args: TrainingArguments,
    config: MistralConfig,
    checkpoint: Path | None = None,
    fallbacks: dict[str, str] | None = None,
) -> tuple[nn.Module, Precision]:
    """Build the model on this rank's device with the configured attention backend, and return it with its precision.

    Args:
        args: The arguments of one phase.
        config: The model configuration.
        checkpoint: The checkpoint to resume from. If None, the weights come from model.init_from.
        fallbacks: Recipe of each module that fell back to a safer recipe, by module name.

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


def calibrate_scales(
    run: Run,
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    state: RunState,
    checkpoint: Path | None,
) -> float | None:
    """Calibrate the FP8 scales on the next micro-batch, unless the checkpoint has FP8 state for this precision.

    For new random weights, also log how much the FP8 gradients differ from the bf16 gradients.

    Args:
        args: The arguments of one phase.

    Returns:
        On rank 0, the relative error of the first FP8 gradients compared with bf16. None on other ranks, or if the
        error was not measured.
    """
    if not precision.fp8 or precision.torchao:
        return None
    if checkpoint is not None and fits_fp8_state(read_state(checkpoint), precision):
        return None
    compares = checkpoint is None and args.model.init_from is None and dist.get_rank() == 0
    passes = precision.config.calibration_passes if precision.has_state else int(compares)
    if not passes:
        return None
    if checkpoint is not None:  # the scales depend on the weights
        model.load_state_dict(read_weights(checkpoint))
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    samples = size * accumulation * dist.get_world_size()
    first = next_position(state.consumed_samples, samples, state.skipped_samples) + dist.get_rank() * size
    ids, labels, documents = run.train.batch(first, size).to(precision.device)
    exact: Gradients = {}
    if compares:
        exact = bf16_gradients(args, run.config, ids, labels, accumulation, documents)
    gradients = calibrate(model, precision, ids, labels, accumulation, documents)
    if precision.has_state:
        logger.info(f"delayed scaling: initial scales computed in {passes} passes over the first micro-batch")
    if not compares:
        return None
    error = relative_error(gradients, exact)
    found = f"the first FP8 gradients of the decoder layers differ from the bf16 gradients by {error:.1%}"
    if error <= MAX_GRADIENT_ERROR:
        logger.info(found)
    else:
        remedy = (
            "Start with a bf16 phase (precision.schedule)"
            if args.model.initialization == "scaled"
            else 'Set model.initialization to "scaled"'
        )
        logger.warning(
            f"{found}, which is more than {MAX_GRADIENT_ERROR:.0%}. The model may train worse than in bf16. "
            f"{remedy}"
        )
    return error


def bf16_gradients(args: TrainingArguments, config: MistralConfig, *micro_batch: Any) -> Gradients:
    """Return the gradients of a newly initialized bf16 model (see `decoder_gradients`), in CPU memory.

    Each gradient is moved to CPU memory as soon as it is computed, because the GPU also holds the model to be trained.
    """
    section = PrecisionConfig(compute="bf16", backend=args.precision.backend)
    in_bf16 = replace(args, precision=section, gradient_checkpointing=True)
    model = build_configured_model(in_bf16, copy.deepcopy(config), Precision(in_bf16.precision))
    gradients: dict[str, torch.Tensor] = {}

    def move(name: str, parameter: nn.Parameter) -> None:
        gradients[name] = parameter.grad.cpu()
        parameter.grad = None

    for name, parameter in model.model.layers.named_parameters():
        if parameter.dim() == 2:
            parameter.register_post_accumulate_grad_hook(partial(move, name))
    decoder_gradients(model, *micro_batch)  # the hooks take the gradients
    del model
    free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return gradients


def build_engine_and_resume(
    run: Run,
    args: TrainingArguments,
    model: nn.Module,
    precision: Precision,
    state: RunState,
    checkpoint: Path | None,
) -> tuple[Any, MicroStep]:
    """Build the DeepSpeed engine and its `MicroStep`, and load the checkpoint into the engine.

    Args:
        args: The arguments of one phase.
    """
    engine = build_engine(model, args, copy.deepcopy(run.ds_config))
    if checkpoint is not None:
        with process_group.suppress_prints():
            is_partitioned = is_partitioned_differently(read_state(checkpoint), state)
            load_checkpoint(engine, checkpoint, precision, is_partitioned)
    micro_step = MicroStep(engine, precision, args)
    log_lines(
        "; ".join(micro_step.notes),
        f"starting from {checkpoint or args.model.init_from or 'random weights'} at step {state.step}, after "
        f"{state.consumed_tokens:,} tokens",
    )
    return engine, micro_step
