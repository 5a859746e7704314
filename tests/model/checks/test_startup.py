"""model/checks/startup.py: it counts FP8 GEMMs and checks the selected attention at the sequence length of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from model.checks.startup import (
    StartupCheckError,
    attention_errors,
    check_startup,
    verify_fp8,
)
from model.fp8 import te_backend
from model.fp8.precision import Precision
from tests.conftest import numbers, refused
from tests.model.conftest import backward, model_of

te_linear = partial(model_of, "te_linear")


def test_verify_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks and precision.auto verify by it what they measure."""
    model, precision = te_linear()

    def train(passes: int) -> None:
        with verify_fp8(model, precision, 2):
            for _ in range(passes):
                backward(model)

    train(2)
    with refused(StartupCheckError, code="fp8_gemms") as error:
        train(1)
    assert numbers(error.value)[0] == 14
    monkeypatch.setattr(precision, "autocast", nullcontext)
    with refused(StartupCheckError, code="fp8_gemms"):
        train(2)


@pytest.mark.parametrize(
    ("ran", "asked_for", "code"),
    [
        (te_backend.NO_ATTENTION, "auto", "no_attention"),
        ("unfused", "auto", "unfused_attention"),
        ("unfused", "flash", "unfused_attention"),
        ("unfused", "unfused", None),
        ("fused (cuDNN, F16)", "auto", None),
    ],
)
def test_configured_attention_is_verified(
    monkeypatch: pytest.MonkeyPatch, ran: str, asked_for: str, code: str | None
) -> None:
    model, precision = te_linear()
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: ran)
    with refused(StartupCheckError, code=code) if code else nullcontext():
        check_startup(model, precision, asked_for)


def test_two_cudnn_versions_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, precision = te_linear(
        sizes={"vocab_size": 72}
    )  # no FP8 gradients of lm_head, which a GPU would be asked for
    monkeypatch.setattr(te_backend, "cudnn_versions", lambda: (91400, 91900))
    monkeypatch.setattr(precision.te, "name", "transformer_engine")
    with refused(StartupCheckError, code="two_cudnns", key="CUDNN_HOME") as error:
        check_startup(model, precision)
    assert numbers(error.value) == [91400, 91900]


def change_attention(
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    *,
    forward: Callable = torch.clone,
    backward: Callable = torch.clone,
    place: str = "output",
) -> None:
    """What attention is given as key or value, or returns, goes through `forward`, its gradient through `backward`."""

    class Change(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def, override]
            return forward(x)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
            return backward(gradient)

    right: Any = precision.te.DotProductAttention

    class Attention(right):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
        ) -> torch.Tensor:
            k, v = (Change.apply(x) if place == name else x for name, x in (("key", k), ("value", v)))
            out = super().forward(q, k, v, **options)
            return Change.apply(out) if place == "output" else out

    monkeypatch.setattr(precision.te, "DotProductAttention", Attention)


def test_wrong_attention_gradient_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward is right."""
    model, precision = te_linear()
    right = attention_errors(model.config, precision)
    change_attention(monkeypatch, precision, backward=lambda gradient: gradient * 1.05)
    forward, backward = attention_errors(model.config, precision)
    assert forward == right[0] and backward == pytest.approx(0.05, rel=0.1)
    with refused(StartupCheckError, code="wrong_attention") as error:
        check_startup(model, precision)
    assert numbers(error.value)[-3:] == pytest.approx([forward, backward, 2e-2], rel=0.1)


@pytest.mark.parametrize("place", ["output", "key", "value"])
def test_nan_attention_is_detected(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Its output, or the gradient of its keys or values alone."""
    model, precision = te_linear(sizes={"num_hidden_layers": 1})
    where = "forward" if place == "output" else "backward"
    change_attention(monkeypatch, precision, place=place, **{where: lambda x: x * torch.nan})  # type: ignore[arg-type]
    with refused(StartupCheckError, code="wrong_attention"):
        check_startup(model, precision)


@pytest.mark.parametrize("tokens", [256, 300, 520])
def test_attention_check_uses_the_sequence_length(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """A backend that is wrong only beyond 500 tokens, as one that is chosen only there may be."""
    model, precision = te_linear(sizes={"sliding_window": 128, "num_hidden_layers": 1})
    assert max(attention_errors(model.config, precision, tokens)) < 1e-2
    change_attention(monkeypatch, precision, forward=lambda x: x * 1.05 if x.shape[1] > 500 else x.clone())
    with refused(StartupCheckError, code="wrong_attention") if tokens > 500 else nullcontext():
        check_startup(model, precision, seq_length=tokens)
