"""Apply precision.auto to a training run: rank 0 measures the candidates, and all ranks use the fastest one.

The chosen values replace the configured ones. A resumed run keeps the values from its checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from transformers import MistralConfig

from model.autotune import Choice, Task, autotune
from model.config import GIB, num_parameters, state_parts_gib
from model.variants import cuda_graphs_problem
from train.checkpoint.files import read_state
from train.checkpoint.resume import checkpoint_to_resume
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.engine.process_group import call_on_rank_0

logger = logging.getLogger(__name__)


def resolve_auto(args: TrainingArguments, config: MistralConfig, world_size: int) -> TrainingArguments:
    """Replace precision.auto with the fastest precision settings, which are found by timing training steps.

    Collective: all ranks must call this function.

    Args:
        args: The resolved training arguments. Without precision.auto, they are returned unchanged.
        config: The model configuration.

    Raises:
        ValueError, PrecisionError: See `autotune`.
        CheckpointError: The checkpoint to resume from is damaged.
    """
    precision = args.precision
    if not precision.auto:
        return args
    if precision.emulated:
        logger.info(
            "precision.auto: no GPU is available for measurements. Keeping the configured precision, CUDA graphs "
            "and attention backend"
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

    choice = call_on_rank_0(choose)
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
        config, stage, world_size, optimizer_bytes=args.precision.optimizer_bytes, optim=args.optim
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
