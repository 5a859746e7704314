"""FP8 state of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.fp8.state import reduce_amaxes
from tests.reliability.launching import run_cases


@pytest.mark.process
def test_reduced_amaxes_are_the_largest_of_all_ranks(tmp_path: Path) -> None:
    (ranks,) = run_cases(tmp_path / "ranks", [(2, "reduced_state", {})])
    (small, first), (large, second) = ranks
    assert first == second == large != small
    assert large["0.scaling_fwd.scale"][0] == 448 / 2


def test_nothing_is_reduced_if_all_modules_have_a_fallback() -> None:
    reduce_amaxes({})
