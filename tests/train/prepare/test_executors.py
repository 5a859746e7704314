"""How preparations are run: workers that die, Slurm's jobs with a stand-in for sbatch."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.fixtures import corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import contents
from tests.train.runs import ROOT
from train.prepare.corpus import WORK_NAME

PROGRAM = str(ROOT / "train/prepare_data.py")


OPTIONS = {"tasks": 8, "shard_tokens": 20_000, "eval_fraction": 0.1, "shuffle_seed": 7}


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl that two workers take a second or two for."""
    texts = corpus_texts(1000)
    return write_jsonl(
        tmp_path_factory.mktemp("large") / "large.jsonl",
        [" ".join(texts[i::100]) * 6 for i in range(100)],
    )


@pytest.fixture
def command(tokenizer_dir: Path) -> Callable[..., list[str]]:
    """command(output, input, **options) -> the command line of a preparation, by two workers unless told."""

    def line(output: Path, source: Path, workers: int = 2, **options: object) -> list[str]:
        parts = [sys.executable, PROGRAM, "--input", source, "--tokenizer", tokenizer_dir, "--output", output]
        flags = [part for key, value in options.items() for part in (f"--{key}", value)]
        return [str(part) for part in [*parts, *flags, "--workers", workers]]

    return line


def children_of(pid: int) -> list[int]:
    """The worker processes of a preparation; Python's resource tracker is none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.process
def test_killed_workers_resume(tmp_path, prepare, command, large):
    """A killed worker is noticed; Ctrl-C ends stopped workers at once, without tracebacks; a killed command takes its
    workers along. One worker alone makes the same bytes."""
    out, log = tmp_path / "out", tmp_path / "log.txt"

    def start(until: Callable[[], object]) -> tuple[subprocess.Popen, list[int]]:
        with log.open("w") as file:
            line = command(out, large, **OPTIONS)
            process = programs.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not (len(children_of(process.pid)) == 2 and until()):
            time.sleep(0.02)
        return process, children_of(process.pid)

    process, workers = start(lambda: any((out / WORK_NAME / "results").glob("*.json")))
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(timeout=200) == 1
    process, workers = start(lambda: True)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
        [blocked] = re.findall(r"SigBlk:\t(.+)", Path(f"/proc/{worker}/status").read_text())
        assert int(blocked, 16) & 1 << signal.SIGINT - 1
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) == 130 and "Trace" not in log.read_text()
    process, workers = start(lambda: True)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 200
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)

    assert not (out / "manifest.json").exists()
    assert prepare(out, large, **OPTIONS) == prepare(tmp_path / "whole", large, **OPTIONS) == 0
    assert contents(out) == contents(tmp_path / "whole")


# ---------------------------------------------------------------- Slurm

SBATCH = """#!{python}
# A stand-in for Slurm: runs the tasks of each array at once, and fails a job whose dependency failed.
import os, pathlib, re, subprocess, sys
folder = pathlib.Path({folder!r})
script = pathlib.Path(sys.argv[-1]).read_text()
job = str(1000 + len(list(folder.glob("*.sh"))))
(folder / f"{{job}}.sh").write_text(script)
depends = re.search(r"--dependency=\\w+:(\\d+)", " ".join(sys.argv) + script)
failed = blocked = bool(depends) and (folder / f"{{depends[1]}}.failed").exists()
first, last = map(int, re.search(r"#SBATCH --array=(\\d+)-(\\d+)", script).groups())
options = [a for a in sys.argv[1:-1] if a.startswith("--export=ALL,")]
extra = dict(pair.split("=") for a in options for pair in a.removeprefix("--export=ALL,").split(","))
for task in range(first, last + 1):
    if blocked or task in {fails!r}.get(job, []):
        failed = True
        continue
    env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task), SLURM_JOB_ID=job, SLURM_NODELIST="node", **extra)
    forks = script.replace("launch_pickled_pipeline ", f"{{folder}}/launch_pickled_pipeline ")
    done = subprocess.run(["bash", "-c", forks], env=env, capture_output=True, text=True)
    (folder / f"{{job}}_{{task}}.out").write_text(done.stdout + done.stderr)
    failed |= done.returncode != 0
if failed:
    (folder / f"{{job}}.failed").touch()
print("Submitted batch job", job)
"""
TASK = "from datatrove.tools.launch_pickled_pipeline import main; main()"
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"  # what squeue says of a job that ended long ago
TOOLS = {
    "scontrol": "echo node",
    "squeue": f"cat {{folder}}/queue 2>/dev/null || {{{{ echo {UNKNOWN} >&2; exit 1; }}}}",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """slurm(fails) -> a folder on the PATH with sbatch, squeue and scontrol; fails: {job id: tasks that do not run}."""

    def install(fails: dict[str, list[int]] | None = None) -> Path:
        folder = tmp_path / "slurm"
        folder.mkdir(exist_ok=True)
        scripts = {"sbatch": SBATCH.format(python=sys.executable, folder=str(folder), fails=fails or {})}
        scripts |= {
            name: f"#!/bin/bash\n{text.format(folder=shlex.quote(str(folder)))}\n"
            for name, text in TOOLS.items()
        }
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        programs.python_at(folder / "launch_pickled_pipeline", "-c", TASK)
        if not os.environ["PATH"].startswith(str(folder)):
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return install


SLURM = {"executor": "slurm", "slurm_partition": "cpu", "tasks": 3}


@pytest.mark.slow
@pytest.mark.process
def test_slurm_executor(tmp_path, prepare, corpus, slurm):
    folder, out = slurm({"1000": [1]}), tmp_path / "out"
    options = {**SLURM, "slurm_args": "account=team", "slurm_time": "01:30:00", "workers": 2}
    assert prepare(out, corpus, **options) == 0
    script = (folder / "1000.sh").read_text()
    python = Path(sys.executable).parent
    for line in (
        "array=0-2%2",
        "partition=cpu",
        "time=01:30:00",
        "account=team",
        "job-name=prepare_tokenize",
    ):
        assert f"#SBATCH --{line}\n" in script
    assert f"\nexport PATH={python}:$PATH\n" in script and "launch_pickled_pipeline " in script
    assert (python / "launch_pickled_pipeline").exists()

    (folder / "queue").write_text("1000\n")
    before = contents(out)
    for more in ({}, {"overwrite": True}):  # takes nothing away from jobs at work
        assert prepare(out, corpus, **options, **more) == 0
    assert contents(out) == before
    (folder / "queue").unlink()
    slurm()
    before = len(list(folder.glob("*.sh")))
    assert prepare(out, corpus, **options) == 0 and not (out / "manifest.json").exists()
    again = sorted(folder.glob("*.sh"))[before]
    assert "#SBATCH --array=0-0%2\n" in again.read_text()  # only the task that failed
    assert prepare(out, corpus, **options) == prepare(tmp_path / "local", corpus, tasks=3) == 0
    assert contents(out) == contents(tmp_path / "local")


# Accepts as many jobs as the file "most" says, as a cluster with a limit of them does
LIMITED = """#!/bin/sh
[ $(cat {folder}/calls 2>/dev/null | wc -l) -lt $(cat {folder}/most) ] || exit 1
echo $@ >> {folder}/calls
echo Submitted batch job $(wc -l < {folder}/calls)
"""


@pytest.mark.parametrize(
    ("most", "pipeline"), [(0, "duplicate_signatures"), (1, "duplicate_signatures"), (2, "duplicate_search")]
)
def test_queued_slurm_job_is_not_resubmitted(tmp_path, prepare, corpus, slurm, reported, most, pipeline):
    """Also after Slurm refused a dependent job, and while squeue cannot tell whether the jobs still exist."""
    folder, out, options = slurm(), tmp_path / "out", {**SLURM, "dedup": "exact"}
    (folder / "calls").touch()
    (folder / "sbatch").write_text(LIMITED.format(folder=folder))
    (folder / "most").write_text(str(most))
    (folder / "queue").write_text("1\n")
    assert prepare(out, corpus, **options) == 2
    assert (reported[-1].code, reported.pop().key) == ("sbatch_refused", pipeline)
    (folder / "most").write_text("9")
    squeue = (folder / "squeue").read_text()
    if most:
        (folder / "squeue").write_text("#!/bin/sh\nexit 7\n")
        for more in ({}, {"overwrite": True}, {"executor": "local"}):
            assert prepare(out, corpus, **{**options, **more}) == 1
            assert reported.pop().code == "squeue_failed"
        (folder / "squeue").write_text(squeue)
        assert prepare(out, corpus, **options) == 0
        assert len((folder / "calls").read_text().splitlines()) == most
    (folder / "queue").unlink()
    assert prepare(out, corpus, **options) == 0
    # each pipeline has another job behind it, which sums up datatrove's statistics
    calls = (folder / "calls").read_text().splitlines()[most::2]
    depends = [re.findall(r"--dependency=afterok:(\d+)", call) for call in calls]
    assert depends == [[], [str(most + 1)], [str(most + 3)]]


def test_slurm_errors(tmp_path, prepare, corpus, reported, monkeypatch, slurm):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prepare(tmp_path / "out", corpus, **SLURM) == 2
    assert (reported[-1].code, reported.pop().key) == ("sbatch_refused", "tokenize")
    assert prepare(tmp_path / "my out", corpus, **SLURM) == 2
    assert (reported[-1].code, reported[-1].key) == ("shell_characters", "--output")
