"""Stopping on request: every rank leaves after the same step, with a checkpoint, and the next start goes on from it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.reliability.launching import clean_environment, launch
from tests.scripts.machine import executable
from tests.train.runs import ROOT, curve, metrics, run
from train import checkpoint, loop, signals

SIGNALS = [signal.SIGUSR1, signal.SIGTERM]


@pytest.fixture
def handlers() -> Iterator[None]:
    """As in train.py, whose __main__ installs them; nothing is noted yet."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signals.install()
    signals._received.clear()
    yield
    signals._received.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_when(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, number: int) -> None:
    """The `call`-th call of `owner.name` begins with two signals to this process."""
    right, calls = getattr(owner, name), []

    def signalled(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
        return right(*arguments, **options)

    monkeypatch.setattr(owner, name, signalled)


def weights(output_dir: Path, step: int = 6) -> dict[str, torch.Tensor]:
    path = output_dir / f"checkpoints/step-{step:08d}/mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)["module"]


def assert_equal_runs(one: Path, other: Path, step: int = 6) -> None:
    assert curve(one) == curve(other)
    found, expected = weights(one, step), weights(other, step)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    settings: dict, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        stop_when(patch, loop.MicroBatches, "get", 6, number)  # the second micro-batch of step 3
        with pytest.raises(signals.Stopped, match="after step 3; .*step-00000003 is committed"):
            run(settings)
    folder = Path(settings["output_dir"])
    assert json.loads((folder / "stopped.json").read_text()) == {"step": 3, "checkpoint": "step-00000003"}
    assert checkpoint.problems(folder / "checkpoints/step-00000003") == []
    signals._received.clear()
    run(settings)
    assert not (folder / "stopped.json").exists()
    assert_equal_runs(folder, whole)


@pytest.mark.parametrize(("evaluation", "step"), [(1, 2), (3, 6)])
def test_an_evaluation_is_left_and_made_up_for(
    settings: dict,
    tmp_path: Path,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
) -> None:
    """Also the last one, after which there is nothing left to train. Each has three batches here."""
    settings["eval_steps"] = 2
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        stop_when(patch, loop, "evaluate", evaluation, signal.SIGUSR1)
        with pytest.raises(signals.Stopped, match=f"after step {step};"):
            run(settings)
    folder = Path(settings["output_dir"])
    assert [m.get("eval_loss") for m in metrics(folder) if m["step"] == step] == [None]
    signals._received.clear()
    run(settings)
    made_up = [(m["step"], m["eval_loss"]) for m in metrics(folder) if m.get("eval_loss") is not None]
    expected = [(m["step"], m["eval_loss"]) for m in metrics(whole) if m.get("eval_loss") is not None]
    assert [s for s, _ in expected] == [2, 4, 6] and made_up == expected
    assert (folder / "hf/config.json").exists()


def test_signals_while_it_saves_change_nothing(
    settings: dict, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run({**settings, "output_dir": str(tmp_path / "whole"), "save_steps": 2})
    with monkeypatch.context() as patch:
        stop_when(patch, loop.checkpoint, "save", 1, signal.SIGUSR1)  # that of step 2; noticed after step 3
        with pytest.raises(signals.Stopped, match="after step 3;"):
            run(settings, save_steps=2)
    folder = Path(settings["output_dir"])
    assert [checkpoint.problems(path) for path in checkpoint.committed(folder / "checkpoints")] == [[], []]
    signals._received.clear()
    run(settings, save_steps=2)
    assert_equal_runs(folder, whole)


def test_a_run_that_saves_nothing_stops_too(
    settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_when(monkeypatch, loop.MicroBatches, "get", 2, signal.SIGTERM)
    with pytest.raises(signals.Stopped, match="after step 1; nothing was saved"):
        run(settings, save_strategy="no")
    assert not (Path(settings["output_dir"]) / "checkpoints").exists()


def test_one_rank_is_asked_and_all_leave_after_the_same_step() -> None:
    done = launch(3, "tests/reliability/meeting_ranks.py", "asked", "60")
    assert done.returncode == signals.STOPPED, done.stdout
    left = re.findall(r"rank (\d) left after step (\d+)", done.stdout)
    assert sorted(left) == [("0", "20"), ("1", "20"), ("2", "20")]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import os, sys, time; rank = int(os.environ['RANK']); time.sleep(rank); sys.exit(75)", 75),
        ("import os, sys, time; rank = int(os.environ['RANK']); time.sleep(9 * (1 - rank)); sys.exit(2 * rank)", 2),
        ("import os; assert os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_PORT']", 0),
    ],
)  # fmt: skip
def test_the_launcher_ends_with_the_status_of_the_ranks(tmp_path: Path, script: str, status: int) -> None:
    (tmp_path / "ranks.py").write_text(script)
    start = time.monotonic()
    assert launch(2, str(tmp_path / "ranks.py")).returncode == status
    assert time.monotonic() - start < 9


def test_the_launcher_passes_signals_on_and_ends_with_its_own_interruption(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "open(f'ready-{os.environ[\"RANK\"]}', 'w').close()\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2", "ranks.py"]
    for number, status in ((signal.SIGUSR1, 75), (signal.SIGTERM, 75), (signal.SIGINT, 130)):
        with subprocess.Popen(command, cwd=tmp_path, env=clean_environment()) as process:
            ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
            while not all(path.exists() for path in ready):
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(timeout=20) == status
        for path in ready:
            path.unlink()


class Requeues:
    """A Slurm that starts a job again for as long as it asks for it, and sends it a signal at a random step."""

    def __init__(self, folder: Path, settings: dict):
        self.folder, self.random = folder, random.Random(5)
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(settings))
        executable(folder / "bin/scontrol", f'echo "$*" >> "{folder}/requeues.txt"')
        environment = clean_environment(SLURM_JOB_ID="77", DEMO_PROMPT="x", NPROC="2")
        self.environment = environment | {"PATH": f"{folder}/bin:{environment['PATH']}"}

    def requeued(self) -> int:
        path = self.folder / "requeues.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def start(self, restart: int, preempt: bool) -> int:
        """The status of one start of the job."""
        log = self.folder / f"job-{restart}.txt"
        environment = self.environment | {"SLURM_RESTART_COUNT": str(restart)}
        with log.open("w") as out:
            job = subprocess.Popen(
                [str(ROOT / "run_training.sh"), str(self.config)],
                env=environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            wanted = self.random.randint(1, 2)
            while preempt and log.read_text().count("\nstep ") < wanted and job.poll() is None:
                time.sleep(0.05)
            if preempt:
                job.send_signal(self.random.choice(SIGNALS))
                time.sleep(self.random.random() / 5)
                job.send_signal(signal.SIGTERM)
            return job.wait(timeout=300)


@pytest.mark.parametrize(
    "preemptions",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(20, marks=[pytest.mark.reliability, pytest.mark.timeout(3600)]),
    ],
)  # fmt: skip
def test_preemptions_in_a_requeue_loop(settings: dict, tmp_path: Path, preemptions: int) -> None:
    """Two ranks, ZeRO 1, FP8, run_training.sh, a stand-in scontrol: the weights of the uninterrupted run, each sample
    once."""
    steps = 6 * preemptions
    settings |= {"max_steps": steps, "gradient_accumulation_steps": 1}
    whole = tmp_path / "whole"
    done = launch(2, "train/train.py", write(tmp_path / "whole.json", {**settings, "output_dir": str(whole)}))
    assert done.returncode == 0, done.stdout
    jobs = Requeues(tmp_path, settings)
    for preempted in range(preemptions):
        assert jobs.start(preempted, preempt=True) == signals.STOPPED
        assert jobs.requeued() == preempted + 1
    assert jobs.start(preemptions, preempt=False) == 0
    folder = Path(settings["output_dir"])
    assert [m["step"] for m in metrics(folder)] == list(range(1, steps + 1)), "each step once"
    assert_equal_runs(folder, whole, steps)
    states = [checkpoint.read_state(f / f"checkpoints/step-{steps:08d}") for f in (folder, whole)]
    assert states[0].consumed_samples == states[1].consumed_samples == steps * 4


def write(path: Path, settings: dict) -> str:
    path.write_text(json.dumps(settings))
    return str(path)
