"""FP8 health check: statistics of the quantized operands of each GEMM.

    check = HealthCheck(model, precision)
    with check.collecting():
        model(ids, labels=labels, is_first_microbatch=True).loss.backward()
    shares = statistics(check.totals())

`intercept_quantizations` in quantize_hooks.py passes each operand to the check, together with the tensor that was
quantized. The check does not change results and draws no random numbers. Only the first quantization of an operand is
counted, because recomputation repeats it. Weights are quantized only in the first micro-batch of a step.

No function here waits for the GPU, so a CUDA graph (model/graphs.py) can contain the check.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from model.checks import pushed
from model.checks.quantize_hooks import Source, intercept_quantizations, quantizer_slots
from model.fp8.modules import fp8_modules, gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.recipes import OPERANDS, RECIPES
from model.te_reference.quantize import FP8_MAX, dequantize

# The last GEMM of an MLP. Its input is the output of SwiGLU, where outliers of FP8 runs grow (arXiv 2409.12517).
DOWN_PROJECTIONS = ("down_proj", "fc2")

# Magnitude above which rounding alone would leave the format: the largest value plus half a step of its binade. Below
# it, clamping gives the same value as rounding.
OVERFLOW = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}

# Totals of an operand: sums over its elements, which ranks add, and one maximum.
SUMS = ("nonzero", "kept", "saturated", "error2", "x2", "x1", "x3", "x4", "elements")
TOTALS = (*SUMS, "range")

# Nested contexts; only the innermost collects. None: no check collects.
_collecting: list[HealthCheck | None] = []


class HealthCheck:
    """Collector of statistics for the operands of all FP8 GEMMs in one forward and backward pass.

    Supports models built from Transformer Engine modules or from the CPU reference implementation.

    Attributes:
        gemms: names of the GEMMs. A LayerNormMLP has <module>.fc1 and <module>.fc2. An lm_head with FP8 gradients
            (model/head.py) is included.
    """

    def __init__(self, model: nn.Module, precision: Precision):
        self.precision = precision
        self._modules: list[tuple[nn.Module, list[str]]] = []
        for name, module in modules_with_operands(model, precision).items():
            parts = [name] if len(matrices(module)) == 1 else [f"{name}.fc1", f"{name}.fc2"]
            self._modules.append((module, parts))
        self.gemms = [name for _, names in self._modules for name in names]
        self._rows = {name: 3 * index for index, name in enumerate(self.gemms)}
        self._seen: dict[int, torch.Tensor] = {}  # by the row in the table
        self._slots: dict[Any, int] = {}
        self._replayed: torch.Tensor | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the totals of all FP8 operands inside this context manager.

        The totals of CUDA graphs that were captured with a health check are included.
        """
        with intercept_quantizations(self.precision.te, self._record_operand), pushed(_collecting, self):
            yield

    def totals(self) -> torch.Tensor:
        """Return the collected totals: float64 [GEMMs, OPERANDS, TOTALS] on the device, NaN for operands that were not
        quantized.
        """
        if self._replayed is not None:
            return self._replayed
        device = next((t.device for t in self._seen.values()), self.precision.device)
        nothing = torch.full((len(TOTALS),), math.nan, dtype=torch.float64, device=device)
        rows = [self._seen.get(row, nothing) for row in range(3 * len(self.gemms))]
        return torch.cat([nothing[:0], *rows]).view(len(self.gemms), len(OPERANDS), len(TOTALS))

    @torch.no_grad()
    def _record_operand(
        self,
        slots: tuple[Any, ...],
        source: Source,
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
    ) -> None:
        """Collect the totals of one operand. This is the callback for intercept_quantizations."""
        if _collecting[-1] is not self:
            return
        if self._slots.keys().isdisjoint(slots):  # a module's first forward creates its quantizers
            self._slots = {
                slot: self._rows[names[gemm]] + operand
                for module, names in self._modules
                for slot, (gemm, operand) in quantizer_slots(self.precision.te, module).items()
            }
        row = next((self._slots[slot] for slot in slots if slot in self._slots), None)
        if row is None or row in self._seen:
            return
        moments = row % 3 == 0 and self.gemms[row // 3].endswith(DOWN_PROJECTIONS)
        self._seen[row] = measure(source, codes, scale_inv, moments)


def modules_with_operands(model: nn.Module, precision: Precision) -> dict[str, nn.Module]:
    """Return the modules of `model` that run at least one GEMM in FP8, keyed by name.

    This includes an lm_head that uses FP8 only for its gradients.
    """
    planned = fp8_modules(model, precision).planned
    return {
        name: module
        for name, module in gemm_modules(model, precision).items()
        if name in planned or getattr(module, "fp8_gradients", False)
    }


def has_health_checks(model: nn.Module, precision: Precision) -> bool:
    """Return whether FP8 health checks run for `model` (precision.health_steps).

    The torchao variant and the mxfp8 recipe do not support health checks.
    """
    reads_key = "health_steps" in RECIPES[precision.config.recipe].knobs
    is_on = precision.config.health_steps > 0 and precision.fp8 and reads_key
    return is_on and bool(modules_with_operands(model, precision))


def check_due(model: nn.Module, precision: Precision, step: int, again: bool = False) -> HealthCheck | None:
    """Return a health check for the first micro-batch of `step`, or None if no check is due or no module runs FP8.

    Args:
        again: whether the last check found a problem. With precision.on_trouble escalate, a second check is due in this
            step to confirm the problem.
    """
    steps = precision.config.health_steps
    again &= precision.config.on_trouble == "escalate"
    is_due = steps and (step % steps == 0 or again)
    return HealthCheck(model, precision) if is_due and has_health_checks(model, precision) else None


def pause_collection() -> AbstractContextManager[None]:
    """Suspend the active health check inside this context manager, for example for warm-up passes before a graph
    capture.
    """
    return pushed(_collecting, None)


def is_collecting() -> bool:
    """Return whether an FP8 health check is collecting statistics."""
    return bool(_collecting) and _collecting[-1] is not None


def add_replay_totals(totals: torch.Tensor) -> None:
    """Copy the totals of a replayed CUDA graph into the active health check.

    The copy is needed because the next replay of the graph overwrites these totals.
    """
    if _collecting and (check := _collecting[-1]) is not None:
        check._replayed = totals.clone()


def measure(source: Source, codes: torch.Tensor, scale_inv: torch.Tensor, moments: bool) -> torch.Tensor:
    """Compute the health-check totals for one quantized operand [M, N]: float64 [TOTALS].

    Sums are computed in float32 within a row (on a GPU within a block) and in float64 across rows.

    Args:
        source: the tensor that was quantized. On a CPU, its kind is always "matrix", because the CPU reference
            implementation does not fuse quantization with other operations.
        codes: float8 [M, N].
        scale_inv: float32 inverse scales, one for the tensor or one per tile, as in QuantizedMatrix. On a GPU, tiles
            have 128 columns.
        moments: whether to compute the sums of x, x^3 and x^4, which are 0 otherwise.
    """
    if codes.is_cuda:
        kernel: Any = importlib.import_module("model.fused.operand_totals")
        *sums, largest = kernel.operand_totals(source, codes, scale_inv, moments)
        return torch.stack([*sums, torch.full_like(largest, codes.numel()), largest / FP8_MAX[codes.dtype]])
    (x,) = source.parts
    if scale_inv.dim():
        scale_inv = dequantize(torch.ones_like(codes, dtype=torch.float32).to(codes.dtype), scale_inv)
    values, magnitude = codes.float(), x.abs()
    kept = _norm(values, 0)
    # keep dimensions: the comparison would round a 0-dimensional tensor to the type of x
    beyond = (scale_inv * OVERFLOW[codes.dtype]).view(*scale_inv.shape or (1, 1))
    saturated = _norm((magnitude > beyond).to(x.dtype), 0)
    largest = _norm(magnitude / scale_inv if scale_inv.dim() else magnitude, math.inf).amax().double()
    largest = largest / (1.0 if scale_inv.dim() else scale_inv.double()) / FP8_MAX[codes.dtype]
    nonzero, size, error = _norm(x, 0), _norm(x, 2), _norm(values.mul_(scale_inv).sub_(x), 2)
    powers = [torch.zeros_like(size)] * 3
    if moments:
        x = x.float()
        square = x.square()
        powers = [x.sum(1), (square * x).sum(1), square.square().sum(1)]
    of_rows = torch.stack([nonzero, kept, saturated, error, size, *powers]).double()
    of_rows[3:5].square_()
    return torch.cat([of_rows.sum(1), torch.full_like(largest, codes.numel())[None], largest[None]])


def _norm(x: torch.Tensor, order: float) -> torch.Tensor:
    """Compute the norm of each row in float32 without copying `x`. Order 0 counts nonzero elements."""
    return torch.linalg.vector_norm(x, order, dim=1, dtype=torch.float32)


def statistics(totals: torch.Tensor) -> torch.Tensor:
    """Compute the health statistics, float64 [..., STATISTICS], from `totals` [..., TOTALS]. Unknown values are NaN.

    - underflow: fraction of the nonzero elements that became 0.
    - saturated: fraction of the nonzero elements that were clamped to a smaller value than rounding would give.
    - range: the largest magnitude times its scale, divided by the format's largest value. A value above 1 was clamped.
      A value far below 1 means that the scale lags behind or that the margin is wide.
    - error: |quantized - x| / |x| in the Euclidean norm.
    - kurtosis: fourth central moment divided by the squared variance, 3 for a normal distribution. Only for the input
      of the last GEMM of an MLP.
    """
    nonzero, kept, saturated, error2, x2, x1, x3, x4, n, largest = totals.unbind(-1)
    mean = x1 / n
    variance = x2 / n - mean**2
    fourth = x4 / n - 4 * mean * x3 / n + 6 * mean**2 * x2 / n - 3 * mean**4
    kurtosis = torch.where(x4 > 0, fourth / variance**2, torch.full_like(n, math.nan))
    found = ((nonzero - kept) / nonzero, saturated / nonzero, largest, (error2 / x2).sqrt(), kurtosis)
    return torch.stack(found, -1)
