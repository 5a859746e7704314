"""train/job.py: what it starts, when it starts it again, requeues its Slurm job or stops, and what signals do.

Its functions run here; the Python that it starts, srun and scontrol are scripts. Each start of the launcher does what
the next entry of the plan says and writes its arguments down. tests/scripts has the same from run_training.sh on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.scripts.machine import AWAIT, ROOT, STOPPED, checkpoint, executable, launcher, progress
from train import job
from train.checkpoint.files import CheckpointError, RunState, describe_file, write_manifest
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.guard.signals import SIGNALS

ONLY_THE_MARK = "echo '{}' > run/stopped.json; exit 1"  # as torchrun, or srun of several nodes
NEVER = ("--resume_from_checkpoint", "never")

pytestmark = pytest.mark.process


class Machine:
    """job.main in a folder with a launcher whose first start does plan[0], and so on; after the plan it exits with
    0."""

    def __init__(self, folder: Path, config: Path):
        self.folder, self.config = folder, config
        (folder / "run").mkdir()
        executable(folder / "bin/scontrol", f'echo "$*" >> "{folder}/scontrol.txt"')
        to_the_command = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
        executable(folder / "bin/srun", f'echo "srun $*" >> "{folder}/srun.txt"; {to_the_command}')
        self.plan()

    def plan(self, *starts: str) -> None:
        lines = [launcher(self.folder, starts), f'echo "$*" >> "{self.folder}/programs.txt"']
        executable(self.folder / "python", "\n".join(lines))

    def run(self, *arguments: str, **environment: str) -> int:
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
        options = ["--output_dir", "run", "--save_strategy", "no", *arguments]
        try:
            with mock.patch.dict(os.environ, path | environment):
                return job.main([str(self.config), *options])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def written(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def starts(self) -> list[str]:
        return self.written("starts.txt")

    def programs(self) -> list[str]:
        """What was started besides the launcher."""
        return self.written("programs.txt")

    def requeued(self) -> bool:
        return self.written("scontrol.txt") == ["requeue 41234"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    sources = {"x": str(tmp_path / "x")}
    path.write_text(json.dumps({"model": {"config": "tiny"}, "data": {"sources": sources}, "max_steps": 10}))
    return path


@pytest.fixture
def machine(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(job, "PAUSE_S", 0.1)
    monkeypatch.setattr(os, "execv", lambda _, command: pytest.fail(f"this would go on as {command}"))
    settings = "SLURM_ NNODES NODE_RANK MASTER_ NPROC HAS_GPU MAX_RESTARTS REQUEUE DEMO_PROMPT OMP_".split()
    for name in [name for name in os.environ if name.startswith(tuple(settings))]:
        monkeypatch.delenv(name)
    yield Machine(tmp_path, config)


# ---------------------------------------------------------------- restarts


def test_a_crash_is_followed_by_another_start_as_long_as_it_helps(
    machine: Machine, capfd: pytest.CaptureFixture
) -> None:
    machine.plan(
        f"{progress(3)}; exit 137", f"{checkpoint(5)}; exit 1", f"{progress(6)}; kill -9 $$", "exit 0"
    )
    assert machine.run(*NEVER) == 0
    first, second, third, _ = machine.starts()
    assert first.endswith("never") and second.endswith("never"), "there is no checkpoint to go on from yet"
    assert third.endswith("--resume_from_checkpoint never --resume_from_checkpoint auto")
    said = capfd.readouterr().err
    assert "ended with status 137; restart 1 of 3 from the beginning" in said
    assert "ended with status 1; restart 2 of 3 from step-00000005" in said
    assert "ended with status 137; restart 3 of 3 from step-00000005" in said, "its launcher was killed"


def test_a_start_that_comes_no_further_is_repeated_once_after_a_pause(
    machine: Machine, capfd: pytest.CaptureFixture
) -> None:
    fails = f"{progress(7)}; exit 9"
    machine.plan(f"{progress(7)}; exit 1", fails, *[f"{progress(8)}; exit 9"] * 2, "exit 0")
    assert machine.run(MAX_RESTARTS="4") == 0 and len(machine.starts()) == 5
    assert "no further than step 7; restart 2 of 4 from the beginning in 0.1 s" in capfd.readouterr().err
    machine.plan(*["exit 1"] * 5, fails, fails, "exit 0")
    assert machine.run() == 9 and len(machine.starts()) == 7, "not a third time"
    assert "came no further than step 8 again; not started again" in capfd.readouterr().err


def test_a_pause_ends_when_the_job_is_stopped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: signal.raise_signal(signal.SIGUSR1))
    monkeypatch.setattr(job, "time", clock)
    machine.plan("exit 1", "exit 0")
    assert machine.run() == 75 and len(machine.starts()) == 1


def test_a_start_that_failed_before_it_began_anew_does_not_resume_what_was_there(machine: Machine) -> None:
    """A new run moves the old checkpoints aside only when it is about to begin."""
    subprocess.run(["bash", "-ec", checkpoint(9)], check=True)
    machine.plan("exit 1", "exit 0")
    assert machine.run(*NEVER) == 0 and len(machine.starts()) == 2
    assert all(start.endswith("--resume_from_checkpoint never") for start in machine.starts())


def test_restarts_are_bounded(machine: Machine, capfd: pytest.CaptureFixture) -> None:
    machine.plan(*[f"{progress(step)}; exit 134" for step in range(1, 9)])
    assert machine.run(MAX_RESTARTS="2") == 134 and len(machine.starts()) == 3
    assert "not started again after 2 restarts (MAX_RESTARTS)" in capfd.readouterr().err


@pytest.mark.parametrize("end", ["exit 2", STOPPED])
def test_what_another_start_would_not_help_is_not_started_again(
    machine: Machine, end: str, capfd: pytest.CaptureFixture
) -> None:
    machine.plan(f"{checkpoint(4)}; {end}")
    assert machine.run() == int(end.split()[-1])
    assert len(machine.starts()) == 1
    said = "stopped on request at step-00000004; the same command goes on" in capfd.readouterr().out
    assert said == (end == STOPPED)


def test_the_mark_of_an_earlier_stop_does_not_hide_a_crash(machine: Machine) -> None:
    machine.plan(STOPPED, "exit 9")
    assert [machine.run(), machine.run(MAX_RESTARTS="0")] == [75, 9]


# ---------------------------------------------------------------- Slurm

SLURM = {"SLURM_JOB_ID": "41234"}


@pytest.mark.parametrize("end", [STOPPED, ONLY_THE_MARK])
def test_a_slurm_job_that_is_stopped_requeues_itself(
    machine: Machine, end: str, capfd: pytest.CaptureFixture
) -> None:
    machine.plan(f"{checkpoint(4)}; {end}")
    assert machine.run(**SLURM) == 75 and len(machine.starts()) == 1
    assert machine.requeued()
    assert "Slurm job 41234 is requeued and goes on from there" in capfd.readouterr().out


@pytest.mark.parametrize("setting", [{"REQUEUE": "0"}, {"NODE_RANK": "1"}])
def test_what_does_not_requeue(machine: Machine, setting: dict[str, str]) -> None:
    machine.plan(STOPPED)
    assert machine.run(**SLURM, **setting) == 75
    assert not machine.requeued()


def test_a_job_that_slurm_does_not_requeue(machine: Machine, capfd: pytest.CaptureFixture) -> None:
    executable(machine.folder / "bin/scontrol", "exit 1")
    machine.plan(STOPPED)
    assert machine.run(*NEVER, **SLURM) == 75
    said = "Slurm did not requeue job 41234: submit it again with --resume_from_checkpoint auto\n"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("before", [None, 9])
def test_a_requeued_job_goes_on_from_its_own_checkpoint(machine: Machine, before: int | None) -> None:
    """And not from one that was there before it, which its first start may not have come to set aside."""
    machine.plan(STOPPED, f"rm -rf run/checkpoints; {checkpoint(4)}; {STOPPED}", "exit 2", "exit 0")
    if before:
        subprocess.run(["bash", "-ec", checkpoint(before)], check=True)
    for restart, number in zip("0102", ("41234", "41234", "7", "41234"), strict=True):  # 7 is refused
        machine.run(*NEVER, SLURM_JOB_ID=number, SLURM_RESTART_COUNT=restart)
    first, second, _, third = machine.starts()
    assert first.endswith("never") and second.endswith("never")
    assert third.endswith("--resume_from_checkpoint never --resume_from_checkpoint auto")


def test_a_requeued_job_that_never_began_begins_as_it_was_told(machine: Machine) -> None:
    """The note is of a job before it."""
    machine.plan(f"{checkpoint(4)}; {STOPPED}", "exit 0")
    machine.run(**SLURM)
    machine.run(*NEVER, SLURM_RESTART_COUNT="1", SLURM_JOB_ID="5")
    assert machine.starts()[1].endswith("--resume_from_checkpoint never")


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("name", ["TERM", "USR1", "HUP"])
def test_signals_reach_the_launcher(machine: Machine, name: str) -> None:
    """It is waited for until its save is done, however many signals come."""
    twice = f"kill -{name} $PPID; {AWAIT}; got=; kill -{name} $PPID; {AWAIT}"
    # one that comes while the launcher is being started reaches it as USR1, too
    machine.plan(f"trap 'got=1' {name} USR1; {twice}; {checkpoint(4)}; {STOPPED}")
    assert machine.run(**SLURM) == 75
    assert machine.requeued() and len(machine.starts()) == 1
    assert (machine.folder / "run/checkpoints/step-00000004/manifest.json").exists()


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_srun_is_given_usr1(machine: Machine, name: str) -> None:
    """SIGTERM could be meant for srun itself."""
    machine.plan(f"trap 'got=1' USR1; kill -{name} $PPID; {AWAIT}; {STOPPED}")
    assert machine.run(**SLURM, SLURM_NNODES="2", SLURM_JOB_NODELIST="node-[3-4]") == 75
    assert len(machine.written("srun.txt")) == 1


def test_a_signal_before_there_is_a_launcher_is_remembered(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher gets it as it starts, and dies of it where it has not yet begun: that is a stop, too."""

    def state(arguments: TrainingArguments) -> tuple[str, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return "new", ""

    monkeypatch.setattr(job, "run_state", state)
    machine.plan(f"got=; {AWAIT}")
    assert machine.run() == 75
    assert len(machine.starts()) <= 1


def test_a_crash_after_a_stop_was_asked_for_is_a_crash(machine: Machine) -> None:
    machine.plan(f"trap 'got=1' USR1; kill -USR1 $PPID; {AWAIT}; {checkpoint(4)}; exit 9")
    assert machine.run() == 9 and len(machine.starts()) == 1


def test_a_job_stopped_by_ctrl_c_is_neither_started_again_nor_requeued(machine: Machine) -> None:
    once = f"trap 'got=1' USR1; kill -INT $PPID; {AWAIT}"
    machine.plan(f"{once}; {STOPPED}", f"{once}; exit 130", f"{once}; exit 9", "exit 0")
    assert [machine.run(**SLURM) for _ in range(3)] == [75, 130, 9]
    assert len(machine.starts()) == 3 and not machine.written("scontrol.txt")


# ---------------------------------------------------------------- launchers


def test_two_processes_on_a_cpu(machine: Machine) -> None:
    machine.plan(
        'echo "$OMP_NUM_THREADS $TOKENIZERS_PARALLELISM $PYTHONUNBUFFERED" > environment.txt; exit 2'
    )
    assert machine.run("--learning_rate", "1e-4") == 2
    words = machine.starts()[0].split()
    assert words[:4] == [f"{ROOT}/train/launch.py", "--nproc", "2", f"{ROOT}/train/train.py"]
    assert words[4] == str(machine.config) and words[-2:] == ["--learning_rate", "1e-4"]
    cores = len(os.sched_getaffinity(0))
    assert machine.written("environment.txt") == [f"{max(1, cores // 2)} false 1"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NPROC": "two"}, "NPROC=two"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR"),
        ({"NNODES": "2"}, "NODE_RANK"),
        ({"HAS_GPU": "1", "CUDA_VISIBLE_DEVICES": ""}, "torch sees none (CUDA_VISIBLE_DEVICES=)"),
    ],
)
def test_wrong_settings(
    machine: Machine, settings: dict[str, str], said: str, capfd: pytest.CaptureFixture
) -> None:
    assert machine.run(**settings) == 2
    assert said in capfd.readouterr().err and not machine.starts()


def test_process_count(machine: Machine) -> None:
    machine.plan("exit 2", "exit 2")
    assert machine.run(NPROC="3") == 2
    python = machine.folder / "python"
    executable(python, "[[ $1 == -c ]] && { echo 5; exit 0; }\n" + python.read_text())
    assert machine.run(HAS_GPU="1") == 2
    assert [start.split()[2] for start in machine.starts()] == ["3", "5"]


def test_slurm_starts_one_launcher_a_node(machine: Machine) -> None:
    machine.plan("exit 2")
    assert machine.run(**SLURM, SLURM_NNODES="2", SLURM_JOB_NODELIST="node-[03-04]", NPROC="8") == 2
    (command,) = machine.written("srun.txt")
    assert command.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ")
    assert "train/launch.py --nproc 8 --nnodes 2 --master_addr node-03 --master_port 25234" in command
    assert f"{ROOT}/train/train.py {machine.config} " in command


@pytest.mark.parametrize("port", ["29500", "12345"])
def test_nodes_without_slurm(machine: Machine, port: str) -> None:
    machine.plan("exit 2")
    nodes = {"NNODES": "2", "NODE_RANK": "1", "NPROC": "4", "MASTER_ADDR": "node-a"}
    assert machine.run(**nodes, MASTER_PORT="" if port == "29500" else port) == 2
    (start,) = machine.starts()
    assert f"--nnodes 2 --node_rank 1 --master_addr node-a --master_port {port}" in start


# ---------------------------------------------------------------- the run, its data, and the demo


def test_states_of_a_run(config: Path, tmp_path: Path, machine: Machine) -> None:
    run = tmp_path / "run"

    def arguments(*overrides: str) -> TrainingArguments:
        constant = "--lr_scheduler_type", "constant"  # with which max_steps may change
        return load_arguments([str(config), "--output_dir", str(run), *constant, *overrides])

    def state(*overrides: str) -> tuple[str, str]:
        return job.run_state(arguments(*overrides))

    def commit(step: int) -> None:
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        saved = RunState(
            step, 0, 0, 2, 1, resolve_arguments(arguments(), 2).to_dict(), {}, began_at={"path": "/gone"}
        )
        (folder / "run_state.json").write_text(json.dumps(vars(saved)))
        (folder / "weights.pt").write_text("good")
        write_manifest(folder, [describe_file(file) for file in folder.iterdir()])

    assert state() == ("new", "")
    commit(5)
    (run / "checkpoints" / "step-00000007").mkdir()  # died in its save: no manifest
    assert state() == ("resume", "step-00000005")
    assert state("--resume_from_checkpoint", "never") == ("new", "")
    assert state("--resume_from_checkpoint", "elsewhere") == ("resume", "elsewhere")
    commit(10)
    assert state() == ("resume", "step-00000010"), "all steps done, but not exported"
    (run / "hf").mkdir()
    for origin in '{"checkpoint": "", "manifest_sha256": "of another run"}', "[]":
        (run / "hf" / "exported_from.json").write_text(origin)
        assert state() == ("resume", "step-00000010"), "exported from another checkpoint"
    digest = hashlib.sha256((run / "checkpoints/step-00000010/manifest.json").read_bytes()).hexdigest()
    (run / "hf" / "exported_from.json").write_text(json.dumps({"checkpoint": "", "manifest_sha256": digest}))
    assert state() == state("--logging_steps", "3") == ("finished", "step-00000010")
    assert state("--resume_from_checkpoint", "/gone") == ("finished", "step-00000010"), "a branch"
    changes = "max_steps=5 max_steps=20 learning_rate=1e-4 precision.compute=bf16 data.sources.text=a model.init_from=a"
    for change in changes.split():
        assert state(f"--{change}") == ("resume", "step-00000010"), "train.py says what it makes of that"
    (run / "checkpoints/step-00000010/weights.pt").write_text("bad!")
    assert state()[0] == "resume", "an older one is good"
    (run / "checkpoints/step-00000005/weights.pt").unlink()
    with pytest.raises(CheckpointError):
        state()
    options = "--save_strategy steps --lr_scheduler_type constant".split()
    assert machine.run(*options) == 2 and not machine.starts()
    assert state("--resume_from_checkpoint", "never") == ("new", "")


def test_a_finished_run_is_not_trained(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(job, "run_state", lambda arguments: ("finished", "step-00000010"))
    assert machine.run() == 0 and not machine.starts()
    assert "run is finished (step-00000010), nothing to train" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--save_strategy", "steps"], "--precision fp8 --max"),
        (["--save_strategy", "steps", "--precision.recipe", "block"], "--precision fp8 --max"),
        (["--save_strategy", "steps", "--precision.compute", "fp16"], "--precision bf16 --max"),
        (["--save_strategy", "no"], None),
    ],
)
def test_the_demo_needs_a_run_that_saves(machine: Machine, options: list[str], wanted: str | None) -> None:
    demo: list[str] = []
    with mock.patch.object(os, "execv", lambda path, command: demo.extend(command)):
        assert machine.run(*options, DEMO_PROMPT="a b") == 0
        assert machine.run(*options, NODE_RANK="1") == 0, "one node is enough for it"
        machine.plan(*["exit 0"] * 2, f"trap 'got=1' USR1; kill -TERM $PPID; {AWAIT}; exit 0")
        assert machine.run(*options) == 0, "who asked it to stop in its export wants no demo"
    assert len(machine.starts()) == 3 and demo.count("--prompt") == (wanted is not None)
    if wanted is not None:
        assert demo[:4] == [sys.executable, f"{ROOT}/fp8_inference_demo/fp8_inference.py", "--model", "run"]
        assert wanted in " ".join(demo) and demo[demo.index("--prompt") + 1] == "a b"


def test_embedded_corpus_is_prepared_once(machine: Machine, capfd: pytest.CaptureFixture) -> None:
    folder = machine.folder / "data/python-stdlib"
    option = ("--data.sources.text", str(folder))
    assert machine.run(*option) == 0
    tokenizer, data = machine.programs()[-2:]
    assert tokenizer.startswith(f"{ROOT}/train/train_tokenizer.py --input python-stdlib --vocab_size 4096 ")
    made = f"{folder.parent}/tokenizer-4096"
    assert data == (
        f"{ROOT}/train/prepare_data.py --input python-stdlib --tokenizer {made} --output {folder} "
        "--eval_fraction 0.05"
    )
    assert machine.programs()[0].startswith(f"{ROOT}/scripts/check_requirements.py ")
    assert "data: preparing the embedded corpus" in capfd.readouterr().out and len(machine.starts()) == 1
    (machine.folder / "programs.txt").unlink()
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    assert machine.run(*option) == 0
    assert not machine.programs()


def test_a_preparation_that_fails_or_is_stopped(machine: Machine) -> None:
    option = ("--data.sources.text", str(machine.folder / "data/python-stdlib"))
    for do, status in ("exit 3", 3), (f"kill -USR1 $PPID; {AWAIT}", 75):
        executable(machine.folder / "python", f'[[ "$*" == *train_tokenizer* ]] || exit 0\n{do}')
        assert machine.run(*option) == status
    assert not machine.starts()


def test_a_signal_while_another_node_prepares_the_corpus_acts_at_once(machine: Machine) -> None:
    folder = machine.folder / "python-stdlib"
    ended, waited_out = threading.Event(), []
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def stop() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            if not ended.wait(60):
                waited_out.append(True)
                fcntl.flock(lock, fcntl.LOCK_UN)

        thread = threading.Thread(target=stop)
        with mock.patch.object(job, "locks", lambda file, locks=job.locks: locks(file) or thread.start()):
            status = machine.run("--data.sources.text", str(folder))
        ended.set()
        thread.join()
    assert status == 75 and not waited_out and not machine.programs()


def test_missing_corpus(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / job.EMBEDDED_CORPUS
    arguments = load_arguments([str(config), "--data.sources.text", str(folder)])
    assert job.missing_corpus(arguments) == folder
    assert job.missing_corpus(load_arguments([str(config)])) is None, "the user's data is not ours to make"
    shipped = load_arguments([str(ROOT / "train_args" / "train_config_tiny.json")])
    assert [Path(folder).name for folder in shipped.data.sources.values()] == [job.EMBEDDED_CORPUS]
