"""train/launch.py: what the supervisor does after an attempt, and what the settings of a job mean.

The functions and the supervisor run here; srun, scontrol and Python are scripts. Each start of srun does what the next
entry of the plan says. tests/scripts has the same from run_training.sh on, tests/reliability real ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import refused
from tests.scripts.machine import AWAIT, ROOT, STOPPED, checkpoint, executable, plan_of, progress
from train import launch
from train.launch import exit_status, grace_period_s, should_restart
from train.monitor.signals import SIGNALS
from train.rank_env import LauncherError

ONLY_THE_MARK = "echo '{}' > run/stopped.json; exit 1"  # srun of several nodes
REAL_PYTHON = sys.executable
# what the ranks of an attempt read, given the command line of srun
READ = """
import sys
from train.config.load import load_arguments, load_deepspeed
words = sys.argv[1:]
args = load_arguments(words[[word.endswith("train.py") for word in words].index(True) + 1:])
print(args.max_steps, load_deepspeed(args.deepspeed)["zero_optimization"]["stage"])
"""
NEVER = ("--resume_from_checkpoint", "never")
AUTO = ("--resume_from_checkpoint", "auto")
SLURM = {"SLURM_JOB_ID": "41234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[03-04]"}
SETTINGS = (
    "MAX_RESTARTS NPROC HAS_GPU NNODES NODE_RANK MASTER_ADDR MASTER_PORT SLURM_JOB_ID SLURM_NNODES SLURM_PROCID "
    "SLURM_JOB_NODELIST SLURM_CPUS_PER_TASK SLURM_RESTART_COUNT CONTAINER_IMAGE CONTAINER_MOUNTS "
    "CONTAINER_PYTHON REQUEUE DEMO DEMO_PROMPT OMP_NUM_THREADS RANK WORLD_SIZE PET_NNODES PET_NODE_RANK "
    "FP8_CONFIGURATION FP8_RESTARTED"
).split()

pytestmark = pytest.mark.process

# ---------------------------------------------------------------- pure functions


@pytest.mark.parametrize(
    ("status", "stop_requested", "made_progress", "is_retry", "restarts"),
    [
        *((status, False, True, False, False) for status in (0, 2, 75, 130)),
        (1, False, True, False, True),
        (137, False, True, True, True),
        (1, False, False, False, True),
        (1, False, False, True, False),
        (1, True, True, False, False),
    ],
)
def test_should_restart(
    status: int, stop_requested: bool, made_progress: bool, is_retry: bool, restarts: bool
) -> None:
    assert should_restart(status, stop_requested, made_progress, is_retry) is restarts


@pytest.mark.parametrize(
    ("failed", "stop_requested", "interrupted", "status", "cause"),
    [
        ({}, False, False, 0, None),
        ({1: 75, 0: 75}, True, False, 75, None),
        ({1: 1, 0: -9}, False, False, 137, 0),
        ({1: 75, 0: 1}, True, False, 1, 0),
        ({1: 1, 0: 3}, False, False, 1, 1),
        ({0: 1, 1: 2}, False, False, 2, 1),
        ({0: 2}, False, False, 2, None),
        ({1: 2}, False, False, 2, 1),
        ({1: -15}, True, False, 75, None),
        ({0: 128 + 10}, True, False, 75, None),  # of srun
        ({1: -15}, False, False, 143, 1),
        ({1: -10}, True, True, 130, None),
        ({1: 1, 0: 130}, True, True, 130, None),
    ],
)
def test_cause_of_several_failed_ranks(
    failed: dict[int, int], stop_requested: bool, interrupted: bool, status: int, cause: int | None
) -> None:
    """In the order in which they ended. A rank that was killed, or that refused the run, is the cause."""
    assert exit_status(failed, stop_requested, interrupted) == (status, cause)


def test_grace_period() -> None:
    """A save that a stop waits for takes longer than last words do."""
    assert grace_period_s({1: 75}) == 60 and grace_period_s({1: 75, 2: 1}) == grace_period_s({1: 1}) == 4
    assert grace_period_s({1: 2}) == 4 and grace_period_s({1: 1, 0: 2}) == 0


# ---------------------------------------------------------------- settings


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


NODES = {"NNODES": "2", "NODE_RANK": "1", "NPROC": "4", "MASTER_ADDR": "a"}
BY_HAND = "--nnodes 2 --node_rank 1 --nproc 4 --master_addr a --master_port"
BY_SLURM = "--nnodes 2 --master_addr node-03 --master_port"


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (dict.fromkeys(SETTINGS, ""), "--nproc 2"),  # an empty one counts as not set
        ({"NPROC": "3", "MASTER_PORT": "12345"}, "--nproc 3 --master_port 12345"),
        ({"HAS_GPU": "1"}, "--nproc 8"),
        ({"MASTER_ADDR": "elsewhere"}, "--nproc 2"),
        (NODES, f"{BY_HAND} 29500"),
        ({**NODES, "MASTER_PORT": "12345"}, f"{BY_HAND} 12345"),
        ({**SLURM, "NPROC": "8"}, f"--nproc 8 {BY_SLURM} 25234"),
        ({**SLURM, "NPROC": "8", "MASTER_PORT": "7"}, f"--nproc 8 {BY_SLURM} 7"),
        ({**SLURM, **NODES}, f"{BY_HAND} 29500"),
        ({**SLURM, "SLURM_NNODES": "1"}, "--nproc 2"),
    ],
)
def test_environment_settings(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], options: str
) -> None:
    monkeypatch.setattr(launch, "cuda_devices", lambda: [80] * 8 if settings.get("HAS_GPU") else [])
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found = launch.rank_options(math.inf, by_srun=bool(launch.srun_command()))
    pairs = lambda words: dict(zip(words[::2], words[1::2], strict=True))  # noqa: E731
    assert pairs(found) == pairs(options.split())


def test_default_run_uses_at_most_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """More cannot share its batch. A number that is asked for is taken."""
    monkeypatch.setattr(launch, "cuda_devices", lambda: [80] * 8)
    assert launch.rank_options(launch.TINY_RANKS, by_srun=False) == ["--nproc", "2"]
    monkeypatch.setenv("NPROC", "8")
    assert launch.rank_options(launch.TINY_RANKS, by_srun=False) == ["--nproc", "8"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"HAS_GPU": "1"}, "CUDA_VISIBLE_DEVICES"),
        ({"CONTAINER_IMAGE": "x"}, "CONTAINER_IMAGE"),
        ({**SLURM, "CONTAINER_IMAGE": "x", "NNODES": "2"}, "CONTAINER_IMAGE"),
        ({"MAX_RESTARTS": "two"}, "MAX_RESTARTS"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS"),
        ({"NPROC": "two"}, None),
        ({"NPROC": "0"}, None),
        ({**NODES, "NODE_RANK": "1.0"}, None),
        ({"MASTER_PORT": "70000"}, None),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, None),
        ({"NNODES": "2", "NODE_RANK": "1"}, None),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, None),
    ],
)
def test_invalid_settings_raise(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], key: str | None
) -> None:
    """Also those that argparse refuses."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with refused(LauncherError, key=key) if key else pytest.raises((SystemExit, ValueError)):
        launch.Supervisor([str(machine.config)], machine.children)
    assert not machine.starts()


@pytest.mark.parametrize(
    ("pod", "key"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "first"}, "WORLD_SIZE"),
        ({"PET_NNODES": "1:2"}, "PET_NNODES"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "PET_NNODES"),
        ({"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}, None),
    ],
)
def test_pods_do_not_train_separately(
    monkeypatch: pytest.MonkeyPatch, pod: dict[str, str], key: str | None
) -> None:
    monkeypatch.setattr(launch, "cuda_devices", list)
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    options = launch.rank_options(math.inf, by_srun=False)
    with refused(LauncherError, code="node_not_described", key=key) if key else contextlib.nullcontext():
        launch.parse_arguments([*options, "train.py"])


@pytest.mark.parametrize("nodes", ["1", "4"])
def test_ranks_in_pyxis_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str) -> None:
    """Also of one node: srun is what enters it."""
    monkeypatch.chdir(tmp_path)
    container = {"CONTAINER_IMAGE": "team/image.sqsh", "CONTAINER_MOUNTS": "/scratch:/data"}
    for name, value in {**SLURM, **container, "SLURM_NNODES": nodes, "SLURM_CPUS_PER_TASK": "64"}.items():
        monkeypatch.setenv(name, value)
    assert launch.srun_command() == [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=64",
        f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path},/scratch:/data",
        "--container-image=team/image.sqsh",
        f"--container-workdir={tmp_path}",
    ]


def test_dockerfile_copies_existing_files() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(copied) == 2 and all((ROOT / name).exists() for line in copied for name in line.split())


# ---------------------------------------------------------------- restarts, requeues and signals


class Machine:
    """A Slurm job of two nodes in a folder, whose first srun does plan[0], and so on; after the plan it exits with
    0."""

    def __init__(self, folder: Path, config: Path):
        self.folder, self.config, self.children = folder, config, launch.Children()
        (folder / "run").mkdir()
        executable(folder / "bin/scontrol", f'echo "$*" >> "{folder}/scontrol.txt"')
        executable(folder / "python", f'echo "$*" >> "{folder}/programs.txt"')
        self.plan()

    def plan(self, *starts: str) -> None:
        executable(self.folder / "bin/srun", plan_of(self.folder, starts))

    def run(self, *arguments: str, **environment: str) -> int:
        path = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        options = ["--output_dir", "run", "--save_strategy", "no", *arguments]
        with mock.patch.dict(os.environ, path | SLURM | environment):
            return launch.main(["--supervise", str(self.config), *options])

    def written(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def starts(self) -> list[str]:
        return self.written("starts.txt")

    def requeues(self) -> list[str]:
        return self.written("scontrol.txt")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(launch, "PAUSE_S", 0.1)
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(launch, "cuda_devices", list)
    config, sources = tmp_path / "config.json", {"x": str(tmp_path / "x")}
    config.write_text(
        json.dumps({"model": {"config": "tiny"}, "data": {"sources": sources}, "max_steps": 10})
    )
    handlers = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    yield Machine(tmp_path, config)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_job_restarts_from_its_checkpoint(machine: Machine) -> None:
    machine.plan(
        f"{progress(3)}; exit 137", f"{checkpoint(5)}; exit 1", f"{progress(6)}; kill -9 $$", "exit 0"
    )
    assert machine.run(*NEVER) == 0
    first, *others = (tuple(start.split()) for start in machine.starts())
    assert others == [first, first + AUTO, first + AUTO], "at first there is no checkpoint to go on from"
    at_node = "--nnodes 2 --master_addr node-03 --master_port 25234 --nproc 2"
    command = f"{ROOT}/train/launch.py {at_node} {ROOT}/train/train.py {machine.config}"
    assert command in " ".join(first) and first[-2:] == NEVER


FAILS = f"{progress(7)}; exit 9"


@pytest.mark.parametrize(
    ("plan", "most", "status", "starts"),
    [
        ([FAILS, FAILS, f"{progress(8)}; exit 9", "exit 0"], "4", 0, 4),
        ([FAILS, FAILS, FAILS, "exit 0"], "", 9, 3),  # one restart without progress, and not a second one
        ([*(f"{checkpoint(step)}; exit 134" for step in range(1, 6)), "exit 0"], "1", 0, 6),
        *(
            ([f"{progress(step)}; exit 134" for step in range(1, 9)], most, 134, int(most) + 1)
            for most in "20"
        ),
    ],
)
def test_restart_limit(machine: Machine, plan: list[str], most: str, status: int, starts: int) -> None:
    """A restart without progress is repeated once. New checkpoints refill the restarts."""
    machine.plan(*plan)
    assert machine.run(MAX_RESTARTS=most) == status and len(machine.starts()) == starts


def test_edited_file_does_not_change_a_job(machine: Machine) -> None:
    """Neither its restarts nor its requeues. Another job uses the edit."""
    (machine.folder / "zero.json").write_text('{"zero_optimization": {"stage": 1}}')
    values = json.loads(machine.config.read_text()) | {"deepspeed": str(machine.folder / "zero.json")}
    machine.config.write_text(json.dumps(values))
    edit = r"""sed -i 's/"max_steps": 10/"max_steps": 20/' config.json; sed -i s/1/3/ zero.json"""
    read = f"cd {ROOT}; {REAL_PYTHON} -c '{READ}' \"$@\" >> {machine.folder}/read.txt; cd -"
    machine.plan(
        f"{read}; {checkpoint(4)}; {edit}; exit 1", f"{read}; {STOPPED}", f"{read}; exit 0", f"{read}; exit 0"
    )
    assert [machine.run(SLURM_RESTART_COUNT=restart) for restart in "01"] == [75, 0]
    assert machine.run(SLURM_JOB_ID="5") == 0
    assert machine.written("read.txt") == ["10 1"] * 3 + ["20 3"]
    assert not list(machine.folder.glob("slurm-*.json"))


def test_check_that_fails_at_a_restart_is_repeated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, data: Path, small_model: Path
) -> None:
    """For example, because a file system is unavailable for a while. At the first start, it ends the job."""
    monkeypatch.setattr(launch, "PAUSE_S", 2.0)
    (machine.folder / "data").symlink_to(data)
    values = {
        "model": {"config": str(small_model)},
        "data": {"sources": {"x": "data"}},
        "max_seq_length": 128,
    }
    machine.config.write_text(json.dumps(json.loads(machine.config.read_text()) | values))
    here = {"SLURM_JOB_ID": "", "NPROC": "1"}
    lost = f"{progress(3)}; mv data away; (sleep 1; mv away data) > /dev/null 2>&1 & exit 1"
    executable(machine.folder / "python", plan_of(machine.folder, [lost, "exit 0"]))
    assert machine.run(**here) == 0 and len(machine.starts()) == 2
    (machine.folder / "data").unlink()
    assert machine.run(**here) == 2 and len(machine.starts()) == 2


def test_failed_first_start_does_not_resume_an_old_run(machine: Machine) -> None:
    """A new run moves the old checkpoints aside only when it is about to begin."""
    subprocess.run(["bash", "-ec", checkpoint(9)], check=True)
    machine.plan("exit 1", "exit 0")
    assert machine.run(*NEVER) == 0
    assert [tuple(start.split()[-2:]) for start in machine.starts()] == [NEVER, NEVER]


@pytest.mark.parametrize(
    ("end", "settings", "status", "requeued"),
    [
        (STOPPED, {}, 75, True),
        (ONLY_THE_MARK, {}, 75, True),
        (STOPPED, {"REQUEUE": "0"}, 75, False),
        ("exit 2", {}, 2, False),
        ("exit 130", {}, 130, False),
    ],
)
def test_statuses_that_end_a_job(
    machine: Machine, end: str, settings: dict[str, str], status: int, requeued: bool
) -> None:
    machine.plan(f"{checkpoint(4)}; {end}")
    assert machine.run(**settings) == status and len(machine.starts()) == 1
    assert machine.requeues() == ["requeue 41234"] * requeued
    machine.plan("exit 2", "exit 9")  # the mark of an earlier stop does not hide a crash
    assert machine.run(MAX_RESTARTS="0") == 9
    executable(machine.folder / "bin/scontrol", "exit 1")
    machine.plan("", "", STOPPED)
    assert machine.run() == 75


@pytest.mark.parametrize("before", [None, 9])
def test_requeued_job_resumes(machine: Machine, before: int | None) -> None:
    """And not one that was there before it, which its first start may not have come to set aside."""
    machine.plan(STOPPED, f"rm -rf run/checkpoints; {checkpoint(4)}; {STOPPED}", "exit 0")
    if before:
        subprocess.run(["bash", "-ec", checkpoint(before)], check=True)
    for restart in "012":
        machine.run(*NEVER, SLURM_RESTART_COUNT=restart)
    first, second, third = (tuple(start.split()) for start in machine.starts())
    assert first == second and first[-2:] == NEVER and third == first + AUTO
    machine.run(*NEVER, SLURM_JOB_ID="5", SLURM_RESTART_COUNT="1")  # requeued before its first start
    assert tuple(machine.starts()[-1].split()[-2:]) == NEVER


def test_signal_is_forwarded_to_srun_as_usr1(machine: Machine) -> None:
    """It is waited for until its save is done, however many signals come."""
    twice = f"kill -TERM $PPID; {AWAIT}; got=; kill -HUP $PPID; {AWAIT}"
    machine.plan(f"trap 'got=1' USR1; {twice}; {checkpoint(4)}; {STOPPED}")
    assert machine.run() == 75 and machine.requeues() == ["requeue 41234"] and len(machine.starts()) == 1
    assert (machine.folder / "run/checkpoints/step-00000004/manifest.json").exists()


def test_ctrl_c_prevents_restart_and_requeue(machine: Machine) -> None:
    once = f"trap 'got=1' USR1; kill -INT $PPID; {AWAIT}"
    machine.plan(f"{once}; {STOPPED}", f"{once}; exit 130", f"{once}; exit 9", "exit 0")
    assert [machine.run() for _ in range(3)] == [75, 130, 9]
    assert len(machine.starts()) == 3 and not machine.requeues()


def test_second_ctrl_c_reaches_srun(machine: Machine) -> None:
    machine.plan(
        f"trap 'got=1' USR1; trap 'exit 7' INT; kill -INT $PPID; {AWAIT}; kill -INT $PPID; got=; {AWAIT}"
    )
    assert machine.run() == 130 and not machine.requeues()


def test_stop_request_ends_a_pause(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PAUSE_S", 1e6)
    machine.plan("(sleep 0.5; kill -USR1 $PPID) & exit 1".replace("$PPID", str(os.getpid())), "exit 0")
    assert machine.run() == 75 and len(machine.starts()) == 1 and machine.requeues() == ["requeue 41234"]


# ---------------------------------------------------------------- before and after the training


@pytest.mark.parametrize(
    ("options", "compute"),
    [
        (["--save_strategy", "steps"], "fp8"),
        (["--save_strategy", "steps", "--precision.compute", "fp16"], "bf16"),
        (["--save_strategy", "no"], None),
        (["--save_strategy", "steps", "--dry_run"], None),
    ],
)
def test_demo_needs_a_checkpoint(machine: Machine, options: list[str], compute: str | None) -> None:
    executable(machine.folder / "python", f'printf "%s\\n" "$@" >> "{machine.folder}/programs.txt"; exit 2')
    assert machine.run(*options, DEMO_PROMPT="a b") == 0, "a demo that fails does not change the status"
    machine.plan("", f"trap 'got=1' USR1; kill -TERM $PPID; {AWAIT}; exit 0")
    assert machine.run(*options) == 0, "who asked it to stop in its export wants no demo"
    assert machine.run(*options, DEMO="0") == 0
    demo = machine.written("programs.txt")
    assert len(machine.starts()) == 3 and demo.count("--prompt") == (compute is not None)
    if compute is not None:
        assert demo[:3] == [f"{ROOT}/fp8_inference_demo/fp8_inference.py", "--model", "run"]
        assert demo[demo.index("--precision") + 1] == compute and demo[demo.index("--prompt") + 1] == "a b"


def test_built_in_corpus_is_prepared_once(machine: Machine) -> None:
    folder = machine.folder / "data/python-stdlib"
    option = ("--data.sources.text", str(folder))
    assert machine.run(*option) == 0 and len(machine.starts()) == 1
    requirements, tokenizer, data = machine.written("programs.txt")
    made = f"{folder.parent}/tokenizer-4096"
    assert requirements.startswith(f"{ROOT}/scripts/check_requirements.py ")
    assert tokenizer.startswith(f"{ROOT}/train/train_tokenizer.py --input python-stdlib --vocab_size 4096 ")
    assert data.startswith(
        f"{ROOT}/train/prepare_data.py --input python-stdlib --tokenizer {made} --output {folder} "
    )
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert machine.run(*option) == 0 and len(machine.written("programs.txt")) == 3


@pytest.mark.parametrize(("do", "status"), [("exit 3", 3), (f"kill -USR1 $PPID; {AWAIT}", 75)])
def test_failed_or_stopped_preparation(machine: Machine, do: str, status: int) -> None:
    option = ("--data.sources.text", str(machine.folder / "data/python-stdlib"))
    executable(machine.folder / "python", f'[[ "$*" == *train_tokenizer* ]] || exit 0\n{do}')
    assert machine.run(*option) == status and not machine.starts()
    assert machine.requeues() == ["requeue 41234"] * (status == 75)
