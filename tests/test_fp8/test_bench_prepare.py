"""test_fp8/bench_prepare.py: the comparison is of the same texts and tokens, and a miss shows."""

import json
from pathlib import Path

import pytest

from test_fp8 import bench_prepare
from tests.fixtures import corpus_texts, write_jsonl


@pytest.mark.interpreter  # it counts the processor time of its children
def test_both_sides_encode_the_same(tmp_path: Path, tokenizer_dir: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", corpus_texts(400))
    report = tmp_path / "report.json"
    arguments = ["--tokenizer", str(tokenizer_dir), "--input", str(texts), "--workers", "1"]
    status = bench_prepare.main([*arguments, "--output", str(report)])
    plain, prepared = json.loads(report.read_text())["results"]
    assert plain["documents"] == prepared["documents"] == 400
    assert plain["text_bytes"] == prepared["text_bytes"]
    assert prepared["tokens"] == plain["tokens"] + 2 * 400  # BOS and EOS of each document
    assert status == 1  # of so little text, most of the time is the start


def test_what_is_required(tmp_path: Path) -> None:
    results = [{"tokens_per_core_second": 1e6}, {"tokens_per_core_second": 8.1e5, "workers": 1}]
    assert bench_prepare.misses(results) == []
    results[1]["tokens_per_core_second"] = 7.9e5
    assert len(bench_prepare.misses(results)) == 1
    assert bench_prepare.main(["--tokenizer", str(tmp_path)]) == 2
