"""on_spike rollback: what is left out, how often, and what is noted of it for a start after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import numbers, refused
from tests.train.checkpoint.test_checkpoint import make
from tests.train.runs import curve, metrics, run
from train.checkpoint import rollback
from train.checkpoint.files import (
    RUN_STATE,
    CheckpointError,
    RunState,
    committed,
    describe_file,
    note_rollback,
    read_state,
    write_manifest,
)
from train.checkpoint.load import set_aside
from train.checkpoint.rollback import (
    Rollback,
    left_out_since,
    told_besides,
)
from train.data.order import count_passed_over, next_position
from train.guard.health import Health, Spike

pytestmark = pytest.mark.usefixtures("process_group")


def note(root: Path) -> Path:
    """That of a rollback to the checkpoint of step 2."""
    note_rollback(root / "step-00000002", [[34, 38]])
    return root / "rollback.json"


def test_there_is_no_way_back_to_before_the_data_changed(tmp_path: Path, logged: list[str]) -> None:
    """The samples to leave out are positions in another order there."""
    path = make(tmp_path, 3)
    state = read_state(path)
    state.data_fingerprint = {"seed": 7}
    nothing: Any = None
    rollback = Rollback(tmp_path, nothing, nothing, state, nothing, nothing, nothing)
    assert not rollback.after([Spike(5, 40, 32, "loss", 9.0, 1.0, 2.0)], samples=8)
    assert "step-00000003" in logged.pop() and not logged

    # nor is there FP8 state of this precision in what another precision wrote
    saved = vars(read_state(path)) | {"train_config": {"precision": asdict(PrecisionConfig(compute="bf16"))}}
    (path / RUN_STATE).write_text(json.dumps(saved))
    rollback.state, rollback.precision = read_state(path), Precision(PrecisionConfig(recipe="delayed"))
    write_manifest(path, [describe_file(path / "weights.pt"), describe_file(path / RUN_STATE)])
    assert not rollback.after([Spike(5, 40, 32, "loss", 9.0, 1.0, 2.0)], samples=8)
    assert len(logged) == 1 and "step-00000003" in logged[0]


class Back(Rollback):
    """To a checkpoint whose files nobody loads."""

    def _load(self, path: Path, saved: RunState, ranges: list[list[int]], others: int) -> None:
        self.went, self.state.skipped_samples = (path.name, ranges[-1]), ranges
        super()._load(path, saved, ranges, others)


def test_a_rollback_leaves_out_from_the_step_before_the_first_spike_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """But nothing from before the checkpoint; and to one of them it goes back three times at the most, however often
    the run is started again meanwhile: else one that spikes and crashes would do so without end. With the learning rate
    that is advised then it has three again, before its first save as well."""
    records, nothing = list[dict](), cast(Any, SimpleNamespace(load_state_dict=id))
    metrics: Any = SimpleNamespace(log=records.append, rewind=id)
    monkeypatch.setattr(rollback, "load_checkpoint", lambda *_: None)
    stream: Any = SimpleNamespace(sample_ids=lambda first, count: [])
    state = RunState(9, 72, 0, 1, 1, {"learning_rate": 3e-4}, {}, skipped_samples=[[1, 2]])

    def started() -> Back:
        return Back(tmp_path, nothing, nothing, state, nothing, metrics, stream)

    its = started()

    def after(*firsts: int) -> bool:
        return its.after(
            [Spike(first // 8, first, first - 8, "loss", 9.0, 1.0, 2.0) for first in firsts], samples=8
        )

    assert not after(64) and logged.pop()
    path = make(tmp_path, 3, skipped_samples=[[1, 2]])
    for spikes, left_out in (((48, 64), [40, 72]), ((24, 24), [24, 32]), ((56,), [48, 64])):
        assert after(*spikes) and its.went == ("step-00000003", left_out)
        state.skipped_samples, its = resumed_ranges(path), started()
        back = records.pop()["rollback"]
        ends = [back["first_sample"], back["first_sample"] + back["samples"], back["from_step"]]
        assert ends == [*left_out, spikes[-1] // 8]
    assert not after(48) and "step-00000003 --learning_rate 0.00015 --allow_changes_on_resume" in logged.pop()

    for rate in (1.5e-4, 7.5e-5):
        state.changes = [{"step": 3, "key": "learning_rate", "old": 3e-4, "new": rate}]
        for _ in range(3):
            assert after(48) and its.went[0] == "step-00000003"
            state.skipped_samples, its = resumed_ranges(path), started()
        assert not after(48)
    assert len(resumed_ranges(path)) == 10, "what was left out stays so"
    make(tmp_path, 4, skipped_samples=state.skipped_samples, changes=state.changes)
    assert after(48) and its.went[0] == "step-00000004"


def test_every_rollback_skips_the_step_that_ran_before_the_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second rollback on, skipped samples lie between that step and the spike."""
    saved = make(tmp_path, 3, health={"loss": [1.0] * 16, "grad_norm": [1.0] * 16})
    state = read_state(saved)
    monkeypatch.setattr(rollback, "load_checkpoint", lambda *_: None)
    engine: Any = SimpleNamespace(module=None, skipped_steps=0, get_global_grad_norm=lambda: 1.0)
    precision: Any = SimpleNamespace(device="cpu", has_state=False)
    metrics: Any = SimpleNamespace(message=id, log=id, rewind=id)
    stream: Any = SimpleNamespace(sample_ids=lambda first, count: [])
    health = Health(engine, precision, 16, 10.0)
    health.load_state_dict(state.health)
    its = Back(tmp_path, engine, precision, state, health, metrics, stream)
    for losses, trained in (
        ([1.0, 1.0, 1.0, 9.0], [24, 32, 40, 48]),
        ([1.0, 1.0, 9.0], [24, 32, 56]),
        ([1.0, 9.0], [24, 64]),
    ):
        taken = []
        for loss in losses:
            state.consumed_samples = next_position(state.consumed_samples, 8, state.skipped_samples)
            taken.append(state.consumed_samples)
            state.step += 1
            health.after_step(state.step, state.consumed_samples, {"text": 1.0}, torch.tensor(loss), None)
            state.consumed_samples += 8
        assert taken == trained
        assert its.after(health.look(8), samples=8)
        assert its.went[1] == [trained[-2], trained[-1] + 8]


def test_a_planned_change_of_the_mixture_causes_no_rollback(
    settings: dict,
    tmp_path: Path,
    prepare: Callable[..., int],
) -> None:
    """Neither in the run nor in a resume at the step of the change."""
    easy, text = tmp_path / "easy.txt", settings["data"]["sources"]["text"]
    easy.write_text("\n\n".join("a " * 60 + str(number) for number in range(400)))
    options = {"tokenizer": Path(text).parent / "tokenizer", "split_on": "blank_line", "eval_fraction": 0.2}
    assert prepare(tmp_path / "easy", easy, **options) == 0
    length, batch = 64, 4
    settings["data"] = {
        "sources": {"easy": str(tmp_path / "easy"), "text": text},
        "weights": [
            {"until_tokens": 20 * batch * length, "weights": {"easy": 1}},
            {"weights": {"text": 1}},
        ],
    }
    settings |= {"on_spike": "rollback", "spike_window": 16, "save_steps": 20, "save_total_limit": 9}
    whole = run(settings, max_steps=24, lr_scheduler_type="constant")
    losses = [line["loss"] for line in metrics(whole)]
    assert len(losses) == 24 and losses[20] > 1.5 * losses[19]
    state = read_state(whole / "checkpoints/step-00000024")
    assert (state.consumed_samples, state.skipped_samples, state.health["spikes"]) == (24 * batch, [], 0)
    branch = {"resume_from_checkpoint": str(whole / "checkpoints/step-00000020")}
    resumed = run(
        settings, output_dir=str(tmp_path / "resumed"), max_steps=24, **branch, lr_scheduler_type="constant"
    )
    assert curve(resumed) == curve(whole)[20:]
    assert read_state(resumed / "checkpoints/step-00000024").health["spikes"] == 0


def test_a_note_of_a_version_that_noted_no_changes_counts_for_the_run_as_it_was(tmp_path: Path) -> None:
    path = make(tmp_path, 2)
    note(tmp_path)
    count = [rollback.of_other_starts(path, read_state(path), changes) for changes in ([], [{"step": 2}])]
    assert count == [0, 1]
    note(tmp_path).write_text("damaged")  # a start that reads it is told
    assert rollback.of_other_starts(path, read_state(path), [{"step": 2}]) == 0


def test_a_rollback_keeps_what_this_start_has_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration, what was changed and where the run began are not those of the checkpoint gone back to; nor
    are its ranks, its ZeRO stage and what its files are cut by, by which they are to be loaded."""
    root, nothing = tmp_path / "checkpoints", cast(Any, SimpleNamespace(rewind=id, load_state_dict=id))
    path, newer = make(root, 3), make(root, 6)
    (newer / "weights.pt").write_bytes(b"")
    loaded = list[bool]()
    monkeypatch.setattr(rollback, "load_checkpoint", lambda engine, path, of, cut: loaded.append(cut))
    changes = [{"step": 6, "key": "learning_rate", "old": 3e-4, "new": 1e-4}]
    cut, otherwise = ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": n}}} for n in (1, 2))
    configs = otherwise, cut
    monkeypatch.setattr(
        rollback, "is_cut_otherwise", lambda *of: tuple(s.train_config for s in of) == configs
    )
    state = RunState(9, 72, 0, 2, 2, cut, {"a": 1}, changes=changes, began_at={"path": "old"})
    state.escalations = [{"step": 3, "module": "lm_head", "to": "bf16"}]
    saved = replace(read_state(path), evaluation_due=True)  # the run has made up for it since
    saved.train_config = otherwise
    Rollback(root, nothing, nothing, state, nothing, nothing, nothing)._load(path, saved, [[1, 2]], 0)
    assert committed(root) == [path]  # else the save of step 6 would find its place taken
    assert (state.step, state.consumed_samples, state.skipped_samples) == (3, 24, [[1, 2]])
    assert not state.evaluation_due
    assert (state.changes, state.began_at, state.model_config) == (changes, {"path": "old"}, {"a": 1})
    assert (state.world_size, state.zero_stage, state.train_config) == (2, 2, cut)
    assert state.levels == {"lm_head": "bf16"} and loaded == [True]


def resumed_ranges(path: Path) -> list[list[int]]:
    return left_out_since(path, read_state(path))


def test_every_bit_of_what_is_noted_of_a_rollback_counts(tmp_path: Path) -> None:
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    whole = note(tmp_path).read_bytes()
    assert [resumed_ranges(path) for path in paths] == [[], [[34, 38]], []]
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "rollback.json").write_bytes(changed)
        with refused(CheckpointError, key=str(tmp_path / "rollback.json")):
            resumed_ranges(paths[1])
    (tmp_path / "rollback.json").unlink()
    assert resumed_ranges(paths[1]) == []


def test_a_damaged_note_ends_the_ranks_that_do_not_read_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads it; the others would wait for it in the next collective."""
    path = make(tmp_path, 2)
    error = CheckpointError(code="damaged")

    def of_rank_0(found: list[Any], src: int) -> None:
        found[0] = error

    monkeypatch.setattr(rollback.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(rollback.dist, "broadcast_object_list", of_rank_0)
    with refused(CheckpointError, code="damaged"):
        resumed_ranges(path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"checkpoint": 1}', "\0" * 200])
def test_a_note_of_a_rollback_that_is_cut_off_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    path = make(tmp_path, 2)
    note(tmp_path).write_text(content)
    with refused(CheckpointError, code="damaged", key=str(tmp_path / "rollback.json")):
        resumed_ranges(path)


def test_the_note_of_a_rollback_goes_aside_with_its_checkpoint(tmp_path: Path) -> None:
    """A run that starts anew comes to the same checkpoint, bit for bit, and has not been rolled back."""
    for step in (1, 2, 3):
        make(tmp_path / "checkpoints", step)
    note(tmp_path / "checkpoints")
    set_aside(tmp_path / "checkpoints", after_step=2)
    assert resumed_ranges(tmp_path / "checkpoints/step-00000002") == [[34, 38]]
    aside = set_aside(tmp_path / "checkpoints", after_step=1)
    assert aside is not None and resumed_ranges(aside / "step-00000002") == [[34, 38]]
    assert resumed_ranges(make(tmp_path / "checkpoints", 2)) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    "ranges", [[], [[4, 8]], [[10, 12], [4, 8]], [[4, 8], [7, 15]], [[34, 38]], [[0, 3]]]
)
def test_steps_of_another_size_repeat_no_sample_and_what_they_pass_over_is_known(
    count: int, ranges: list[list[int]]
) -> None:
    taken: list[int] = []
    position = 2
    while position < 60:
        position = next_position(position, count, ranges)
        taken += range(position, position + count)
        position += count
    left_out = {n for first, end in ranges for n in range(first, end)}
    assert len(set(taken)) == len(taken) and not left_out & set(taken)
    passed_over = set(range(2, position)) - set(taken) - left_out
    assert count_passed_over(2, count, ranges) == len(passed_over) <= (count - 1) * len(ranges)


def test_a_resume_with_steps_of_another_size_tells_what_it_passes_over() -> None:
    def state(tokens: int) -> RunState:
        config = {"train_batch_size_tokens": tokens, "max_seq_length": 32}
        return RunState(16, 32, 1024, 1, 1, config, {}, skipped_samples=[[34, 38]])

    assert told_besides(state(64), state(64)) == []
    (told,) = told_besides(state(128), state(64))
    assert numbers(told) == [2, 4, 64, 128]
