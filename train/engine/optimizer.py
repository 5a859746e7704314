"""AdamW's parameter groups and the learning-rate schedules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from train.config.arguments import TrainingArguments
from train.engine.zero import shape_of


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW: matrices (embeddings too) with decay, vectors (norms, biases) without.

    By dimension, never by name, so that fused weights decay like the ones they are made of. A tied weight is
    there once; parameters that need no gradient are left out, and so is an empty group.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if len(shape_of(parameter)) >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, arguments: TrainingArguments) -> torch.optim.AdamW:
    """torch's AdamW (Loshchilov and Hutter, arXiv:1711.05101), fused where the parameters are on CUDA.

    Exactly this class is what DeepSpeed's ZeRO accepts without `zero_allow_untested_optimizer`.
    """
    groups = parameter_groups(model, arguments.weight_decay)
    return torch.optim.AdamW(
        groups,
        lr=arguments.learning_rate,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
        fused=all(parameter.is_cuda for group in groups for parameter in group["params"]),
    )


def learning_rate_at(step: int, arguments: TrainingArguments) -> float:
    """The learning rate of `step`, counted from 0: a pure function, so resuming needs no scheduler state.

    Warmup: learning_rate / warmup_steps at step 0, the peak at step warmup_steps - 1. Then by
    lr_scheduler_type, with `floor` = min_lr_ratio * learning_rate reached at max_steps: cosine (Loshchilov
    and Hutter, arXiv:1608.03983) and linear: from the peak to the floor; constant: the peak;
    warmup_stable_decay (Hu et al., arXiv:2404.06395): the peak, then linear to the floor in the last
    decay_steps.
    """
    peak, kind, end = arguments.learning_rate, arguments.lr_scheduler_type, arguments.max_steps
    if step < arguments.warmup_steps:
        return peak * (step + 1) / arguments.warmup_steps
    if kind == "constant":
        return peak
    decay = arguments.decay_steps if kind == "warmup_stable_decay" else end - arguments.warmup_steps
    if not decay:  # warmup fills the whole run
        return peak
    progress = min(max(step - (end - decay), 0) / decay, 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return peak * (arguments.min_lr_ratio + (1 - arguments.min_lr_ratio) * falling)
