"""Run a benchmark in this process and read its report, with a stand-in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_fp8.common.report import Benchmark


def report_of(benchmark: Benchmark, folder: Path, *words: str, status: int = 0) -> dict[str, Any]:
    """Return the report of a command line, which must end with `status` and name no folder of the machine."""
    output = folder / "results" / "report.json"
    assert benchmark.main([*words, "--output", str(output)]) == status
    text = output.read_text()
    assert str(folder) not in text
    return json.loads(text)


def install_stand_in(folder: Path, source: str) -> Path:
    """Write a package "vllm" of version 1.2 to a folder and return the folder."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text(source)
    (folder / "vllm-1.2.dist-info").mkdir()
    (folder / "vllm-1.2.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2\n")
    return folder
