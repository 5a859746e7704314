"""Pytest plugin for ./run_tests.sh --gpu: counts a skipped test as a failure and writes a report.

A machine that runs the GPU tests has a GPU, so a skip would hide a missing check. With --results FOLDER, the plugin
writes FOLDER/gpu_tests.json (on a machine with one GPU: gpu_tests_one_gpu.json) with the commit, the date, the machine,
the versions, and the passed, failed and skipped tests. The report is committed, so that readers see when the GPU tests
last passed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MAX_REPORT_CHARACTERS = 2000  # characters shown from the end of a failure


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="folder for the report")


def pytest_configure(config: pytest.Config) -> None:
    # a worker of pytest-xdist sees only its share of the tests
    worker = hasattr(config, "workerinput")
    run = GPURun(None if worker else config.getoption("--results"), config)
    config.pluginmanager.register(run)
    if not worker:
        signal.signal(signal.SIGTERM, run.terminated)


class GPURun:
    def __init__(self, folder: Path | None, config: pytest.Config):
        self.folder, self.config, self.start = folder, config, time.monotonic()
        self.passed: Counter[str] = Counter()  # by file
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.began: dict[str, float] = {}  # start times of the running tests

    def terminated(self, *_: object) -> None:
        """Handle SIGTERM, sent when the time on the machine ends: print the tests that are still running."""
        terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled():
            for nodeid, began in self.began.items():
                terminal.write_line(f"\nSTILL RUNNING after {time.monotonic() - began:.0f} s: {nodeid}")
        raise KeyboardInterrupt

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.began.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" and report.passed:
            self.passed[file] += 1
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            # print it at once: the time on the machine may end before pytest's summary
            if terminal := self.config.pluginmanager.get_plugin("terminalreporter"):
                terminal.write_line(
                    f"\nFAILED {report.nodeid}\n{report.longreprtext[-MAX_REPORT_CHARACTERS:]}"
                )
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self.folder:
            # writing the report takes only seconds; do not lose it to a SIGTERM
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
            terminalreporter.section("skipped, which counts as failed here", sep="=", red=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)
