"""Pytest plugin for ./run_tests.sh --gpu that treats a skipped test as a failure and writes a report.

All required hardware is available on a GPU node, so a skipped test would hide a missing check. With --results FOLDER,
the plugin writes FOLDER/gpu_tests.json, or FOLDER/gpu_tests_one_gpu.json on a node with one GPU. The report contains
the commit, the date, the hardware, the software versions, and the passed, failed and skipped tests. It is committed to
the repository to document when the GPU tests last passed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="folder for the report")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a pytest-xdist worker runs only a part of the tests
        return
    config.pluginmanager.register(GPURun(config.getoption("--results"), config))
    # print the summary if the time limit is reached
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class GPURun:
    def __init__(self, folder: Path | None, config: pytest.Config):
        self.folder, self.config, self.start = folder, config, time.monotonic()

    def reports(self, *categories: str) -> list[Any]:
        """Return the test reports in the given categories of pytest's summary.

        Categories are, for example, "passed" and "skipped". The category "" contains successful setups and teardowns.
        """
        stats = self.config.pluginmanager.get_plugin("terminalreporter").stats  # type: ignore[union-attr]
        return [report for category in categories for report in stats.get(category, [])]

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.folder:
            # ignore SIGTERM, so that the report is complete; writing it takes only seconds
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        yield
        if self.reports("skipped") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.folder and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.write(self.folder, int(session.exitstatus))

    def write(self, folder: Path, status: int) -> None:
        import torch

        from test_fp8.common import report

        passed = Counter(report.nodeid.partition("::")[0] for report in self.reports("passed"))
        seconds: dict[str, float] = defaultdict(float)
        for one in self.reports("", "passed", "failed", "error"):
            seconds[one.nodeid.partition("::")[0]] += getattr(one, "duration", 0)
        name = "gpu_tests_one_gpu.json" if torch.cuda.device_count() == 1 else "gpu_tests.json"
        report.write_json(
            folder / name,
            "./run_tests.sh --gpu",
            [{"file": file, "passed": n, "seconds": round(seconds[file], 1)} for file, n in passed.items()],
            status=status,
            seconds=round(time.monotonic() - self.start),
            passed=passed.total(),
            failed=[one.nodeid for one in self.reports("failed", "error")],
            skipped=[one.nodeid for one in self.reports("skipped")],
        )
