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

import pytest

MAX_REPORT_CHARACTERS = 2000  # number of characters printed from the end of a failure message


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="folder for the report")


def pytest_configure(config: pytest.Config) -> None:
    # a pytest-xdist worker runs only a part of the tests
    worker = hasattr(config, "workerinput")
    run = GPURun(None if worker else config.getoption("--results"), config)
    config.pluginmanager.register(run)
    if not worker:
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # print the summary if the time limit is reached


class GPURun:
    def __init__(self, folder: Path | None, config: pytest.Config):
        self.folder, self.config, self.start = folder, config, time.monotonic()
        self.passed: Counter[str] = Counter()  # number of passed tests per file
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" and report.passed:
            self.passed[file] += 1
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            # print the failure immediately, because the time limit can end the run before pytest prints its summary
            if terminal := self.config.pluginmanager.get_plugin("terminalreporter"):
                terminal.write_line(
                    f"\nFAILED {report.nodeid}\n{report.longreprtext[-MAX_REPORT_CHARACTERS:]}"
                )
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.folder:
            # ignore SIGTERM, so that the report is complete; writing it takes only seconds
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        yield
        if self.skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.folder and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.write(self.folder, int(session.exitstatus))

    def write(self, folder: Path, status: int) -> None:
        import torch

        from test_fp8.common import report

        name = "gpu_tests_one_gpu.json" if torch.cuda.device_count() == 1 else "gpu_tests.json"
        report.write_json(
            folder / name,
            "./run_tests.sh --gpu",
            [
                {"file": file, "passed": n, "seconds": round(self.seconds[file], 1)}
                for file, n in self.passed.items()
            ],
            status=status,
            seconds=round(time.monotonic() - self.start),
            passed=self.passed.total(),
            failed=self.failed,
            skipped=self.skipped,
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped tests (treated as failures)", sep="=", red=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)
