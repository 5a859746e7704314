"""Only what a manifest names and whose hashes hold is a checkpoint."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import log_messages, refused
from train.checkpoint import files as checkpoint_files
from train.checkpoint import load
from train.checkpoint.files import (
    MANIFEST,
    RUN_STATE,
    CheckpointError,
    RunState,
    committed,
    describe_file,
    discard_old,
    identity,
    make_room,
    name_of,
    origin,
    problems,
    read_manifest,
    read_state,
    step_of,
    undo_save,
    write_manifest,
)
from train.checkpoint.load import choose_checkpoint, set_aside
from train.checkpoint.save import Job, Ranks, SaveError, rank_state
from train.files import size_text

pytestmark = pytest.mark.usefixtures("process_group")


def make(root: Path, step: int, **state_values: Any) -> Path:
    """A committed checkpoint of two files."""
    path = root / name_of(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(bytes(range(256)) * step)
    state = RunState(step, 8 * step, 64 * step, 1, 1, {}, {}, **state_values)
    (path / RUN_STATE).write_text(json.dumps(vars(state)))
    write_manifest(path, [describe_file(path / "weights.pt"), describe_file(path / RUN_STATE)])
    return path


def choose(root: Path, setting: str = "auto") -> tuple[Path | None, list[str]]:
    with log_messages() as log:
        return choose_checkpoint(root, setting), log


def begin_at(path: Path, own: Path) -> None:
    """Have the checkpoint `own` be of a run that began at `path`."""
    (own / RUN_STATE).write_text(json.dumps(vars(read_state(own)) | {"began_at": origin(path)}))
    write_manifest(own, [describe_file(own / "weights.pt"), describe_file(own / RUN_STATE)])


def test_a_branch_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Also when the one that it began at is gone, or the newest of its own is damaged. That of another run, or of
    another beginning, is not mixed in."""
    start, other = make(tmp_path / "old", 3), make(tmp_path / "old", 4)
    root = tmp_path / "new"
    assert choose(root, str(start)) == (start, [])
    for step in (5, 6):
        begin_at(start, make(root, step))
    chosen, (said,) = choose(root, str(start))
    assert chosen == root / "step-00000006"
    assert str(start) in said and "step-00000006" in said
    (root / "step-00000006" / RUN_STATE).write_text("")
    assert choose(root, str(start))[0] == root / "step-00000005"
    with refused(CheckpointError, code="other_run", key="resume_from_checkpoint"):
        choose(root, str(other))
    assert choose(root, str(root / "step-00000005")) == (root / "step-00000005", []), "its own is an order"
    shutil.copytree(start, tmp_path / "copy" / start.name)
    assert choose(root, str(tmp_path / "copy" / start.name))[0] == root / "step-00000005", (
        "the same one elsewhere"
    )
    shutil.rmtree(start)
    assert choose(root, str(start))[0] == root / "step-00000005"
    with refused(CheckpointError, code="no_checkpoint"):
        choose(root, str(tmp_path / "old" / "step-00000002"))


@pytest.mark.parametrize("theirs", [None, "0" * 64])
def test_a_rank_that_sees_another_checkpoint_or_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None
) -> None:
    """Of two, where nodes do not share the folder, or one of them has an older one of the same name."""
    path = make(tmp_path, 3)
    monkeypatch.setattr(load.dist, "get_world_size", lambda: 2)

    def all_gather(every: list, mine: str) -> None:
        assert mine == identity(path)
        every[:] = [mine, theirs]

    monkeypatch.setattr(load.dist, "all_gather_object", all_gather)
    with refused(CheckpointError, code="not_shared", key=str(path)) as error:
        choose(tmp_path)
    assert "[1]" in str(error.value)


def test_a_whole_checkpoint_has_no_problems(tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    assert problems(path) == []
    assert read_state(path).consumed_samples == 24


def test_the_newest_is_chosen(tmp_path: Path) -> None:
    make(tmp_path, 9), make(tmp_path, 10)
    assert choose(tmp_path) == (tmp_path / "step-00000010", [])
    assert choose(tmp_path, "never") == (None, [])
    assert choose(tmp_path / "empty") == (None, [])


def test_a_folder_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / MANIFEST).unlink()
    assert choose(tmp_path)[0] == tmp_path / "step-00000001"
    with refused(CheckpointError, code="no_checkpoint"):
        choose(tmp_path, str(tmp_path / "step-00000002"))


@pytest.mark.parametrize("setting", ["always", "step-00000099", "{root}/step-00000099"])
def test_what_can_be_resumed_from_is_listed(tmp_path: Path, setting: str) -> None:
    root = tmp_path / "checkpoints"
    with refused(CheckpointError, code="no_checkpoint", key="resume_from_checkpoint"):
        choose(root, setting.format(root=root))
    for last, newest in ((2, "step-00000001, step-00000002"), (7, ", ".join(map(name_of, range(3, 8))))):
        root = tmp_path / f"{last}/checkpoints"
        for step in range(1, last + 1):
            make(root, step)
        (make(root, last + 1) / MANIFEST).unlink()
        with refused(CheckpointError, code="no_checkpoint") as error:
            choose(root, setting.format(root=root))
        assert str(error.value).endswith(f" {root}: {newest}")


@pytest.mark.parametrize("part", [".", "checkpoints"])
def test_of_a_runs_folder_it_is_said_which_path_to_give(tmp_path: Path, part: str) -> None:
    """The newest by then would be another one when a branch that was killed starts again."""
    root = tmp_path / "run/checkpoints"
    newest = [make(root, step) for step in (1, 2, 3)][1]
    (root / "step-00000003/weights.pt").unlink()
    given = str(tmp_path / "run" / part)
    for own in (tmp_path / "branch", root):
        with refused(CheckpointError, code="run_folder", key="resume_from_checkpoint") as error:
            choose(own, given)
        assert str(newest) in str(error.value) and ("auto" in str(error.value)) == (own == root)


def test_a_damaged_checkpoint_is_not_offered_again(tmp_path: Path) -> None:
    make(tmp_path, 1), (make(tmp_path, 2) / "weights.pt").unlink()
    with refused(CheckpointError, code="no_checkpoint") as error:
        choose(tmp_path, str(tmp_path / "step-00000002"))
    assert "weights.pt" in str(error.value) and str(error.value).endswith(": step-00000001")


@pytest.mark.parametrize(
    "damage,file",
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt"),
        (lambda p: (p / "weights.pt").write_bytes(b"x"), "weights.pt"),
        (lambda p: (p / "weights.pt").write_bytes(bytes(range(255)) * 2 + b"ab"), "weights.pt"),
        (lambda p: (p / MANIFEST).write_text("{"), MANIFEST),
        (lambda p: (p / MANIFEST).write_text("{}"), MANIFEST),
        (lambda p: (p / MANIFEST).write_text('{"schema": 2, "files": [{"name": "weights.pt"}]}'), MANIFEST),
    ],
)
def test_damage_is_named_and_the_previous_one_used(tmp_path: Path, damage, file: str) -> None:
    make(tmp_path, 1)
    damage(make(tmp_path, 2))
    path, log = choose(tmp_path)
    assert path == tmp_path / "step-00000001"
    assert len(log) == 1 and file in log[0]
    with refused(CheckpointError, code="no_checkpoint") as error:
        choose(tmp_path, str(tmp_path / "step-00000002"))
    assert str(tmp_path / "step-00000002" / file) in str(error.value)


def test_nothing_usable_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    (make(tmp_path, 2) / "weights.pt").unlink()
    with refused(CheckpointError, code="none_verifies", key=str(tmp_path)):
        choose(tmp_path)


def test_a_single_flipped_bit_is_found_in_any_file(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    for file in [f for f in path.iterdir() if f.name != MANIFEST]:
        whole = file.read_bytes()
        for byte in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
            (problem,) = problems(path)
            assert str(file) in problem
        file.write_bytes(whole)
    assert problems(path) == []


def test_an_old_checkpoint_that_stays_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is as good as it would be without."""
    for step in (1, 2):
        make(tmp_path, step)

    def fails(folder: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", fails)
    with pytest.warns(UserWarning, match="step-00000001"):
        checkpoint_files.discard_old(tmp_path / "step-00000002", 1)


def test_later_checkpoints_are_set_aside_not_lost(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(root, step)
    aside = set_aside(root, after_step=1)
    assert [p.name for p in committed(root)] == ["step-00000001"]
    assert aside is not None and [p.name for p in committed(aside)] == [
        "step-00000002",
        "step-00000003",
    ]
    assert set_aside(root, after_step=1) is None


def test_checkpoints_on_another_disk_are_set_aside_there(tmp_path: Path) -> None:
    """Where `checkpoints` is a link to it, across which nothing could be renamed."""
    other = tmp_path / "other_disk/of_this_run"
    for step in (1, 2):
        make(other, step)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(other)
    aside = set_aside(tmp_path / "run/checkpoints", after_step=1)
    assert aside is not None and aside.parent == other.parent
    assert [p.name for p in committed(other)] == ["step-00000001"]


def test_files_that_other_machines_keep_to_themselves_are_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, 1)
    entries = [{"name": n, "bytes": size, "sha256": h} for n, (size, h) in read_manifest(path).items()]
    (path / MANIFEST).unlink()
    monkeypatch.setattr(checkpoint_files, "SEEN_WITHIN_S", 0.2)
    elsewhere = {"name": "rank_00008.pt", "bytes": 5, "sha256": "0"}
    for _ in range(2):  # nothing of it is seen, then a part
        with pytest.raises(OSError, match="rank_00008.pt"):
            write_manifest(path, [*entries, elsewhere])
        (path / "rank_00008.pt").write_bytes(b"1234")
    assert committed(tmp_path) == []
    (path / "rank_00008.pt").write_bytes(b"12345")
    write_manifest(path, [*entries, elsewhere])
    assert committed(tmp_path) == [path]


@pytest.mark.parametrize("where", ["train.files", "train.checkpoint.files"])
def test_a_manifest_that_is_not_surely_on_the_disk_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The save has failed, and is told so: what it wrote is not to be resumed from."""

    def fails(folder: Path) -> None:  # behind the manifest, or before it
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(f"{where}.sync_folder", fails)
    with pytest.raises(OSError) as error:
        make(tmp_path, 1)
    assert error.value.errno == 5
    assert committed(tmp_path) == []


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (make(tmp_path, 2) / MANIFEST).unlink()
    (tmp_path / "step-00000003").touch()  # no folder, nobody's save
    assert set_aside(tmp_path, after_step=1) is None
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_only_older_checkpoints_make_room_for_a_new_one(tmp_path: Path) -> None:
    """Never the one that was just committed, even with one of a later step beside it."""
    for step in (1, 2, 3, 9):
        make(tmp_path, step)
    discard_old(tmp_path / "step-00000003", keep=2)
    assert [step_of(p) for p in committed(tmp_path)] == [2, 3, 9]
    discard_old(tmp_path / "step-00000003", keep=1)
    assert [step_of(p) for p in committed(tmp_path)] == [3, 9]
    discard_old(tmp_path / "step-00000009", keep=0)
    assert [step_of(p) for p in committed(tmp_path)] == [3, 9]


def test_what_is_beyond_the_limit_makes_room_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk is full and save_total_limit was lowered, as the message of the full disk says."""
    for step in (1, 2, 3):
        make(tmp_path, step)
    there: list[list[int]] = []

    def looked(path: Path, needed: int) -> None:
        there.append([step_of(p) for p in committed(tmp_path)])
        make_room(path, needed)

    monkeypatch.setattr("train.checkpoint.save.make_room", looked)
    for step, keep in ((4, 2), (5, 0), (6, 1)):
        job = Job(tmp_path / name_of(step), Ranks(), keep, start=0.0)
        job.run_state = json.dumps(vars(RunState(step, 8 * step, 64 * step, 1, 1, {}, {})))
        job.run()
        assert job.failure is None
    assert there == [[2, 3], [3, 4], [5]]
    assert [step_of(p) for p in committed(tmp_path)] == [6]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1), make(tmp_path, 2)

    def killed(path: Path) -> None:
        (path / "weights.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint_files.shutil, "rmtree", killed)
        discard_old(tmp_path / "step-00000002", keep=1)
    assert [step_of(p) for p in committed(tmp_path)] == [2]


def test_a_manifest_of_another_schema_or_without_its_hash_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    content = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**content, "schema": 3}, indent=1))
    with refused(CheckpointError, code="other_schema", key=str(path / MANIFEST)):
        read_manifest(path)
    del content["sha256"]
    (path / MANIFEST).write_text(json.dumps(content, indent=1))
    with refused(CheckpointError, code="damaged", key=str(path / MANIFEST)):
        read_manifest(path)


def test_a_folder_with_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    """Its step would be taken from the one and the other: a later save would find its place taken, or go before it."""
    make(tmp_path, 1)
    renamed = make(tmp_path, 10).rename(tmp_path / name_of(20))
    with refused(CheckpointError, code="other_step", key=str(renamed)) as error:
        read_manifest(renamed)
    assert name_of(10) in str(error.value)
    assert problems(renamed, hashes=False) == problems(renamed) == [str(error.value)]
    with refused(CheckpointError, code="no_checkpoint"):
        choose(tmp_path, str(renamed))
    chosen, (told,) = choose(tmp_path)
    assert chosen == tmp_path / name_of(1) and name_of(20) in told
    renamed.rename(tmp_path / name_of(10))
    assert choose(tmp_path) == (tmp_path / name_of(10), [])
    best = (tmp_path / name_of(10)).rename(tmp_path / "best")  # says nothing of a step
    assert problems(best) == []


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    whole = (path / MANIFEST).read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (path / MANIFEST).write_bytes(changed)
        assert problems(path, hashes=False), bit


def test_a_save_without_room_leaves_what_is_committed(tmp_path: Path) -> None:
    path = make(tmp_path, 2)
    with pytest.raises(OSError, match=re.escape(size_text(2**60))):
        make_room(path, needed=2**60)
    with pytest.raises(FileExistsError):
        make_room(path, needed=0)
    assert str(path) in undo_save(path, 2**60, SaveError("rank 0: full"))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"] and problems(path) == []


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """In the form in which a rank saves them."""
    precision = Precision(PrecisionConfig(compute="fp32", backend="reference"))
    torch.save(rank_state(torch.nn.Linear(1, 1), precision), tmp_path / "rank_00000.pt")

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist()]

    first, second = draw(), draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    load.set_random_state(torch.load(tmp_path / "rank_00000.pt", weights_only=True))
    assert [draw(), draw()] == [first, second]


def test_a_run_state_of_a_newer_version_is_named_as_one(tmp_path: Path) -> None:
    """Not as damaged: its hash is right."""
    file = make(tmp_path, 3) / RUN_STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"horizon": 7}))
    with refused(CheckpointError, code="other_version", key="horizon"):
        read_state(file.parent)
    for content in ("[]", "{}", "{"):
        file.write_text(content)
        with refused(CheckpointError, code="damaged", key=str(file)):
            read_state(file.parent)


@pytest.mark.filterwarnings("error")
def test_of_a_checkpoint_that_is_linked_from_elsewhere_the_link_alone_goes(tmp_path: Path) -> None:
    """As one of an archive, from which a run began."""
    kept, half, root = make(tmp_path / "archive", 2), tmp_path / "archive/step-00000004", tmp_path / "run"
    half.mkdir()
    newest = make(root, 3)
    for path in (kept, half):
        (root / path.name).symlink_to(path)
    discard_old(newest, keep=1)
    assert set_aside(root, after_step=3) is None
    assert sorted(root.iterdir()) == [newest] and problems(kept) == [] and half.is_dir()
