"""test_fp8/bench_data.py: what it requires, and the program as it is run; and the folders that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_fp8 import bench_data
from test_fp8.common.folders import make_folder, make_sparse_folder
from train.data.format import read_manifest, verify_shard
from train.data.stream import open_stream


def results(rate: float = 2e8, milliseconds: float = 1.0, more_bytes: int = 0) -> list[dict[str, Any]]:
    read = {"what": "read", "boundaries": True, "batch_size": 8, "tokens_per_second": rate}
    corpus = {"what": "corpus", "corpus": "600 B", "ms_per_1000_ids": milliseconds}
    sizes = (400_000, 400_000 + more_bytes)
    return [read, *({**corpus, "memory_of_ids_bytes": size} for size in sizes)]


def test_each_missed_requirement_is_named() -> None:
    assert bench_data.misses(results()) == []
    for missed in ({"rate": 5e7}, {"milliseconds": 20}, {"more_bytes": 1_000_000}):
        assert len(bench_data.misses(results(**missed))) == 1


def test_made_folders_are_what_training_reads(tmp_path: Path) -> None:
    tokens = np.arange(1000) % 400
    folder = make_folder(tmp_path / "a", {"train": [tokens, tokens]}, document_tokens=np.array([3, 5]))
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        verify_shard(folder, manifest, shard)
    assert np.fromfile(folder / "train_00001.ds.index", "<u8").tolist() == [3, 8, 1000]
    stream = open_stream({"a": folder}, None, 16, seed=1)
    assert {tuple(row) for row in stream.batch(0, stream.num_samples)[0].tolist()} >= {tuple(range(16))}
    sparse = make_sparse_folder(tmp_path / "b", 2, 10**9)
    stream = open_stream({"b": sparse}, None, 2048, seed=1, document_mask=True)
    assert stream.num_tokens == 2 * 10**9 and not stream.batch(0, 4)[0].any()
    assert sum(path.stat().st_blocks for path in sparse.iterdir()) * 512 < 1_000_000


@pytest.mark.slow
def test_the_program(tmp_path: Path) -> None:
    """On small data; a loaded machine may miss what is required, which the exit status then says."""
    options = ["--tokens", "2000000", "--rounds", "1", "--batch_size", "8", "--work_dir", str(tmp_path)]
    status = bench_data.main([*options, "--output", str(tmp_path / "data.json")])
    written = json.loads((tmp_path / "data.json").read_text())
    assert status == bool(written["misses"]) and str(tmp_path) not in (tmp_path / "data.json").read_text()
    reads = [r for r in written["results"] if r["what"] == "read"]
    assert [r["boundaries"] for r in reads] == [False, True]
    assert all(r["tokens_per_second"] > 1e6 for r in reads)  # of 100; per-token Python would give less
    small, large = (r for r in written["results"] if r["what"] == "corpus")
    assert large["tokens"] > 595e9 and large["shards"] > 50 * small["shards"] and large["open_s"] > 0
    assert large["ms_per_1000_ids"] > 0 and large["memory_of_ids_bytes"] < 2_000_000
    assert {p.name for p in tmp_path.iterdir()} == {"data.json"}
