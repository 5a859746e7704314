"""on_spike rollback: which samples are skipped, how often, and what is noted for a restart after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import refused
from tests.train.checkpoint.test_checkpoint import commit, make
from tests.train.checkpoint.test_resume import state_of
from train.checkpoint import load
from train.checkpoint.files import (
    ROLLBACK,
    CheckpointError,
    RunState,
    committed,
    read_state,
    record_rollback,
    rolled_back,
)
from train.checkpoint.resume import resume_state
from train.data.order import next_position
from train.monitor.spikes import Health, Spike

pytestmark = pytest.mark.usefixtures("process_group")
DELAYED = PrecisionConfig(recipe="delayed", backend="reference")


class World:
    """A run of 8 samples a step whose checkpoints nobody loads."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, state: RunState):
        self.root, self.state, self.precision = root, state, Precision(DELAYED)
        self.resharded: list[bool] = []
        self.logged: list[dict[str, Any]] = []
        monkeypatch.setattr(load, "load_checkpoint", lambda *given: self.resharded.append(given[-1]))

    def roll_back(self, *firsts: int) -> bool:
        """After spikes in the steps of these first samples."""
        spikes = [Spike(first // 8, first, first - 8, "loss", 9.0, 1.0, 2.0) for first in firsts]
        return self.roll_back_after(spikes, SimpleNamespace(load_state_dict=id))

    def roll_back_after(self, spikes: list[Spike], health: Any) -> bool:
        metrics: Any = SimpleNamespace(log=self.logged.append, rewind=id)
        sought: list[tuple] = []
        stream: Any = SimpleNamespace(sample_ids=lambda *_: [], seek=lambda *given: sought.append(given))
        options = {"root": self.root, "engine": None, "precision": self.precision, "state": self.state}
        done = load.roll_back(spikes, 8, **options, health=health, metrics=metrics, stream=stream)
        assert sought == [(self.state.consumed_samples, self.state.sources)] * done
        return done


def state_at(step: int, **values: Any) -> RunState:
    return RunState(step, 8 * step, 0, 1, 1, {"learning_rate": 3e-4}, {}, **values)


def test_rollback_skips_samples_around_the_spikes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But none from before the checkpoint. A run goes back to one checkpoint at most three times, restarts included:
    else one that spikes and crashes would do so without end."""
    world = World(tmp_path, monkeypatch, state_at(9, skipped_samples=[[1, 2]]))
    assert not world.roll_back(64), "there is no checkpoint"
    path = make(tmp_path, 3, skipped_samples=[[1, 2]])
    for spikes, skipped in (((48, 64), [40, 72]), ((24, 24), [24, 32]), ((56,), [48, 64])):
        assert world.roll_back(*spikes) and (world.state.step, world.state.consumed_samples) == (3, 24)
        assert world.state.skipped_samples[-1] == skipped
        back = world.logged.pop()["rollback"]
        ends = [back["first_sample"], back["first_sample"] + back["samples"], back["from_step"]]
        assert ends == [*skipped, spikes[-1] // 8]
        restarted = rolled_back(path)
        assert restarted == world.state.skipped_samples
        world.state = state_at(9, skipped_samples=restarted)
    assert not world.roll_back(48) and len(rolled_back(path) or []) == 4
    make(tmp_path, 4, skipped_samples=world.state.skipped_samples)
    assert world.roll_back(48) and world.state.step == 4


def test_repeated_rollbacks_skip_more_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second rollback on, skipped samples lie between that step and the spike."""
    path = make(tmp_path, 3, health={"loss": [1.0] * 16, "grad_norm": [1.0] * 16})
    world, health = World(tmp_path, monkeypatch, read_state(path)), Health(16, 10.0)
    state = world.state
    health.load_state_dict(state.health)
    for losses, expected in (
        ([1.0, 1.0, 1.0, 9.0], [24, 32, 40, 48]),
        ([1.0, 1.0, 9.0], [24, 32, 56]),
        ([1.0, 9.0], [24, 64]),
    ):
        trained = []
        for loss in losses:
            state.consumed_samples = next_position(state.consumed_samples, 8, state.skipped_samples)
            trained.append(state.consumed_samples)
            state.step += 1
            health.record(state.step, trained[-1], {"text": 1.0}, torch.tensor(loss), None, 1.0)
            state.consumed_samples += 8
        assert trained == expected
        assert world.roll_back_after(health.find_spikes(8), health)
        assert state.skipped_samples[-1] == [trained[-2], trained[-1] + 8]


@pytest.mark.parametrize(
    ("fingerprint", "compute"), [({"seed": 7}, "fp8"), ({}, "bf16")], ids=["order", "precision"]
)
def test_no_rollback_across_data_or_precision_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fingerprint: dict, compute: str
) -> None:
    """Positions are other samples there; and its FP8 state is of no use."""
    saved = state_at(3, precision=vars(DELAYED) | {"compute": compute})
    commit(make(tmp_path, 3), saved)
    world = World(tmp_path, monkeypatch, state_at(5, data_fingerprint=fingerprint))
    assert not world.roll_back(40) and not world.resharded and world.state.step == 5


def test_rollback_keeps_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    path, newer = make(root, 3), make(root, 6)
    (newer / "weights.pt").write_bytes(b"")
    old, new = (state_of({"deepspeed": {"zero_optimization": {"stage": n}}}) for n in (1, 2))
    saved = state_at(3, evaluation_due=True)  # the run has evaluated since
    saved.train_config = old.train_config
    commit(path, saved)
    changes = [{"step": 6, "key": "learning_rate", "old": 3e-4, "new": 1e-4}]
    own = {"changes": changes, "began_at": {"path": "old"}, "train_config": new.train_config}
    own |= {"model_config": {"a": 1}, "world_size": 2, "zero_stage": 2}
    state = state_at(9, escalations=[{"step": 3, "module": "lm_head", "to": "bf16"}])
    vars(state).update(own)
    world = World(root, monkeypatch, state)
    assert world.roll_back(40) and world.resharded == [True]
    assert committed(root) == [path]  # else the save of step 6 would find its place taken
    assert (state.step, state.consumed_samples, state.skipped_samples) == (3, 24, [[32, 48]])
    assert {key: getattr(state, key) for key in own} == own
    assert state.fallbacks == {"lm_head": "bf16"} and not state.evaluation_due


def test_damaged_rollback_record_raises(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    note = tmp_path / ROLLBACK
    record_rollback(paths[1], [[34, 38]])
    assert [rolled_back(path) for path in paths] == [None, [[34, 38]], None]
    for content in (note.read_bytes().replace(b"34", b"35"), b"", b"{", b"{}", b"[]", b"\0" * 200):
        note.write_bytes(content)
        with refused(CheckpointError, key=str(note)):
            rolled_back(paths[1])


@pytest.mark.parametrize(
    ("changes", "noted", "expected"),
    [
        ({}, None, [[4, 8]]),
        ({}, [[4, 8], [34, 38]], [[4, 8], [34, 38]]),
        ({"seed": 43}, [[4, 8]], []),  # positions of another order
    ],
)
def test_resume_after_rollback_skips_samples(
    tmp_path: Path, changes: dict, noted: list | None, expected: list
) -> None:
    root = tmp_path / "checkpoints"
    saved = state_of({"output_dir": str(tmp_path)})
    saved.skipped_samples = [[4, 8]]
    path = make(root, 3)
    if noted:
        record_rollback(path, noted)
    new = state_of({"output_dir": str(tmp_path)} | changes)
    resume_state(new, RunState(**json.loads(json.dumps(vars(saved)))), path, True)
    assert new.skipped_samples == expected and new.began_at == {}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "ranges", [[], [[4, 8]], [[10, 12], [4, 8]], [[4, 8], [7, 15]], [[34, 38]], [[0, 3]]]
)
def test_rollback_with_another_batch_size(count: int, ranges: list[list[int]]) -> None:
    taken: list[int] = []
    position = 2
    while position < 60:
        position = next_position(position, count, ranges)
        taken += range(position, position + count)
        position += count
    skipped = {n for first, end in ranges for n in range(first, end)}
    assert len(set(taken)) == len(taken) and not skipped & set(taken)
    missed = set(range(2, position)) - set(taken) - skipped
    assert len(missed) <= (count - 1) * len(ranges)
