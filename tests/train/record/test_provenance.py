"""run.json and train.log: what a start was, and what it said; also where they cannot be written. What was set aside."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import ModelCard

from model.fp8.hf_fp8 import quantization_config
from tests.conftest import numbers
from tests.train.record.test_plots import make_run, start
from train import setup
from train.record import provenance
from train.record.model_card import MARK, write_card
from train.record.provenance import RunRecord, read_starts
from train.record.run_folder import RunFolder


def record(folder: RunFolder, step: int = 0, **known: object) -> RunRecord:
    return RunRecord(
        folder, {"time": 1.0, "step": step, **known}, lambda: (7, 70), {KeyboardInterrupt: "stopped"}
    )


def test_starts_are_added_and_say_how_they_ended(tmp_path):
    folder = RunFolder(tmp_path)
    with record(folder, a=1):
        (running,) = read_starts(folder)
        assert running["ended"] is None and running["a"] == 1
    for step, error in ((7, KeyboardInterrupt), (8, ValueError)):
        with pytest.raises(error), record(folder, step):
            raise error
    starts = read_starts(folder)
    assert [(start["step"], start["ended"]["how"]) for start in starts] == [
        (0, "done"),
        (7, "stopped"),
        (8, "failed"),
    ]
    assert all((start["ended"]["step"], start["ended"]["tokens"]) == (7, 70) for start in starts)


def test_a_stage_is_there_when_it_begins(tmp_path, monkeypatch):
    """What is killed in it has said what was proved; a full disk does not end the run."""
    folder, stages = RunFolder(tmp_path), [{"step": 3, "fp8": "a"}, {"step": 5, "fp8": "b"}]
    with record(folder) as its:
        its.add_stage(stages[0])
        with monkeypatch.context() as full:
            full.setattr(
                provenance, "write_durably", Mock(side_effect=OSError(28, "No space left on device"))
            )
            its.add_stage(stages[1])
        assert read_starts(folder)[0]["stages"] == stages[:1]
    assert read_starts(folder)[0]["stages"] == stages


def test_a_run_json_that_cannot_be_read_is_kept(tmp_path):
    folder = RunFolder(tmp_path)
    folder.run.write_text('{"starts": [')
    with record(folder):
        pass
    assert len(read_starts(folder)) == 1
    (kept,) = tmp_path.glob("run.json.discarded-*")
    assert kept.read_text() == '{"starts": ['
    # nor does the next one, within the same second, take its place
    folder.run.write_text("{")
    with record(folder):
        pass
    assert {path.read_text() for path in tmp_path.glob("run.json.discarded-*")} == {'{"starts": [', "{"}


def test_a_disk_that_is_full_at_the_end_is_told(tmp_path, monkeypatch, logged):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with record(RunFolder(tmp_path)):
        monkeypatch.setattr(provenance, "write_durably", full)
    (line,) = logged
    assert "run.json" in line and "[Errno 28]" in line


def test_the_hash_of_a_configuration_is_of_what_changes_a_run(monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "c")
    config = {"learning_rate": 1e-3, "output_dir": "a", "resume_from_checkpoint": "auto"}

    def hashed(**change: object) -> str:
        return provenance.origin(config | change)["config_sha256"]

    elsewhere = {"output_dir": "b", "resume_from_checkpoint": "never", "run_name": "r", "wandb_project": "p"}
    assert {hashed(**{key: value}) for key, value in elsewhere.items()} == {hashed()}
    assert hashed(report_to="wandb") == hashed() != hashed(learning_rate=2e-3)
    assert hashed(seed=1) != hashed(seed=2) and hashed(data={"sources": {}}) != hashed()


def test_the_commit_is_that_of_the_sources_or_of_the_environment(monkeypatch, tmp_path):
    def run(words: list[str], **_: object) -> object:
        raise OSError(2, "no git")

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert provenance.commit() == "abc"


def test_the_commit_of_changed_sources_says_so(monkeypatch, tmp_path):
    """Those of test_fp8/, too, but not what it has measured."""
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    files = [tmp_path / name for name in ("train/loop.py", "test_fp8/rows.py", "test_fp8/results/a.json")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    whole = provenance.commit()
    assert len(whole) == 40
    for file, changed in zip(files, (", changed since", ", changed since", ""), strict=True):
        file.write_text("2")
        assert provenance.commit() == whole + changed
        file.write_text("1")


def test_sources_are_known_by_the_python_files_of_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    found = []
    for name, text in ("a/b/c.py", "x = 1"), ("a/b/c.py", "x = 2"), ("a/notes.md", "x"), ("other/c.py", "x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(provenance.sources_sha256("a"))
    assert found[0] != found[1] == found[2] == found[3] != provenance.sources_sha256("a", "other")


def test_what_was_set_aside_is_listed_with_its_size_and_the_command_that_removes_it(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    assert setup._set_aside_before(folder) == []
    disk = tmp_path / "disk" / "many"
    disk.mkdir(parents=True)
    folder.path.mkdir()
    folder.checkpoints.symlink_to(disk)
    for number in range(7):
        aside = disk.with_name(f"many.discarded-{number}") / "step-00000001"
        aside.mkdir(parents=True)
        (aside / "x").write_bytes(bytes(1_000_000 * (number + 1)))
    (folder.path / "hf.discarded-1").mkdir()
    first, *named, more, command = setup._set_aside_before(folder)
    assert numbers(first) == [28.0] and numbers(more) == [3]
    assert named[0].split() == ["4.0", "MB", f"{disk}.discarded-3"] and len(named) == 5
    remove = command[command.index("rm -r ") :]  # the user copies it
    subprocess.run(remove, shell=True, check=True)
    assert setup._set_aside_before(folder) == []


TRAINED = {
    "model": {"config": "/home/me/my.json", "variant": "te_layer", "init_from": "/home/me/base/hf"},
    "precision": {"compute": "fp8", "recipe": "delayed"},
    "data": {"sources": {"text": "/home/me/data"}},
    "max_seq_length": 64,
}


def card(
    tmp_path: Path,
    former: str | None = None,
    step: int = 2,
    changes: Sequence[dict] = (),
    began_at: str | None = None,
    model_config: dict | None = None,
) -> str:
    """Of the export of a checkpoint of `step`, where a card `former` may be already."""
    out, old = tmp_path / "out", tmp_path / "old"
    for folder in (out, old):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    (out / "config.json").write_text(json.dumps(model_config or {"max_position_embeddings": 2048}))
    if former is not None:
        (old / "README.md").write_text(former)
    checkpoint = tmp_path / "my run/checkpoints/step-00000002"
    write_card(out, old, checkpoint, TRAINED, step, 64 * step, changes, began_at)
    return (out / "README.md").read_text()


def test_a_model_card_has_the_facts_of_the_run_up_to_its_checkpoint(tmp_path, monkeypatch):
    alone = card(tmp_path)  # nothing of a run is there
    assert alone.split("\n\n")[-2].splitlines()[2:] == [
        "| model | my.json, trained as te_layer |",
        "| data | text |",
        "| steps, tokens | 2, 128 |",
        "| sequence length | 64 |",
        "| precision | fp8, delayed scaling |",
        "| max_position_embeddings | 2,048 |",
    ]
    known = {
        "proof": ["FP8: 12 of 13 GEMM modules ran FP8", "  not FP8: a|b"],
        "commit": "abc",
        "versions": {"torch": "2"},
    }
    starts = [start(0, 1.0, "stopped", 2.0) | known, start(2, 3.0, "done", 4.0) | known]
    gone = [{"module": module, "step": step} for module, step in (("a", 1), ("a", 2), ("b", 2))]
    starts[0] |= {"machine": {"gpu": "NVIDIA H200"}, "escalations": gone}
    starts[1] |= {"gpus": 8, "commit": "def", "proof": ["another"], "machine": {}, "escalations": gone}
    make_run(tmp_path / "my run", starts=starts, lines=3)
    text = card(tmp_path)
    assert "# my run" in text and "from the weights of base/hf" in text and "/home/me" not in text
    assert (
        "| training loss | 4.0000 nats a token |" in text and "evaluation loss" not in text
    )  # those of step 3 are not its
    assert "FP8: 12 of 13 GEMM modules ran FP8; not FP8: a\\|b |" in text
    assert "| versions | torch 2 |" in text and "| commit | abc |" in text and "| starts |" not in text
    assert "| GPU | NVIDIA H200 |" in text and "| GPUs | 2 |" in text
    assert "scaling; 1 modules went to other levels (precision.on_trouble) |" in text
    last = card(tmp_path, step=3)
    assert "scaling; 2 modules went" in last and "| proved at the start | another |" in last
    assert "| GPU | none: the CPU reference of FP8 |" in last and "| GPUs | 8 |" in last
    assert "| commit | abc, def |" in last
    assert "| evaluation loss | 4.5000 nats a token |" in last and "| starts | 2 |" in last
    monkeypatch.setitem(TRAINED["model"], "init_from", None)
    assert "pretrained from random weights." in card(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (None, []),
        (quantization_config(False, []), ["compressed-tensors", "pip install"]),
        (quantization_config(True, []), ["128 x 128"]),
    ],
)
def test_a_model_card_has_the_front_matter_of_the_hub_and_the_quantization(tmp_path, quantization, words):
    config = {"max_position_embeddings": 2048, "quantization_config": quantization}
    parsed = ModelCard(card(tmp_path, model_config=config), ignore_metadata_errors=False)
    assert (parsed.data.library_name, parsed.data.pipeline_tag) == ("transformers", "text-generation")
    assert parsed.data.license is None and "mistral" in parsed.data.tags
    assert parsed.text.lstrip().startswith(MARK) and "| sequence length | 64 |" in parsed.text
    assert ("| quantization |" in parsed.text) == bool(quantization)
    assert all(word in parsed.text for word in words)


def test_a_model_card_tells_what_was_otherwise_before_a_resume(tmp_path):
    """Where a change is back again, where several are of one key, and of what has no row of its own."""
    source = {"shards_sha256": "1234", "tokens": 5}
    rows = [
        (20, "data.sources", ["mine", "wiki"], ["other"]),
        (20, "precision.compute", "fp8", "bf16"),
        (20, "precision.recipe", "current", "delayed"),
        (20, "learning_rate", 0.002, 0.001),
        (20, "data.sources.mine", source, None),
        (20, "data.sources.other", None, source),
        (40, "precision.compute", "bf16", "fp8"),
        (40, "data.sources", ["other"], ["text"]),
        (60, "max_seq_length", 32, 64),
        (60, "learning_rate", 0.001, 1e-05),
        (60, "data.sources.text.shards_sha256", "a" * 64, "b" * 64),
        (60, "deepspeed.zero_optimization.offload_param", None, True),
    ]
    changes = [dict(zip(("step", "key", "old", "new"), row, strict=True)) for row in rows]
    trained = json.dumps(TRAINED)
    assert card(tmp_path, step=70, changes=changes).split("\n\n")[-2].splitlines()[2:] == [
        "| model | my.json, trained as te_layer |",
        "| data | text (until step 20: mine, wiki; until step 40: other) |",
        "| steps, tokens | 70, 4,480 |",
        "| sequence length | 64 (until step 60: 32) |",
        "| precision | fp8, delayed scaling (until step 20: fp8, current scaling; until step 40: bf16) |",
        "| also changed | learning_rate 1e-05 (until step 20: 0.002; until step 60: 0.001); "
        "data.sources.text.shards_sha256 bbbbbbbbbbbb... (until step 60: aaaaaaaaaaaa...); "
        "deepspeed.zero_optimization.offload_param true (until step 60: null) |",
        "| max_position_embeddings | 2,048 |",
    ]
    assert json.dumps(TRAINED) == trained


def test_a_model_card_tells_of_the_run_that_this_one_branched_off(tmp_path):
    text = card(tmp_path, began_at="/home/me/first/checkpoints/step-00000001")
    assert (
        "| of another run | up to step-00000001 of first; what is said of starts, GPUs, versions and commits is of the "
        "steps after it |" in text
    )
    assert "/home/me" not in text and "another run" not in card(tmp_path)


def test_a_model_card_has_the_stages_of_precision_that_the_checkpoint_has_come_to(tmp_path, monkeypatch):
    def precision(step: int, *changes: dict) -> str:
        (row,) = (
            line for line in card(tmp_path, step=step, changes=changes).splitlines() if "precision" in line
        )
        return row

    now, then = "| precision | bf16 |", "| precision | bf16; then fp8, delayed scaling |"
    monkeypatch.setitem(TRAINED, "max_steps", 20)
    monkeypatch.setitem(TRAINED, "train_batch_size_tokens", 64)
    for end in ({"until_step": 10}, {"until_share": 0.5}, {"until_tokens": 640}):
        schedule = [end | {"compute": "bf16"}, {}]
        monkeypatch.setitem(TRAINED["precision"], "schedule", schedule)
        assert [precision(step) for step in (2, 10, 11, 20)] == [now, now, then, then]
        # the stage had begun before a resume, or after it
        other = {"key": "data.sources", "old": {"mine": "data"}, "new": {"text": "data"}}
        assert [precision(20, other | {"step": step}) for step in (5, 10, 15)] == [then] * 3
        changed = {"step": 5, "key": "precision.schedule", "old": schedule, "new": None}
        monkeypatch.setitem(TRAINED["precision"], "schedule", None)
        assert precision(6, changed) == "| precision | fp8, delayed scaling (until step 5: bf16) |"
    schedule = [{"until_share": 0.5, "compute": "bf16"}, {}]
    changed = {"step": 15, "key": "precision.schedule", "old": schedule, "new": None}
    longer = {"step": 15, "key": "max_steps", "old": 40, "new": 20}
    assert precision(16, changed, longer) == "| precision | fp8, delayed scaling (until step 15: bf16) |"


def test_a_model_card_tells_what_was_proved_of_each_stage(tmp_path, monkeypatch):
    """The newest of each that the checkpoint has come to; what a later start has left behind does not count."""
    ends = [{"until_step": 10, "compute": "bf16"}, {"until_step": 20}, {"compute": "bf16"}]
    monkeypatch.setitem(TRAINED["precision"], "schedule", ends)
    monkeypatch.setitem(TRAINED, "max_steps", 30)

    def stage(step: int, proof: str, new_stage: bool = True) -> dict:
        return {"step": step, "new_stage": new_stage, "proof": [proof, "  attention"]}

    def proved(step: int) -> str:
        (row,) = (line for line in card(tmp_path, step=step).splitlines() if "proved" in line)
        return row.removeprefix("| proved at the start | ")

    starts = [start(0, 1.0, "stopped", 2.0), start(5, 3.0, "stopped", 4.0), start(10, 5.0, "done", 6.0)]
    for number, one in enumerate(starts):
        one["proof"] = [f"of start {number}"]
    starts[1]["stages"] = [stage(10, "left behind"), stage(20, "left behind")]
    starts[2]["stages"] = [stage(15, "of other levels", new_stage=False), stage(20, "bf16")]
    make_run(tmp_path / "my run", starts=starts)
    assert proved(5) == "of start 0 |" and proved(10) == "of start 1 |"
    assert proved(11) == "before step 6: of start 1; then before step 11: of start 2 |" == proved(20)
    assert proved(21) == proved(20)[:-2] + "; then before step 21: bf16; attention |"


def test_a_model_card_of_the_user_stays_and_our_own_is_written_anew(tmp_path):
    ours = card(tmp_path)
    assert card(tmp_path, "# Mine\n") == "# Mine\n"
    assert card(tmp_path, ours, step=3) != ours
    changed = ours.replace(MARK, "")
    assert card(tmp_path, changed) == changed
