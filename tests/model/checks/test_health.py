"""model/checks/health.py: statistics of quantized GEMM operands, compared with float64 statistics of the same operands,
which are computed from the modules' inputs, outputs and gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.build import build_model
from model.checks import health
from model.checks.health import (
    SUMS,
    HealthCheck,
    pause_collection,
    statistics,
)
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.graphs import use_cuda_graphs
from model.te_reference import gemm as reference_gemm
from model.te_reference.quantize import dequantize
from tests.conftest import random_ids, small_config
from tests.model.conftest import BEYOND, LARGEST, backward, gradients, model_of
from tests.model.cuda_graphs import use_tapes

RECIPES = ["delayed", "current", "block"]
VARIANTS = ["te_layer", "te_linear"]
UNDERFLOW, SATURATED, RANGE, ERROR, KURTOSIS = range(5)


one_layer = partial(
    model_of, sizes={"head_dim": 64, "num_hidden_layers": 1, "intermediate_size": 160}, seed=3
)


def share(codes: Tensor, scale_inv: Tensor, source: Tensor) -> list[float]:
    """The statistics but the kurtosis, in float64, of an operand as it was multiplied and what it was made of."""
    x, inverse = source.detach().double(), scale_inv.double()
    one = torch.ones_like(codes.float()).to(codes.dtype)
    inverse = inverse if inverse.dim() == 0 else dequantize(one, scale_inv).double()
    q = codes.float().double()
    there = x != 0
    number = int(there.sum())
    return [
        int((there & (q == 0)).sum()) / number,
        int(((x.abs() / inverse) > BEYOND[codes.dtype]).sum()) / number,
        float((x.abs() / inverse).max() / LARGEST[codes.dtype]),
        float((q * inverse - x).norm() / x.norm()),
    ]


class Multiplied:
    """What the reference multiplies, and what the modules of te_linear are given, in one forward and backward."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gemms: list[tuple[str, Any, Any]] = []
        self.inputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        multiply = reference_gemm.fp8_matmul

        def noted(left: Any, right: Any, dtype: torch.dtype, *, layout: str, fast: bool) -> Tensor:
            self.gemms.append((layout, left, right))
            return multiply(left, right, dtype, layout=layout, fast=fast)

        monkeypatch.setattr(reference_gemm, "fp8_matmul", noted)
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, given, out, name=name: self._note(name, given, out))

    def _note(self, name: str, given: tuple, out: Any) -> None:
        if given and isinstance(out, Tensor) and out.requires_grad:
            self.inputs[name] = given[0].detach().flatten(0, -2)
            out.register_hook(
                lambda gradient: self.gradients.__setitem__(name, gradient.detach().flatten(0, -2))
            )

    def of(self, layout: str) -> list[tuple[Any, Any]]:
        return [entry[1:] for entry in self.gemms if entry[0] == layout]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_statistics_equal_float64_reference(monkeypatch: pytest.MonkeyPatch, recipe: str, form: str) -> None:
    """Of the layers' modules, and of lm_head, whose two gradients alone are FP8 products."""
    model, precision = one_layer("te_linear", {"recipe": recipe, "fp8_format": form})
    backward(model)  # delayed scaling: scales of it are in use below, with amaxes of another batch
    seen, check = Multiplied(model, monkeypatch), HealthCheck(model, precision)
    with check.collecting():
        backward(model, seed=1)
    found = statistics(check.totals())
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in check.gemms}
    forward, (of_head, *to_input) = seen.of("nt"), seen.of("nn")
    assert check.gemms[-1] == "lm_head" and len(check.gemms) == len(forward) + 1 == len(to_input) + 1 == 8
    for row, name in enumerate(check.gemms):
        if name == "lm_head":
            operands = seen.of("tn")[0][1], of_head[1], of_head[0]
        else:
            given, weight = forward[row]
            # q, k, v and gate, up run backward in an order of autograd's
            gradient = next(g for g, w in to_input if w[0].data_ptr() == weight[0].data_ptr())
            operands = given, weight, gradient
        sources = seen.inputs[name], weights[name], seen.gradients[name]
        for column, ((codes, scale_inv), source) in enumerate(zip(operands, sources, strict=True)):
            where = (name, health.OPERANDS[column])
            expected = share(codes, scale_inv, source)
            assert found[row, column, :KURTOSIS].tolist() == pytest.approx(expected, rel=2e-5), where
    x = seen.inputs["model.layers.0.mlp.down_proj"].double()
    central = x - x.mean()
    kurtosis = float(central.pow(4).mean() / central.square().mean() ** 2)
    assert found[..., KURTOSIS].nan_to_num().sum().item() == pytest.approx(kurtosis, rel=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_health_check_changes_no_result(recipe: str) -> None:
    """Losses, gradients and the state of FP8, bit for bit; nor does one remain."""
    results = []
    for looks in (False, True):
        model, precision = one_layer(precision={"recipe": recipe})
        found = []
        for seed in range(2):
            check = HealthCheck(model, precision)
            with check.collecting() if looks else pause_collection():
                found.append(backward(model, seed))
        results.append(
            [*found, *(p.grad for p in model.parameters()), *snapshot_fp8_state(model, precision).values()]
        )
    assert all(map(torch.equal, *results))
    before = check.totals()
    backward(model, seed=5)
    assert torch.equal(check.totals(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_recomputed_operands_are_not_counted(variant: str) -> None:
    totals = []
    for checkpointing in (False, True):
        model, precision = one_layer(
            variant, {"backend": "transformer_engine"}, gradient_checkpointing=checkpointing
        )
        backward(model)
        check = HealthCheck(model, precision)
        with check.collecting():
            backward(model, seed=1)
        totals.append(check.totals())
    assert totals[0].isfinite().all() and torch.equal(
        *(t[..., health.TOTALS.index("elements")] for t in totals)
    )
    # attention's backward on a GPU is not deterministic
    torch.testing.assert_close(*map(statistics, totals), rtol=0.1, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize(
    ("keys", "fallbacks", "gemms"),
    [
        ({}, {}, ["proj", "qkv", "fc1", "fc2", "lm_head"]),
        ({"bf16_modules": ["lm_head", "*.self_attention"]}, {}, ["fc1", "fc2", "lm_head"]),
        ({"fp8_head_gradients": False}, {}, ["proj", "qkv", "fc1", "fc2"]),
        ({}, {"lm_head": "bf16"}, ["proj", "qkv", "fc1", "fc2"]),
    ],
)
def test_modules_without_fp8_are_skipped(keys: dict, fallbacks: dict[str, str], gemms: list[str]) -> None:
    model, precision = one_layer(precision={"recipe": "current", **keys}, fallbacks=fallbacks)
    check = HealthCheck(model, precision)
    with check.collecting(), pause_collection():
        backward(model)
    assert check.totals().isnan().all()
    with check.collecting():
        backward(model)
    assert sorted(name.split(".")[-1].removeprefix("layernorm_") for name in check.gemms) == sorted(gemms)
    assert check.totals().isfinite().all()


def steps_with_checks(graphs: bool, variant: str, cache_weights: bool, recipe: str) -> list[Tensor]:
    """Return totals, losses and gradients of two steps of two micro-batches. The first of each step is checked."""
    precision = Precision(PrecisionConfig(recipe=recipe))
    config = small_config(head_dim=64, num_hidden_layers=1)
    model = build_model(config, variant, precision, seed=3).train()
    backward(model)
    model.zero_grad(set_to_none=True)
    if graphs:
        ids = random_ids(config, 2, 65).to(precision.device)
        check = HealthCheck(model, precision)
        with (
            check.collecting()
        ):  # in the first step of a run that checks each: the capture is none of its business
            inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            use_cuda_graphs(model, precision, inputs, labels, cache_weights, health=True)
        assert check.totals().isnan().all()
    totals, losses = [], []
    for step in range(2):
        check = HealthCheck(model, precision)
        for is_first in (True, False):
            with check.collecting() if is_first else pause_collection():
                first = is_first if cache_weights else None
                losses.append(backward(model, seed=2 * step + is_first, is_first_microbatch=first))
        totals.append(check.totals())
    assert all(t.isfinite().all() for t in totals) and not torch.equal(*totals)
    return [*totals, *losses, *gradients(model).values()]


@pytest.mark.parametrize("cache_weights", [True, False])
@pytest.mark.parametrize("variant", [pytest.param("te_linear", marks=pytest.mark.slow), "te_layer"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_health_check_in_cuda_graph(
    device: str, variant: str, recipe: str, cache_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        use_tapes(monkeypatch)
    torch.use_deterministic_algorithms(True)
    launched, replayed = (
        steps_with_checks(graphs, variant, cache_weights, recipe) for graphs in (False, True)
    )
    assert all(map(torch.equal, launched, replayed))


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_intercepted_codes_equal_gemm_operands(
    monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str, cached: bool
) -> None:
    """Counted on the side: rows of the operands of each GEMM of the forward and of the inputs' gradients."""
    precision = Precision(PrecisionConfig(recipe=recipe, fp8_head_gradients=False))
    import transformer_engine_torch as kernels  # Transformer Engine makes it importable
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor.storage import Float8TensorStorage

    config = small_config(head_dim=64, num_hidden_layers=2)
    model = build_model(config, variant, precision, seed=3).train()
    for _ in range(4):  # as calibration does
        backward(model)
    multiply, forward, gradients = kernels.generic_gemm, [], []

    def kept(operand: Any) -> int | None:
        data = getattr(
            operand, "_data" if isinstance(operand, Float8TensorStorage) else "_rowwise_data", None
        )
        return (
            None
            if data is None
            else int((data.view(TE_DType_To_Torch[operand._fp8_dtype]).float() != 0).sum())
        )

    def noted(*arguments: Any, **options: Any) -> Any:
        a, transposed_a, b, transposed_b = arguments[:4]  # weight and input, or weight and gradient
        if (counted := kept(b)) is not None and not transposed_b:
            (forward if transposed_a else gradients).append((kept(a), counted))
        return multiply(*arguments, **options)

    monkeypatch.setattr(kernels, "generic_gemm", noted)
    check = HealthCheck(model, precision)
    with check.collecting():
        backward(model, seed=1, is_first_microbatch=True if cached else None)
    totals = check.totals()
    found, of_kept = statistics(totals), totals[..., SUMS.index("kept")].long()
    assert totals.isfinite().all()
    assert [tuple(row) for row in of_kept[:, [1, 0]].tolist()] == forward
    assert sorted(of_kept[:, 2].tolist()) == sorted(gradient for _, gradient in gradients)
    # each cast of numbers in range is off by about 2.6 %: a source that is another matrix would be off by 100 %
    assert float(found[..., ERROR].max()) < 0.2
    assert float(found[..., SATURATED].max()) < 0.02
