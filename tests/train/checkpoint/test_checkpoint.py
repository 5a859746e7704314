"""Only a folder with a manifest whose hashes hold is a checkpoint; which one is chosen, and what a save leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import log_messages, refused
from tests.train.runs import ROOT, metrics, run
from train.checkpoint import files as checkpoint_files
from train.checkpoint import load, save
from train.checkpoint.files import (
    MANIFEST,
    ROLLBACK,
    RUN_STATE,
    CheckpointError,
    RunState,
    checkpoint_name,
    committed,
    describe_file,
    discard_old,
    parse_step,
    problems,
    read_manifest,
    read_state,
    record_rollback,
    write_manifest,
)
from train.checkpoint.load import choose_checkpoint, fits_fp8_state, move_later_checkpoints
from train.checkpoint.reshard import load_shard
from train.checkpoint.save import Ranks, SaveError, Saver, rank_state
from train.files import is_transient
from train.inspect_checkpoint import describe, find_damage, main

pytestmark = pytest.mark.usefixtures("process_group")


def make(root: Path, step: int, **state_values: Any) -> Path:
    """Write a committed checkpoint of two files."""
    path = root / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(bytes(range(256)) * step)
    commit(path, RunState(step, 8 * step, 64 * step, 1, 1, {}, {}, **state_values))
    return path


def commit(path: Path, state: RunState) -> None:
    (path / RUN_STATE).write_text(json.dumps(vars(state)))
    write_manifest(path, [describe_file(path / "weights.pt"), describe_file(path / RUN_STATE)])


def steps(root: Path) -> list[int]:
    return [parse_step(path) for path in committed(root)]


def fault(number: int | None) -> Callable[..., None]:
    """Return a function that raises the system's error of this number."""

    def act(*_: object, **options: object) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    return act


# ---------------------------------------------------------------- which one is chosen


def test_newest_committed_checkpoint_is_chosen(tmp_path: Path) -> None:
    make(tmp_path, 9), make(tmp_path, 10)
    (make(tmp_path, 11) / MANIFEST).unlink()
    assert choose_checkpoint(tmp_path, "auto") == tmp_path / checkpoint_name(10)
    assert choose_checkpoint(tmp_path, str(tmp_path / checkpoint_name(9))) == tmp_path / checkpoint_name(9)
    assert choose_checkpoint(tmp_path, "never") is None
    assert choose_checkpoint(tmp_path / "empty", "auto") is None
    for setting in ("always", "step-00000099", str(tmp_path / checkpoint_name(11))):
        with refused(CheckpointError, key="resume_from_checkpoint"):
            choose_checkpoint(tmp_path, setting)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt"),
        (lambda p: (p / "weights.pt").write_bytes(b"x"), "weights.pt"),
        (lambda p: (p / "weights.pt").write_bytes(bytes(range(255)) * 2 + b"ab"), "weights.pt"),
        (lambda p: (p / MANIFEST).write_text("{"), MANIFEST),
        (lambda p: (p / MANIFEST).write_text("{}"), MANIFEST),
        (lambda p: (p / MANIFEST).write_text("[]"), MANIFEST),
    ],
)
def test_damaged_checkpoint_falls_back_to_the_previous(tmp_path: Path, damage, file: str) -> None:
    root = tmp_path / "checkpoints"
    damage(make(root, 2))
    with refused(CheckpointError, code="none_verifies", key=str(root)):
        choose_checkpoint(root, "auto")
    make(root, 1)
    with log_messages() as log:
        assert choose_checkpoint(root, "auto") == root / checkpoint_name(1)
    assert len(log) == 1 and file in log[0]
    with refused(CheckpointError, code="no_checkpoint") as error:
        choose_checkpoint(root, str(root / checkpoint_name(2)))
    assert str(root / checkpoint_name(2) / file) in str(error.value)


def test_branch_resumes_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Also when its start is gone or one of its checkpoints is damaged. Another run's checkpoint is refused."""
    start, other = make(tmp_path / "old", 3), make(tmp_path / "old", 4)
    root = tmp_path / "new"
    assert choose_checkpoint(root, str(start)) == start
    for step in (5, 6):
        make(root, step, began_at={"path": str(start.resolve()), "manifest_sha256": "0"})
    good = (root / checkpoint_name(5) / RUN_STATE).read_text()
    (root / checkpoint_name(5) / RUN_STATE).write_text("")
    assert choose_checkpoint(root, str(start)) == root / checkpoint_name(6)
    (root / checkpoint_name(5) / RUN_STATE).write_text(good)
    (root / checkpoint_name(6) / RUN_STATE).write_text("")
    assert choose_checkpoint(root, str(start)) == root / checkpoint_name(5)
    with refused(CheckpointError, code="other_run", key="resume_from_checkpoint"):
        choose_checkpoint(root, str(other))
    assert choose_checkpoint(root, str(root / checkpoint_name(5))) == root / checkpoint_name(5)
    shutil.rmtree(start)
    assert choose_checkpoint(root, str(start)) == root / checkpoint_name(5)


def test_unreadable_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run would start over. A file that cannot be read is damage."""
    path = make(tmp_path, 1)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint_files, "sha256_file", fault(errno.ESTALE))
        assert len(problems(path)) == 1
    monkeypatch.setattr(checkpoint_files.os, "listdir", fault(errno.ESTALE))
    with pytest.raises(OSError):
        choose_checkpoint(tmp_path, "auto")


# ---------------------------------------------------------------- the manifest


def test_single_bit_flip_is_detected(tmp_path: Path) -> None:
    """In the manifest at every place."""
    path = make(tmp_path, 1)
    assert problems(path) == []
    for file in path.iterdir():
        whole = file.read_bytes()
        is_manifest = file.name == MANIFEST
        bits = range(8 * len(whole)) if is_manifest else (2, 4 * len(whole) + 2, 8 * len(whole) - 6)
        for bit in bits:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            (problem,) = problems(path, hashes=not is_manifest)
            assert is_manifest or str(file) in problem, bit
        file.write_bytes(whole)
    assert problems(path) == []


def test_invisible_files_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, 1)
    entries = [{"name": n, "bytes": size, "sha256": h} for n, (size, h) in read_manifest(path).items()]
    (path / MANIFEST).unlink()
    monkeypatch.setattr(checkpoint_files, "VISIBILITY_TIMEOUT_S", 0.2)
    elsewhere = {"name": "rank_00008.pt", "bytes": 5, "sha256": "0"}
    for _ in range(2):  # nothing of it is visible, then a part
        with pytest.raises(OSError):
            write_manifest(path, [*entries, elsewhere])
        (path / "rank_00008.pt").write_bytes(b"1234")
    assert committed(tmp_path) == []
    (path / "rank_00008.pt").write_bytes(b"12345")
    write_manifest(path, [*entries, elsewhere])
    assert committed(tmp_path) == [path]


def test_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut would leave a manifest of empty files."""
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((file.name.removesuffix(".tmp"), 0 if file.is_dir() else file.stat().st_size))

    def capture(engine: Any, path: Path, take: Any) -> None:
        take("weights.pt", {"weights": torch.arange(400_000.0)})

    monkeypatch.setattr(save, "capture_checkpoint", capture)
    monkeypatch.setattr(save, "rank_state", lambda module, precision: {"torch_rng": torch.get_rng_state()})
    nothing: Any = SimpleNamespace(module=None)
    saver = Saver(nothing, tmp_path / "checkpoints", nothing, Ranks(), 1)
    monkeypatch.setattr(os, "fsync", sync)
    saver.begin(RunState(3, 24, 0, 1, 1, {}, {}), background=False)
    job = saver.finish()
    assert job is not None and problems(job.path) == []
    sizes = {file.name: file.stat().st_size for file in job.path.iterdir()}
    last = synced.index((MANIFEST, sizes.pop(MANIFEST)))
    assert sizes.items() <= set(synced[:last]) and read_manifest(job.path).keys() == sizes.keys()
    assert (job.path.name, 0) in synced[last:] and (job.path.parent.name, 0) in synced[:last]


# ---------------------------------------------------------------- the place of a save


def test_later_checkpoints_are_moved(tmp_path: Path) -> None:
    """Also where `checkpoints` is a link to another disk, across which nothing can be renamed."""
    other, root = tmp_path / "other_disk/of_this_run", tmp_path / "run/checkpoints"
    for step in (1, 2, 3):
        make(other, step)
    (make(other, 4) / MANIFEST).unlink()
    (other / checkpoint_name(5)).touch()  # no folder, and so no save
    root.parent.mkdir()
    root.symlink_to(other)
    aside = move_later_checkpoints(root, after_step=1)
    assert steps(root) == [1] and aside is not None and steps(aside) == [2, 3]
    assert aside.parent == other.parent and move_later_checkpoints(root, after_step=1) is None
    assert sorted(path.name for path in other.iterdir()) == [checkpoint_name(1), checkpoint_name(5)]


def test_save_total_limit(tmp_path: Path) -> None:
    """The new checkpoint is never deleted, even if a checkpoint of a later step exists."""
    for step in (1, 2, 3, 4, 5, 9):
        make(tmp_path, step)
    for keep, keep_every, expected in (
        (0, 0, [1, 2, 3, 4, 5, 9]),
        (0, 2, [1, 2, 3, 4, 5, 9]),
        (4, 0, [2, 3, 4, 5, 9]),
        (2, 2, [2, 4, 5, 9]),
        (1, 4, [4, 5, 9]),
        (1, 0, [5, 9]),
    ):
        discard_old(tmp_path / checkpoint_name(5), keep, keep_every)
        assert steps(tmp_path) == expected


def test_unreadable_folder_after_a_save_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is complete, and the next save removes the old ones."""
    for step in (1, 2, 3):
        make(tmp_path, step)
    with monkeypatch.context() as patch, log_messages() as log:
        patch.setattr(checkpoint_files.os, "listdir", fault(errno.ESTALE))
        discard_old(tmp_path / checkpoint_name(2), keep=1)
    assert len(log) == 1 and log[0].startswith("warning: ")
    discard_old(tmp_path / checkpoint_name(3), keep=1)
    assert steps(tmp_path) == [3]


def test_interrupted_removal_leaves_no_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 1), make(tmp_path, 2)

    def killed(path: Path) -> None:
        (path / "weights.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint_files.shutil, "rmtree", killed)
        discard_old(tmp_path / checkpoint_name(2), keep=1)
    assert steps(tmp_path) == [2]
    make(tmp_path, 3)
    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", fault(errno.EBUSY))
    discard_old(tmp_path / checkpoint_name(3), keep=1)
    assert steps(tmp_path) == [3]


def test_removing_a_linked_checkpoint_removes_the_link(tmp_path: Path) -> None:
    """As one of an archive, from which a run began."""
    kept, half, root = (
        make(tmp_path / "archive", 2),
        tmp_path / "archive" / checkpoint_name(4),
        tmp_path / "run",
    )
    half.mkdir()
    newest = make(root, 3)
    for path in (kept, half):
        (root / path.name).symlink_to(path)
    discard_old(newest, keep=1)
    assert move_later_checkpoints(root, after_step=3) is None
    assert sorted(root.iterdir()) == [newest] and problems(kept) == [] and half.is_dir()


# ---------------------------------------------------------------- errors of a save


@pytest.mark.parametrize(
    ("numbers", "passes"),
    [
        ([errno.EIO, None], True),
        ([None, errno.ESTALE], True),
        ([errno.EIO, errno.ENOSPC], False),
        ([errno.ENOSPC, None], False),
    ],
)
def test_error_is_transient_only_if_so_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int | None], passes: bool
) -> None:
    ranks, found = Ranks(), list[tuple]()
    monkeypatch.setattr(ranks, "all_gather", lambda value: found.append(value) or [(None, None, True)])
    for number in numbers:
        ranks.run(fault(number))
    monkeypatch.setattr(ranks, "all_gather", lambda value: found)
    with pytest.raises(SaveError) as error:
        ranks.run(fault(None))
    assert error.value.is_transient == passes


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((OSError(n, os.strerror(n)), True) for n in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)),
        *((OSError(n, ""), False) for n in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)),
        *((OSError(n, os.strerror(n)), False) for n in (errno.ENOENT, errno.EEXIST)),
        (OSError(errno.EIO, "I/O error: No space left on device (os error 28)"), False),
        (TimeoutError("no answer"), True),
        (OSError("the disk has not the room"), False),
        (MemoryError("no host memory"), False),
        (ValueError("5"), False),
    ],
)
def test_transient_errors(error: Exception, passes: bool) -> None:
    assert is_transient(error) == passes
    error.__cause__ = None
    outer = ValueError("because of it")
    outer.__cause__ = error
    assert is_transient(outer) == passes


# ---------------------------------------------------------------- what is in the files


def test_random_state_is_restored(tmp_path: Path) -> None:
    """In the form in which a rank saves them."""
    precision = Precision(PrecisionConfig(compute="fp32", backend="reference"))
    torch.save(rank_state(torch.nn.Linear(1, 1), precision), tmp_path / "rank_00000.pt")

    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist()]

    first, second = draw(), draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    load.set_random_state(torch.load(tmp_path / "rank_00000.pt", weights_only=True))
    assert [draw(), draw()] == [first, second]


def test_invalid_run_state_raises(tmp_path: Path) -> None:
    file = make(tmp_path, 3) / RUN_STATE
    assert read_state(file.parent).consumed_samples == 24
    for content in (json.dumps(json.loads(file.read_text()) | {"horizon": 7}), "[]", "{}", "{"):
        file.write_text(content)
        with refused(CheckpointError, code="damaged", key=str(file)):
            read_state(file.parent)


def test_other_format_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "SCHEMA", 3)
        path = make(tmp_path, 3)
    with refused(CheckpointError, code="other_format", key=str(path / MANIFEST)):
        read_manifest(path)


USUAL: dict[str, Any] = {"recipe": "delayed", "backend": "reference"}


@pytest.mark.parametrize(
    ("now", "before", "is_kept"),
    [
        *(({key: value}, {}, False) for key, value in (
            ("compute", "bf16"), ("recipe", "current"), ("fp8_format", "hybrid"), ("amax_history_len", 7),
            ("reduce_amax", False), ("bf16_modules", ["*.o_proj"]))),
        *(({key: value}, {}, True) for key, value in (
            ("margin", 3), ("amax_compute_algo", "most_recent"), ("health_steps", 5))),
        # a version with another default for a key that nothing reads
        ({"recipe": "current"}, {"recipe": "current", "amax_history_len": 1024}, True),
        ({"compute": "bf16"}, {"compute": "bf16", "amax_history_len": 1024}, True),
    ],
)  # fmt: skip
def test_fits_fp8_state(now: dict, before: dict, is_kept: bool) -> None:
    """Histories of another length, or scales for another range, would be those of other tensors."""
    precision = Precision(PrecisionConfig(**USUAL | now))
    recipe = {key: value for key, value in before.items() if key != "amax_history_len"}
    section = vars(PrecisionConfig(**USUAL | recipe)) | before
    saved = RunState(3, 24, 0, 1, 1, {}, {}, precision=section)
    assert fits_fp8_state(saved, precision) is is_kept


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_from_folder_with_glob_characters(settings: dict, stage: int) -> None:
    """At ZeRO 3 exported, too."""
    folder = Path(settings["output_dir"]).with_name("run[lr=3e-4]*")
    settings |= {"output_dir": str(folder), "deepspeed": f"ds_config_zero{stage}.json"}
    for max_steps in (2, 3):
        run(
            settings,
            max_steps=max_steps,
            allow_changes_on_resume=["max_steps"],
            lr_scheduler_type="constant",
        )
    assert [m["step"] for m in metrics(folder) if "loss" in m] == [1, 2, 3] and (
        folder / "hf/config.json"
    ).is_file()


# ---------------------------------------------------------------- code in the files


MODEL, OPTIMIZER, RANK = "*model_states.pt", "*optim_states.pt", "rank_00000.pt"


class Payload:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def poison(checkpoint: Path, pattern: str, mark: Path) -> Path:
    """Add a payload to a file of `checkpoint`, and commit the checkpoint again."""
    (file,) = checkpoint.glob(pattern)
    content = torch.load(file, weights_only=False)
    torch.save(content | {"more": Payload(mark)}, file)
    write_manifest(checkpoint, [describe_file(checkpoint / name) for name in read_manifest(checkpoint)])
    return file


@pytest.mark.parametrize("pattern", [MODEL, OPTIMIZER, RANK])
def test_pickle_payload_is_not_executed(
    pattern: str, settings: dict, own_trained: Path, tmp_path: Path
) -> None:
    """By a resume, which DeepSpeed or the resharding loads, and by what exports and evaluations load."""
    checkpoint, mark = own_trained / "checkpoints/step-00000006", tmp_path / "executed"
    file = poison(checkpoint, pattern, mark)
    settings |= {"max_steps": 7, "lr_scheduler_type": "constant", "allow_changes_on_resume": True}
    for changes in ({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        with pytest.raises(CheckpointError) as error:
            run(settings, **changes)
        assert file.name in str(error.value) or file.parent.name in str(error.value)
    with pytest.raises(CheckpointError):
        load_shard(file)
    assert not mark.exists()


class Attribute:
    """Pickled as a call of getattr, like a member of an enum in Python 3.11.2."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, self.name)


def test_getattr_loads_only_enum_members(tmp_path: Path) -> None:
    file = tmp_path / "model_states.pt"
    torch.save({"stage": Attribute("weights")}, file)
    assert load_shard(file)["stage"] is ZeroStageEnum.weights
    torch.save({"stage": Attribute("mro")}, file)
    with pytest.raises(CheckpointError):
        load_shard(file)


def test_checkpoints_are_loaded_in_one_place() -> None:
    """`load_shard` allows only tensors and plain values."""
    sources = [
        path for folder in ("train", "model", "fp8_inference_demo") for path in (ROOT / folder).rglob("*.py")
    ]
    places = [path.relative_to(ROOT).as_posix() for path in sources if "torch.load(" in path.read_text()]
    assert places == ["train/checkpoint/reshard.py"]


# ---------------------------------------------------------------- inspect_checkpoint.py


def status(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_intact_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    changes = [{"step": 4, "key": "learning_rate", "old": 3e-4, "new": 1e-4}]
    first = make(root, 10, changes=changes, began_at={"path": "old/step-00000002", "manifest_sha256": "0"})
    newest = make(root, 20)
    for given in (tmp_path, root, newest):
        assert status(given, "--verify") == 0
    assert status(newest.rename(tmp_path / "best")) == 0
    about = "\n".join(describe(first))
    for value in ("640 tokens", "1 ranks,", "ZeRO 1", "0.0 MB", "old/step-00000002", "0.0003 -> 0.0001"):
        assert value in about


@pytest.mark.parametrize(
    ("damage", "file", "needs_verify"),
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt", False),
        (lambda p: os.truncate(p / "weights.pt", 9), "weights.pt", False),
        (lambda p: (p / "weights.pt").write_bytes(bytes(5120)), "weights.pt", True),
        (lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text() + " "), MANIFEST, False),
        (lambda p: (p.parent / ROLLBACK).write_text("{"), ROLLBACK, False),
    ],
)
def test_damaged_checkpoint_exits_with_status_1(
    tmp_path: Path, damage: Callable[[Path], object], file: str, needs_verify: bool
) -> None:
    make(tmp_path, 10)
    newest = make(tmp_path, 20)
    record_rollback(newest, [[4, 8]])
    assert find_damage(newest, True) == []
    damage(newest)
    (found,) = find_damage(newest, True) or []
    assert file in found
    assert status(tmp_path, "--verify") == 1 and status(tmp_path) == (0 if needs_verify else 1)


def test_uncommitted_checkpoint_is_ignored(tmp_path: Path) -> None:
    make(tmp_path, 20)
    (make(tmp_path, 30) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(40)).mkdir()
    assert (
        find_damage(tmp_path / checkpoint_name(30), True)
        is find_damage(tmp_path / checkpoint_name(40), True)
        is None
    )
    assert status(tmp_path, "--verify") == 0 and status(tmp_path / checkpoint_name(40)) == 1


def test_missing_folder(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"schema": 1, "shards": []}')  # prepared data have one, too
    assert status(tmp_path / "nowhere") == status(tmp_path) == 2
