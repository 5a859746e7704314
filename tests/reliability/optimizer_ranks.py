"""Test function for ranks.py that compares Muon in DeepSpeed with a plain implementation."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn

from model.conversion import to_hf
from tests.conftest import random_ids
from tests.reliability.launching import build_micro_step
from train.config.arguments import TrainingArguments
from train.data.stream import Batch
from train.engine import zero

Tensors = dict[str, torch.Tensor]  # by Hugging Face's names


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalize a matrix with the Newton-Schulz iteration in float64.

    Source: https://kellerjordan.github.io/posts/muon
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class PlainMuon:
    """Muon for the matrices in the decoder layers and AdamW for all other weights, on one rank in float32."""

    def __init__(self, weights: Tensors, args: TrainingArguments):
        self.weights, self.args = {name: w.clone() for name, w in weights.items()}, args
        self.momentum = {
            n: torch.zeros_like(w) for n, w in weights.items() if w.dim() == 2 and ".layers." in n
        }
        rest = {n: nn.Parameter(w) for n, w in self.weights.items() if n not in self.momentum}
        self.weights |= rest
        groups = [
            {"params": [p for p in rest.values() if p.dim() == d], "weight_decay": decay}
            for d, decay in ((2, args.weight_decay), (1, 0.0))
        ]
        betas = args.adam_beta1, args.adam_beta2
        self.rest, self.adamw = rest, torch.optim.AdamW(groups, args.learning_rate, betas, args.adam_epsilon)

    @torch.no_grad()
    def step(self, gradients: Tensors) -> None:
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        clip = min(1.0, self.args.max_grad_norm / norm)
        for name, parameter in self.rest.items():
            parameter.grad = gradients[name] * clip
        self.adamw.step()
        rate, mu = self.args.learning_rate, self.args.muon_momentum
        for name, momentum in self.momentum.items():
            gradient, weight = gradients[name] * clip, self.weights[name]
            momentum.mul_(mu).add_(gradient, alpha=1 - mu)
            update = orthogonalized(gradient * (1 - mu) + momentum * mu)
            weight.mul_(1 - rate * self.args.weight_decay)
            weight.sub_(rate * 0.2 * math.sqrt(max(weight.shape)) * update)


def _full(engine: Any) -> Tensors:
    """Return the complete float32 weights."""
    if engine.zero_optimization_stage():
        found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    else:
        found = {zero.parameter_name(engine, m.parameters[0]): m.tensor for m in zero.masters(engine)}
    return to_hf({n: t.float() for n, t in found.items()}, engine.module.config)


def _gradients(engine: Any) -> Tensors:
    """Return the reduced gradients that the optimizer receives."""
    sharded = engine.zero_optimization_stage() > 0
    found = {
        name: (safe_get_full_grad(p) if sharded else p.grad).float()
        for name, p in engine.module.named_parameters()
    }
    return to_hf(found, engine.module.config)


def muon_against_plain(
    config: str, variant: str, stage: int, compute: str, half: bool = False
) -> dict[str, float]:
    """Return the errors of the weights after two Muon steps. See `two_steps`."""
    return two_steps(config, variant, stage, compute, half)[0]


def two_steps(
    config: str, variant: str, stage: int, compute: str, half: bool
) -> tuple[dict[str, float], Tensors]:
    """Compare two Muon steps in DeepSpeed with PlainMuon.

    half: run Newton-Schulz in float16, as in training on hardware that supports it, instead of float32.

    Returns: for each weight, the larger error of the two steps, and the weights after the second step. The error is the
    Euclidean norm of the difference from PlainMuon, relative to the norm of PlainMuon's update.
    """
    micro_step, args = build_micro_step(
        config,
        variant=variant,
        precision={"compute": compute},
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        weight_decay=0.5,
        muon_momentum=0.8,
        max_grad_norm=0.3,
        optim="muon",
        deepspeed={
            "zero_optimization": {"stage": stage},
            "data_types": {"grad_accum_dtype": "fp32"} if stage else {},
        },
    )
    engine = micro_step.engine
    plain = PlainMuon(_full(engine), args)
    gradients, step = Tensors(), engine.optimizer.step

    def watched_step(*values: Any) -> None:
        gradients.update(_gradients(engine))
        step(*values)

    engine.optimizer.step = watched_step
    errors: dict[str, float] = {}
    from deepspeed.runtime.zero.muon import (
        original_muon,
    )  # not before train.engine, which leaves it uncompiled

    dtype = torch.float16 if half else torch.float32
    with mock.patch.object(original_muon, "ns_compute_dtype", lambda *_: dtype):
        for number in range(2):
            before = {name: weight.detach().clone() for name, weight in plain.weights.items()}
            for index in range(2):
                seed = number * 10 + index + 100 * dist.get_rank()
                ids = random_ids(engine.module.config, 2, 16, seed).to(engine.device)
                micro_step(Batch(ids, ids), index)
            plain.step(gradients)
            for name, weight in _full(engine).items():
                expected = plain.weights[name].detach()
                error = (weight - expected).norm() / (expected - before[name]).norm()
                errors[name] = max(errors.get(name, 0.0), float(error))
    return errors, _full(engine)
