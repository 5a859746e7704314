"""Check that a benchmark case computes the same model as transformers in bf16.

The weights must be bit-identical. The logits for a short text and the loss of the timed batch may differ by rounding.
The tolerances detect a wrong model, but they do not detect an FP8 recipe that trains badly. To compare recipes, use
compare_convergence.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.config import num_parameters
from model.conversion import to_hf_state_dict
from model.errors import UserError
from train.data.stream import Batch

PROBE_TOKENS = 64
MAX_STEPS = 20
# Allowed relative error of the loss, by precision.compute. The largest errors measured on an H200 in bf16 and FP8 are
# 8.4e-5 and 5.7e-4 for hare_0.4b, 1.1b and 2.0b, and 6.3e-5 and 2.9e-3 for two layers and 128 tokens, where fewer
# errors cancel.
LOSS_TOLERANCE = {"bf16": 3e-4, "fp8": 5e-3}
# Allowed error of the logits, |a - b| / |b| in the Frobenius norm, divided by `Reference.fp8_error`, because rounding
# errors depend on the model. Two unrelated models have an error of 1.4. With random weights (initialization "scaled"),
# fp8_error is 0.033 to 0.035 for 2 to 8 layers. Divided by it, the measured errors are 0.15 to 0.24 in bf16, 0.99 to
# 1.04 in FP8 with delayed scaling, and 1.2 to 1.3 in bf16 with half of the rope_theta.
LOGITS_TOLERANCE = {"bf16": 0.3, "fp8": 1.25}


class DifferentModel(UserError):
    """An error raised if the model of a benchmark case differs from the transformers model."""


@dataclass
class Reference:
    """The results of the transformers model in bf16, to which all benchmark cases are compared.

    All tensors are on the CPU. weights: the weights by their Hugging Face name. logits: float32 logits for the first
    tokens of the batch, [1, PROBE_TOKENS, vocabulary]. losses: the loss of each sample, in nats per token. fp8_error:
    the relative error of logits that are computed with GEMM operands rounded to e4m3.
    """

    weights: dict[str, Tensor]
    logits: Tensor
    losses: list[float]
    fp8_error: float = 0.0

    @classmethod
    def compute(cls, model: nn.Module, input_ids: Tensor, labels: Tensor) -> Reference:
        """Compute the reference results with the transformers model.

        input_ids, labels: int64 tensors [batch, sequence] on the model's device.
        """
        weights = {name: tensor.cpu() for name, tensor in to_hf_state_dict(model).items()}
        if input_ids.is_cuda:  # pin the weights, because each case copies them back to the GPU
            weights = {name: tensor.pin_memory() for name, tensor in weights.items()}
        with torch.no_grad():
            pairs = zip(input_ids.split(1), labels.split(1), strict=True)
            losses = [float(model(ids, labels=targets).loss) for ids, targets in pairs]
        logits = probe_logits(model, input_ids)
        return cls(weights, logits, losses, relative_error(logits_in_e4m3(model, input_ids), logits))

    def logits_tolerance(self) -> dict[str, float]:
        """Return the maximum allowed relative error of the logits for each value of precision.compute."""
        return {compute: factor * self.fp8_error for compute, factor in LOGITS_TOLERANCE.items()}


@dataclass
class Conditions:
    """The measurement conditions that are the same for all benchmark cases.

    config: the model configuration. reference: the results of the transformers model. batch: samples of token ids. A
    micro-batch consists of the first samples of this batch. seconds: how long to time a case. steps: the minimum number
    of steps to time.
    """

    config: Any
    reference: Reference
    batch: Batch
    seconds: float
    steps: int = 1

    def count_steps(self, ms: float) -> int:
        """Return the number of steps to time, given the time per step in milliseconds."""
        return max(self.steps, min(MAX_STEPS, round(self.seconds * 1e3 / ms)))


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def logits_in_e4m3(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Return the logits of the transformers model with GEMM operands rounded to e4m3.

    The logits are for the same tokens as in `probe_logits`. The inputs and weights of every linear layer except lm_head
    are rounded, with one scale per tensor.
    """

    def rounded(x: Tensor) -> Tensor:
        scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().max().float()
        return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    hooks = [m.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),)) for m in linears.values()]
    weights = {f"{name}.weight": rounded(module.weight) for name, module in linears.items()}
    with torch.no_grad():
        out = torch.func.functional_call(model, weights, (input_ids[:1, :PROBE_TOKENS],))
    for hook in hooks:
        hook.remove()
    return out.logits.float().cpu()


def probe_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Return the logits for the first PROBE_TOKENS tokens of `input_ids`.

    The model is not compiled, because compiling for this shape takes a minute.
    """
    tokens = input_ids[:1, :PROBE_TOKENS]
    with torch.compiler.set_stance("force_eager"):
        model(tokens)  # delayed scaling has no scales before the first pass
        with torch.no_grad():
            return model(tokens).logits.float().cpu()


def check_same_model(
    model: nn.Module, weights: Mapping[str, Tensor], compute: str, reference: Reference, input_ids: Tensor
) -> float:
    """Check that a model equals the transformers model, and return the relative error of its logits.

    model: the model of a benchmark case. weights: the weights of this model by their Hugging Face name. compute: the
    value of precision.compute for the case. reference: the results of the transformers model. input_ids: int64 [batch,
    sequence].

    Raises DifferentModel if the weights differ or the error of the logits exceeds the tolerance.
    """
    parameters, expected = sum(p.numel() for p in model.parameters()), num_parameters(model.config)
    if parameters != expected:
        raise DifferentModel(
            f"the model has {parameters:,} parameters, but its configuration requires {expected:,}"
        )
    if different := different_weights(weights, reference.weights):
        raise DifferentModel(
            f"{len(different)} weights differ from the weights of the transformers model; the first are "
            f"{', '.join(different[:3])}"
        )
    error = relative_error(probe_logits(model, input_ids), reference.logits)
    allowed = reference.logits_tolerance()[compute]
    if not error <= allowed:
        raise DifferentModel(
            f"the relative error of the logits is {error:.1e}, but at most {allowed:.1e} is allowed in "
            f"{compute}"
        )
    return error


def different_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights that are missing, unknown or not bit-identical to the expected weight."""
    different = set(expected.keys() ^ weights.keys())
    for name in expected.keys() & weights.keys():
        ours, theirs = weights[name], expected[name]
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs.to(ours.device)):
            different.add(name)
    return sorted(different)


def loss_error(loss: float, compute: str, reference: Reference, samples: int) -> float:
    """Return the relative error of a loss compared with the transformers model.

    loss: the mean loss of the first samples of the batch. samples: the number of these samples. Raises DifferentModel
    if the error exceeds the tolerance.
    """
    expected = sum(reference.losses[:samples]) / samples
    error = abs(loss - expected) / expected
    if not error <= LOSS_TOLERANCE[compute]:
        raise DifferentModel(
            f"the loss is {loss:.5f}, but the transformers model in bf16 has a loss of {expected:.5f}. The "
            f"relative error is {error:.1e}, but at most {LOSS_TOLERANCE[compute]:.0e} is allowed in {compute}."
        )
    return error
