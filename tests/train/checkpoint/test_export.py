"""train/export.py: what it answers to a path that is no checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from safetensors import SafetensorError

from fp8_inference_demo import fp8_inference
from fp8_inference_demo.session import Session
from model.config import load_sizes
from tests.conftest import numbers, refused
from tests.train.runs import run
from train import export
from train.checkpoint import files
from train.checkpoint.files import (
    MANIFEST,
    RUN_STATE,
    CheckpointError,
    describe_file,
    discard_old,
    name_of,
    write_manifest,
)
from train.data.encoder import TextEncoder
from train.data.format import DataError
from train.evaluation.models import plan
from train.files import sha256_file
from train.guard.lock import LockError

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("given", ["checkpoints/step-00000009", "checkpoints/step-00000011", "step-00000003"])
def test_the_committed_checkpoints_are_listed(tmp_path: Path, given: str) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in range(3, 10):
        (root / name_of(step)).mkdir(parents=True)
        (root / name_of(step) / MANIFEST).touch()
    (root / name_of(9) / MANIFEST).unlink()
    with refused(CheckpointError, code="no_checkpoint", key=str(tmp_path / "run" / given)) as error:
        export.checkpoint_of(tmp_path / "run" / given)
    newest = ", ".join(name_of(step) for step in range(4, 9))
    assert str(error.value).endswith(f" {root}: {newest}")


@pytest.mark.parametrize("given", ["", "checkpoints"])
def test_of_a_run_the_newest_good_one_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    root = tmp_path / "run" / "checkpoints"
    with refused(CheckpointError, code="no_checkpoint", key=str(tmp_path)):
        export.checkpoint_of(tmp_path)
    for step in range(3, 6):
        (root / name_of(step)).mkdir(parents=True)
        (root / name_of(step) / RUN_STATE).write_text("{}")
        write_manifest(root / name_of(step), [describe_file(root / name_of(step) / RUN_STATE)])
    (root / name_of(5) / RUN_STATE).write_text("{ ")
    assert export.checkpoint_of(tmp_path / "run" / given) == root / name_of(4)
    told = capsys.readouterr()
    assert str(root / name_of(4)) in told.out and name_of(5) in told.err
    assert export.checkpoint_of(root / name_of(3)) == root / name_of(3) and not capsys.readouterr().out
    (root / name_of(3) / RUN_STATE).unlink()
    (root / name_of(4) / RUN_STATE).unlink()
    with refused(CheckpointError, code="no_checkpoint"):
        export.checkpoint_of(tmp_path / "run" / given)


def test_one_that_its_run_replaces_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With save_total_limit 1, where hashing takes longer than the next save needs to come."""
    root = tmp_path / "checkpoints"

    def save(step: int) -> None:
        (root / name_of(step)).mkdir(parents=True)
        (root / name_of(step) / RUN_STATE).write_text("{}")
        write_manifest(root / name_of(step), [describe_file(root / name_of(step) / RUN_STATE)])
        discard_old(root / name_of(step), keep=1)

    def hashed(file: Path) -> str:
        if file.parent.name == name_of(3):
            save(6)
        return sha256_file(file)

    save(3)
    monkeypatch.setattr(files, "sha256_file", hashed)
    assert export.checkpoint_of(tmp_path) == root / name_of(6) and not capsys.readouterr().err


def test_of_a_tokenizers_folder_nothing_but_the_tokenizer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--tokenizer may name a model's folder; and a run's own is not lost to a folder that somebody put in there."""

    def write_model(path: Path, out: Path, form: str, tokenizer: Path) -> list[str]:
        out.mkdir()
        (out / "config.json").write_text("ours")
        (out / "model.safetensors").write_text("ours")
        return [form]

    monkeypatch.setattr(export, "_write_model", write_model)
    monkeypatch.setattr(export, "identity", lambda path: "identity")
    monkeypatch.setattr(
        export,
        "read_state",
        lambda path: SimpleNamespace(
            train_config={},
            step=1,
            consumed_tokens=1,
            changes=["of a resume"],
            began_at={"path": "of another run"},
        ),
    )
    told: list[Any] = []

    def write_card(out: Path, *facts: Any) -> None:
        told.extend(facts)
        (out / "README.md").write_text("ours")

    monkeypatch.setattr(export, "write_card", write_card)
    model, out = tmp_path / "model", tmp_path / "out"
    (model / "notes").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "exported_from.json", "README.md", "onnx"):
        (model / name).write_text("theirs")
    with refused(CheckpointError, code="not_exportable"):
        export.export(tmp_path, out, model)
    (model / "tokenizer.json").write_text("theirs")
    (model / "chat_template.jinja").write_text("theirs")
    assert export.export(tmp_path, out, model) == ["hf"] and told[-2:] == [["of a resume"], "of another run"]
    assert {path.name: path.read_text() for path in out.iterdir() if path.name != "exported_from.json"} == {
        "config.json": "ours",
        "model.safetensors": "ours",
        "README.md": "ours",
        "tokenizer.json": "theirs",
        "chat_template.jinja": "theirs",
    }


def test_bos_and_eos_are_those_of_the_tokenizer(trained: Path, data: Path, tmp_path: Path) -> None:
    """A configuration may be written for another one: a text would go on behind its EOS, and end at another word."""
    path, out = tmp_path / "run/checkpoints/step-00000006", tmp_path / "out"
    shutil.copytree(trained / "checkpoints/step-00000006", path)
    state = json.loads((path / RUN_STATE).read_text())

    def named(bos: int, eos: int | list[int]) -> tuple[list[str], set[tuple]]:
        state["model_config"] |= {"bos_token_id": bos, "eos_token_id": eos}
        (path / RUN_STATE).write_text(json.dumps(state))
        lines = [line for line in export.export(path, out, data / "tokenizer") if "os_token_id" in line]
        files = [json.loads((out / f"{name}config.json").read_text()) for name in ("", "generation_")]
        return lines, {(file["bos_token_id"], str(file["eos_token_id"])) for file in files}

    assert named(1, 2) == ([], {(1, "2")}) and named(1, [7, 2]) == ([], {(1, "[7, 2]")})
    lines, ids = named(5, 7)
    assert [numbers(line) for line in lines] == [[1, 5], [2, 7]] and ids == {(1, "2")}
    for source in state["data_fingerprint"][
        "sources"
    ].values():  # the one that is given is not that of training
        source["tokenizer_sha256"] = "another"
    assert named(5, 7) == ([], {(5, "7")})


def test_exporting_again_replaces_the_files_of_an_export_alone(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards and a tokenizer of an earlier export would be loaded with the new ones; what else is there is kept, also
    where the folder cannot be replaced."""
    path, out = trained / "checkpoints/step-00000006", tmp_path / "out"
    export.export(path, out, data / "tokenizer")
    written = {file.name for file in out.iterdir()}
    earlier = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "added_tokens.json"]
    kept = {
        "LICENSE",
        "README.md",
        "model.gguf",
        "chat_template.jinja",
        ".gitattributes",
        ".git/HEAD",
        "onnx/a.onnx",
    }
    for name in (*earlier, *kept):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(f"the former {name}")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    rename, cannot_move = Path.rename, ["out.partial"]

    def fails(self: Path, to: Path) -> Path:
        if self.name in cannot_move:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError):
        export.export(path, out, data / "tokenizer")
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    cannot_move.clear()
    export.export(path, out, data / "tokenizer")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    left = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert left == written | kept
    assert {name for name in left if (out / name).read_bytes() == f"the former {name}".encode()} == kept
    cannot_move.append("LICENSE")
    with pytest.raises(OSError, match="LICENSE"):
        export.export(path, out, data / "tokenizer")
    assert [file.read_text() for file in tmp_path.glob("out.discarded-*/LICENSE")] == ["the former LICENSE"]
    assert written <= {file.name for file in out.iterdir()}


def test_the_trained_length_is_recorded_and_is_the_default_context(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    """Of a model with 2,048 positions that was trained at 64."""
    lines = export.export(trained / "checkpoints/step-00000006", tmp_path / "out", data / "tokenizer")
    (line,) = lines
    assert "64" in line and "2,048" in line and line in (trained / "train.log").read_text()
    for folder in (tmp_path / "out", trained / "hf"):
        config = json.loads((folder / "config.json").read_text())
        assert (config["trained_sequence_length"], config["max_position_embeddings"]) == (64, 2048)
        assert (load_sizes(str(folder)).trained_sequence_length, plan(folder, None).max_seq_length) == (
            64,
            64,
        )
        assert "| sequence length | 64 |" in (folder / "README.md").read_text()

    def lengths(*options: str) -> list[int]:
        arguments = fp8_inference.parse_arguments(["--model", str(folder), "--prompt", "x", *options])
        session = Session(arguments, folder)
        return [session.max_length(longest) for longest in (1, 100, None)]

    assert lengths() == [64] * 3 and lengths("--max_new_tokens", "9") == [10, 64, 64]
    assert lengths("--max_length", "128") == [128] * 3
    folder = tmp_path / "out"
    for recorded in (4096, 0, None):
        (folder / "config.json").write_text(json.dumps(config | {"trained_sequence_length": recorded}))
        assert lengths()[2] == 2048


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """It would be replaced, and what it led to stay as it was."""
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/exported_from.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with refused(CheckpointError, code="not_exportable"):
        export.export(tmp_path, tmp_path / "link", tmp_path)
    assert (tmp_path / "link").is_symlink() and list((tmp_path / "there").iterdir())


def test_a_place_that_is_no_exports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told to remove what is there; and what lies where a run saves, the run removes."""
    (tmp_path / "tokenizer.json").touch()
    checkpoints, closed = tmp_path / "run/checkpoints", tmp_path / "closed"
    for folder in (checkpoints, closed):
        folder.mkdir(parents=True)
    access = os.access
    monkeypatch.setattr("train.files.os.access", lambda path, mode: path != closed and access(path, mode))
    before = sorted(tmp_path.rglob("*"))
    for out, code in (
        (tmp_path / "run", "not_exportable"),
        (checkpoints / "step-00000020", "not_exportable"),
        (tmp_path / "tokenizer.json/out", "not_writable"),
        (closed / "out", "not_writable"),
    ):
        with refused(CheckpointError, code=code):
            export.export(tmp_path, out, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [SafetensorError("No space left on device"), KeyboardInterrupt()])
def test_what_could_not_be_written_whole_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A full disk needs the room; and the export that was there before stays."""

    def write_model(path: Path, out: Path, form: str, tokenizer: Path) -> list[str]:
        out.mkdir()
        (out / "model.safetensors").write_text("a part")
        raise error

    monkeypatch.setattr(export, "_write_model", write_model)
    model, out = tmp_path / "model", tmp_path / "out"
    for folder in (model, out):
        folder.mkdir()
    (model / "tokenizer.json").write_text("theirs")
    (out / "exported_from.json").write_text("before")
    expected = OSError if isinstance(error, SafetensorError) else KeyboardInterrupt
    with pytest.raises(expected):
        export.export(tmp_path, out, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert (out / "exported_from.json").read_text() == "before"


def test_a_second_export_to_a_folder_that_is_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each removes what the other writes."""
    run, out = tmp_path / "run", tmp_path / "out"
    begun = list[Path]()

    def write_model(path: Path, partial: Path, form: str, tokenizer: Path) -> list[str]:
        partial.mkdir()
        begun.append(partial)
        (partial / "config.json").write_text(f"export {len(begun)}")
        if len(begun) == 1:
            with refused(LockError) as error:
                export.export(run, out, run)
            assert str(os.getpid()) in str(error.value)
        return []

    monkeypatch.setattr(export, "_write_model", write_model)
    monkeypatch.setattr(export, "write_card", lambda *_: None)
    monkeypatch.setattr(export, "identity", lambda path: "identity")
    config = {"data": {"sources": {}}}
    state = SimpleNamespace(train_config=config, step=1, consumed_tokens=1, changes=[], began_at={})
    monkeypatch.setattr(export, "read_state", lambda path: state)
    run.mkdir()
    (run / "tokenizer.json").touch()
    export.export(run, out, run)
    assert (out / "config.json").read_text() == "export 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given, or that of the training's folder, which was prepared again since."""
    folder = tmp_path / "tokenizer"
    state: Any = SimpleNamespace(
        model_config={"vocab_size": 4},
        data_fingerprint={"sources": {"text": {"tokenizer_sha256": "1234"}}},
    )
    with refused(DataError, code="no_tokenizer", key=str(folder)):
        export.check_tokenizer(folder, state, False)
    folder.mkdir()
    model = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    with refused(DataError, code="other_tokenizer", key=str(folder)) as error:
        export.check_tokenizer(folder, state, False)
    assert {4, 5} <= set(numbers(error.value))
    state.model_config["vocab_size"] = 8  # ids that the tokenizer has not, as of a padded vocabulary, may be
    with refused(DataError, code="other_tokenizer", key=str(folder)):
        export.check_tokenizer(folder, state, True)
    export.check_tokenizer(folder, state, False)
    assert f"{folder}/tokenizer.json" in capsys.readouterr().err
    state.data_fingerprint["sources"]["text"]["tokenizer_sha256"] = TextEncoder(folder).sha256()
    for must_be_the_same in (True, False):
        export.check_tokenizer(folder, state, must_be_the_same)
    assert not capsys.readouterr().err


def test_the_tokenizer_that_transformers_reads_fits_the_model(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    """A tokenizer.json with more ids or another EOS than tokenizer.model is refused; a chat template is looked at."""
    path, out = trained / "checkpoints/step-00000006", tmp_path / "out"
    folder = shutil.copytree(data / "tokenizer", tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text("{{ messages }}</s>")
    assert sum("split_special_tokens" in line for line in export.export(path, out, folder)) == 1
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    whole, named = file.read_text(), config.read_text()
    config.write_text(named.replace('"split_special_tokens": true', '"split_special_tokens": false'))
    assert not any("split_special_tokens" in line for line in export.export(path, out, folder))
    more = tokenizers.Tokenizer.from_str(whole)
    more.add_special_tokens(["<pad>"])
    for text, names in (
        (more.to_str(), named),
        (whole, named.replace('"eos_token": "</s>"', '"eos_token": "<unk>"')),
    ):
        file.write_text(text)
        config.write_text(names)
        with pytest.raises(DataError):
            export.export(path, tmp_path / "refused", folder)
        assert not (tmp_path / "refused").exists()


def test_without_an_option_the_runs_own_tokenizer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its data, found from another folder too, else of its hf/; of none, no option is spoken of as given."""
    path = tmp_path / "run/checkpoints/step-00000003"
    state = SimpleNamespace(train_config={"data": {"sources": {"text": "data/mine"}}})
    monkeypatch.setattr(export, "checkpoint_of", lambda given: given)
    monkeypatch.setattr(export, "read_state", lambda path: state)
    taken: list[Path] = []
    monkeypatch.setattr(export, "check_tokenizer", lambda folder, *_: taken.append(folder))
    monkeypatch.setattr(export, "export", lambda *_: [])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("train.files.REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["export.py", str(path), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        export.main()
    assert stop.value.code == 2 and not taken
    for folder in (tmp_path / "run/hf", tmp_path / "data/mine/tokenizer"):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").touch()
        export.main()
        assert taken.pop() == folder


@pytest.mark.interpreter
def test_libraries_do_not_talk_over_the_answer(tmp_path: Path) -> None:
    """transformers imports torchao, which warns on a machine without its CUDA libraries."""
    command = [sys.executable, str(ROOT / "train/export.py"), str(tmp_path / "no"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path / "no") in done.stderr.splitlines()[0]


def test_at_zero_3_deepspeed_says_nothing_of_its_own(
    settings: dict, capfd: pytest.CaptureFixture[str]
) -> None:
    run(settings, max_steps=1, warmup_steps=0, deepspeed="ds_config_zero3.json")
    out, error = capfd.readouterr()
    assert not [
        word for word in ("zero checkpoint", "Reconstructed", "Gathering", "shards:") if word in out + error
    ]
