"""How preparations are run: workers that die, Slurm's jobs with a stand-in for srun."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import programs
from tests.fixtures import corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import contents
from tests.train.runs import ROOT
from train.prepare.corpus import WORK_NAME


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a preparation; Python's resource tracker is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]
    return []


@pytest.mark.slow
@pytest.mark.process
def test_killed_workers_resume(tmp_path, prepare, tokenizer_dir):
    """A killed worker is noticed; Ctrl-C ends stopped workers at once, without tracebacks; a killed command takes its
    workers along. One worker alone makes the same bytes."""
    out, log, texts = tmp_path / "out", tmp_path / "log.txt", corpus_texts(1000)
    # large enough that two workers take several seconds
    large = write_jsonl(tmp_path / "large.jsonl", [" ".join(texts[i::100]) * 20 for i in range(100)])
    options = {"tasks": 8, "shard_tokens": 20_000, "eval_fraction": 0.1}
    given = {"input": large, "tokenizer": tokenizer_dir, "output": out, "workers": 2, **options}
    flags = [str(part) for key, value in given.items() for part in (f"--{key}", value)]
    line = [sys.executable, str(ROOT / "train/prepare_data.py"), *flags]

    def start(until: Callable[[], object]) -> tuple[subprocess.Popen, list[psutil.Process]]:
        with log.open("w") as file:
            process = programs.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not (len(workers_of(process.pid)) == 2 and until()):
            time.sleep(0.02)
        return process, workers_of(process.pid)

    process, workers = start(lambda: any((out / WORK_NAME / "results").glob("*.json")))
    workers[0].kill()
    assert process.wait(timeout=200) == 1
    process, workers = start(lambda: True)
    for worker in workers:
        worker.suspend()
        [blocked] = re.findall(r"SigBlk:\t(.+)", Path(f"/proc/{worker.pid}/status").read_text())
        assert int(blocked, 16) & 1 << signal.SIGINT - 1
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) == 130 and "Trace" not in log.read_text()
    process, workers = start(lambda: True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(workers, timeout=200)[1]
    assert not (out / "manifest.json").exists()
    assert prepare(out, large, **options) == prepare(tmp_path / "whole", large, **options) == 0
    assert contents(out) == contents(tmp_path / "whole")


# ---------------------------------------------------------------- Slurm

# Starts two processes, of which the second fails in the pipeline that the file "fails" names.
SRUN = """#!/bin/bash
cd $(dirname $0)
echo "$@" >> calls
export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
while [[ $1 == --* ]]; do shift; done
if [[ $4 == *$(cat fails)* ]]; then status=1; else SLURM_PROCID=1 SLURM_LOCALID=1 ./python "${@:2}" & fi
SLURM_PROCID=0 SLURM_LOCALID=0 ./python "${@:2}" && wait $! && exit $status
"""


@pytest.mark.slow
@pytest.mark.process
def test_slurm_executor(tmp_path, prepare, corpus, reported, monkeypatch):
    """A repeated command runs only the tasks that failed."""
    slurm, out, options = tmp_path / "slurm", tmp_path / "out", {"tasks": 3, "dedup": "exact"}
    programs.python_at(slurm / "python")
    (slurm / "srun").write_text(SRUN)
    (slurm / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm}:{os.environ['PATH']}")
    completed = []
    for pipeline in ("duplicate_signatures", "tokenize"):
        (slurm / "fails").write_text(pipeline)
        assert prepare(out, corpus, executor="slurm", workers=2, **options) == 1
        assert (reported[-1].code, reported.pop().key) == ("tasks_failed", pipeline)
        markers = (out / WORK_NAME / "stages/duplicate_signatures/completions").iterdir()
        completed.append({path.name: path.stat().st_mtime_ns for path in markers})
    assert completed[0].keys() == {"00000", "00002"} and completed[0].items() < completed[1].items()
    (slurm / "fails").write_text("none")
    assert prepare(out, corpus, executor="slurm", workers=2, **options) == 0
    assert all(" --ntasks=2 " in call for call in (slurm / "calls").read_text().splitlines())
    assert prepare(tmp_path / "local", corpus, **options) == 0
    assert contents(out) == contents(tmp_path / "local")
