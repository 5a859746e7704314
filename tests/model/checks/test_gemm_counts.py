"""model/checks/gemm_counts.py: FP8 is what ran with FP8 operands, forward and backward; nothing else counts."""

from __future__ import annotations

import pytest
import torch

from model.checks.gemm_counts import count_gemms
from model.checks.startup import StartupCheckError, check_startup
from model.te_reference import gemm
from tests.conftest import numbers, refused
from tests.model.conftest import backward, model_of, without_fp8

RECIPES = ["delayed", "current", "block"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("layouts", "named"),
    [(("nn", "tn"), [6, 0, 18]), (("nn",), [6, 9, 18]), (("tn",), [6, 9, 18]), (("nt",), [])],
)
def test_missing_fp8_gemms_are_detected(
    monkeypatch: pytest.MonkeyPatch, recipe: str, layouts: tuple[str, ...], named: list[float]
) -> None:
    """The modules ran under an autocast and say `fp8`."""
    model, precision = model_of(precision={"recipe": recipe})
    without_fp8(monkeypatch, *layouts)
    with refused(StartupCheckError, code="fp8_gemms") as error:
        check_startup(model, precision)
    assert numbers(error.value) == named


def test_single_missing_gemm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, precision = model_of()
    real = gemm.fp8_gemm

    def second_in_bf16(module, call, x, weight, first, *, gemm=0, **options):  # type: ignore[no-untyped-def]
        if gemm == 1:
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weight)
        return real(module, call, x, weight, first, gemm=gemm, **options)

    monkeypatch.setattr("model.te_reference.linear.fp8_gemm", second_in_bf16)
    with refused(StartupCheckError, code="fp8_gemms") as error:
        check_startup(model, precision)
    assert numbers(error.value) == [2, 1, 2] and "layers.0.layernorm_mlp" in str(error.value)


def test_unplanned_fp8_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, precision = model_of(precision={"compute": "bf16"})
    monkeypatch.setattr(precision, "autocast", model_of()[1].autocast)
    with refused(StartupCheckError, code="fp8_gemms") as error:
        check_startup(model, precision)
    assert numbers(error.value)[0] == 7


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
def test_recomputed_gemms_are_not_counted(variant: str) -> None:
    counts = []
    for checkpointing in (False, True):
        model, precision = model_of(
            variant, gradient_checkpointing=checkpointing, precision={"backend": "transformer_engine"}
        )
        with count_gemms(model, precision) as gemms:
            backward(model)
            backward(model)
        assert not gemms.problem(passes=2)
        assert gemms.problem(passes=1)
        counts.append((gemms.forward, gemms.backward))
    assert counts[0] == counts[1]
