"""test_fp8/bench_decode.py: cases for both precisions, and a report that says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_fp8.bench_decode import BENCHMARK
from tests.test_fp8.running import report_of

SMALL = ["--batches", "1", "3", "--prompt", "4", "--cache", "8", "--rounds", "1", "--transformers_batches"]


def test_a_report_with_both_precisions(tmp_path: Path) -> None:
    prefill = ["--prefill_batch", "2", "--prefill_length", "16"]
    report = report_of(BENCHMARK, tmp_path, *SMALL, *prefill)
    found = [(r["what"], r["row"], r["batch"]) for r in report["results"]]
    decoding = [("decode", row, batch) for batch in (1, 3) for row in ("fp8", "bf16")]
    rest = [("prefill", "fp8", 2), ("prefill", "bf16", 2)]
    assert found == [*decoding, *rest]
    fp8, bf16 = report["results"][2:4]
    assert fp8["tokens_per_s"] == pytest.approx(3 / (fp8["ms"] / 1000))
    assert (
        fp8["to_bf16"] == pytest.approx(fp8["tokens_per_s"] / bf16["tokens_per_s"]) and bf16["to_bf16"] == 1
    )
    assert fp8["weights_gib"] < bf16["weights_gib"]
    assert "--batches 1 3" in report["command"]


def test_a_cache_without_room_is_refused() -> None:
    assert BENCHMARK.main(["--prompt", "8", "--cache", "8"]) == 2
    assert BENCHMARK.main(["--prefill_length", "1000000"]) == 2
