"""Run a benchmark in this process and read its report."""

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
