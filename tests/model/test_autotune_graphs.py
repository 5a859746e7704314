"""A graph is compared with launched passes before precision.auto measures it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.autotune import measure


def capture(
    monkeypatch: pytest.MonkeyPatch,
    again: dict[str, torch.Tensor],
    *replayed: dict[str, torch.Tensor],
    cycle: int | None = None,
) -> tuple[Any, list[tuple[str, int]]]:
    """A step that was captured, whose launched passes give ones, then `again`, and whose replayed ones give these, the
    last one again and again; and the passes that were run."""
    ran: list[tuple[str, int]] = []
    left = list(replayed)
    ones = {name: torch.ones_like(tensor) for name, tensor in again.items()}

    class Step(measure._Step):
        def __init__(self) -> None:
            self.forward, self.cycle, self.within, self.captured = "launched", cycle, {}, False  # type: ignore[assignment]
            self.model: Any = SimpleNamespace(forward="launched", zero_grad=lambda set_to_none: None)
            self.precision = self.ids = self.labels = None  # type: ignore[assignment]

        def _results(self, forward: Any, before: Any, index: int) -> dict[str, torch.Tensor]:
            assert before == {"FP8 state": "of before"}
            ran.append((forward, index))
            if forward == "replayed":
                return left.pop(0) if len(left) > 1 else left[0]
            return ones if len(ran) == 1 else again

    def use_cuda_graphs(
        model: Any, precision: Any, ids: Any, labels: Any, cached: bool, documents: Any
    ) -> None:
        assert cached == (cycle is not None) and documents is None
        model.forward = "replayed"

    monkeypatch.setattr(measure, "use_cuda_graphs", use_cuda_graphs)
    monkeypatch.setattr(measure, "snapshot_fp8_state", lambda *_: {"FP8 state": "of before"})
    step = Step()
    step.capture()
    return step, ran


def off_by(error: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"the loss": torch.ones(1), "weight": torch.ones(1, dtype=dtype) * (1 + error)}


@pytest.mark.parametrize(
    ("noise", "right", "wrong", "dtype"),
    [
        (0.0, 0.0, 1e-2, torch.float32),
        (0.0, 9e-7, 2e-6, torch.float32),  # sums in another order, in a float32 buffer
        (0.0, 0.0, 2**-7, torch.bfloat16),
        (1e-3, 3.9e-3, 4.2e-3, torch.float32),  # four times what two launched passes differ by
    ],
)
def test_a_graph_may_differ_as_launched_passes_do(
    monkeypatch: pytest.MonkeyPatch, noise: float, right: float, wrong: float, dtype: torch.dtype
) -> None:
    step, ran = capture(monkeypatch, off_by(noise, dtype), off_by(right, dtype))
    assert step.captured and ran == [("launched", 0), ("launched", 0), ("replayed", 0)]
    said = f"with CUDA graphs weight is off by {wrong:.1e} relative, launched again by at most {noise:.1e}"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        capture(monkeypatch, off_by(noise, dtype), off_by(wrong, dtype))
    lacking, nan = {"the loss": torch.ones(1)}, off_by(float("nan"), dtype)
    for other, words in ((lacking, "off by inf"), (nan, "off by nan")):
        with pytest.raises(RuntimeError, match=f"weight is {words}"):
            capture(monkeypatch, off_by(noise, dtype), other)


def test_a_graph_is_tried_again_before_it_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last bit of a largest value, a scale of all codes, may differ once; a wrong graph is always wrong."""
    step, ran = capture(monkeypatch, off_by(1e-4), off_by(3.4e-3), off_by(3.4e-3), off_by(3e-4))
    assert step.captured and [kind for kind, _ in ran] == ["launched", *["launched", "replayed"] * 3]
    with pytest.raises(
        RuntimeError, match="weight is off by 3.4e-03 relative, launched again by at most 1.0e-04"
    ):
        capture(monkeypatch, off_by(1e-4), off_by(3e-3), off_by(3e-3), off_by(3.4e-3), off_by(0.0))


def test_each_kind_of_pass_is_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a step, which quantizes the weights, and a later one."""
    _, ran = capture(monkeypatch, off_by(0.0), off_by(0.0), cycle=4)
    assert ran == [(kind, index) for index in (0, 1) for kind in ("launched", "launched", "replayed")]
