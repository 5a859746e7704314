"""--prompts FILE.jsonl --output FILE.jsonl: all is checked first, lines are whole, a stopped one goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8_inference_demo import completions, prompts, text
from tests.fp8_inference_demo.conftest import Demo

Fill = Callable[..., tuple[int, str]]

TEXTS = ["def main", "return the", "", "the value of the thing", "東京", "import"]


def write(path: Path, texts: list[str] = TEXTS) -> Path:
    lines = [json.dumps({"id": i, "prompt": text, "tag": {"of": "this"}}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def fill(folder: Path, tmp_path: Path, demo: Demo, capfd: pytest.CaptureFixture[str]) -> Fill:
    """fill(option...) -> (exit status, standard error) of a file of prompts."""
    source = write(tmp_path / "in.jsonl")
    base = ["--model", folder, "--prompts", source, "--output", tmp_path / "out.jsonl", "--precision", "fp32"]
    base += ["--max_new_tokens", "4", "--batch_size", "4", "--ignore_eos", "--num_samples", "3"]

    def run(*options: object) -> tuple[int, str]:
        status = demo(*base, *options)
        return status, capfd.readouterr().err

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def stop_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Ctrl-C in the batch behind so many."""
    calls, complete = iter(range(batches)), completions.complete

    def interrupted(*arguments: object) -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return complete(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("fp8_inference_demo.session.complete", interrupted)


def test_each_prompt_has_its_samples_in_order_with_its_fields(
    fill: Fill, out: Path, folder: Path, demo: Demo, capfd: pytest.CaptureFixture[str]
) -> None:
    status, error = fill()
    assert status == 0 and "decode" in error and "6/6" in error
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(r["id"], r["prompt"], r["tag"]) for r in records] == [
        (i, text, {"of": "this"}) for i, text in enumerate(TEXTS)
    ]
    for record in records:
        assert [(c["finish_reason"], c["tokens"]) for c in record["choices"]] == [("length", 4)] * 3
        assert len({c["text"] for c in record["choices"]}) > 1, "samples are drawn each for itself"
    base = ("--model", folder, "--prompt", TEXTS[0], "--precision", "fp32")
    assert demo(*base, "--max_new_tokens", 4, "--ignore_eos") == 0
    text = records[0]["choices"][0]["text"]
    assert capfd.readouterr().out == text + "\n", "as it would be streamed"
    out.unlink()
    assert fill("--stop", text[1:], "--max_new_tokens", 12)[0] == 0
    choice = json.loads(out.read_text(encoding="utf-8").splitlines()[0])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[0], "stop")
    assert choice["tokens"] <= 4, "and the row ended there"


@pytest.mark.parametrize("torn", [b"", b'{"id": 2, "prompt": ""', b'{"id": 2, "choices": []}'])
def test_what_was_stopped_goes_on_to_the_same_output(
    fill: Fill, out: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """Also with another batch size, and where a last line has no end. A batch of 4 rows has 1 1/3 prompts."""
    fill()
    whole = out.read_bytes()
    out.unlink()
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        status, error = fill()
        assert status == 130 and "the same command goes on" in error
    assert out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    with open(out, "ab") as file:
        file.write(torn)
    status, error = fill("--batch_size", 5)
    assert status == 0 and out.read_bytes() == whole
    monkeypatch.setattr("fp8_inference_demo.engine.Engine.load", None)
    status, error = fill()
    assert status == 0 and "all 6 prompts are done" in error and out.read_bytes() == whole


def test_lines_and_settings_are_on_the_disk_before_anything_follows(
    fill: Fill, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves whole lines, and how they were made: without that the command would not go on with them."""
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", sync)
    fill("--batch_size", 9)  # three prompts at a time
    settings = out.with_name("out.jsonl.settings.json")
    half = sum(map(len, out.read_bytes().splitlines(keepends=True)[:3]))
    begun = (f"{settings.name}.tmp", settings.stat().st_size)
    assert synced == [begun, (out.name, half), (out.name, out.stat().st_size)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "0.5"], "temperature 0.8 (now 0.5)"),
        (["--stop", "x", "--seed", "3"], "seed 0 (now 3), stop [] (now ['x'])"),
        (["--max_length", "50"], "max_length"),
    ],
)
def test_an_output_of_other_settings_is_refused(
    fill: Fill, out: Path, options: list[str], words: str
) -> None:
    fill("--num_samples", 1)
    before = out.read_bytes()
    status, error = fill("--num_samples", 1, *options)
    assert status == 2 and words in error and "give another --output" in error
    assert out.read_bytes() == before
    out.write_bytes(b"")
    assert fill("--num_samples", 1, *options)[0] == 0, "an empty one begins anew"


def test_an_output_of_other_prompts_or_another_model_is_refused(
    fill: Fill, out: Path, folder: Path, tmp_path: Path
) -> None:
    fill("--num_samples", 1)
    write(tmp_path / "in.jsonl", [*TEXTS[:-1], "other"])
    status, error = fill("--num_samples", 1)
    assert status == 2 and "made with prompts" in error
    write(tmp_path / "in.jsonl")
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in folder.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert fill("--num_samples", 1, "--model", moved)[0] == 0, "the same one in another folder"
    with open(moved / "model.safetensors", "r+b") as file:
        file.seek(-(2**16), 2)
        file.write(b"x")
    status, error = fill("--num_samples", 1, "--model", moved)
    assert status == 2 and "made with model" in error


def test_an_output_that_is_not_of_this_command_is_kept(fill: Fill, out: Path) -> None:
    out.write_text("mine\n")
    status, error = fill()
    assert status == 2 and "out.jsonl.settings.json" in error and out.read_text() == "mine\n"
    out.unlink()
    fill()
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.write_text("".join([lines[1], *lines[1:]]), encoding="utf-8")
    status, error = fill()
    assert status == 2 and "line 1 is not the completion of its prompt" in error


def test_two_processes_do_not_write_one_output(fill: Fill, out: Path) -> None:
    with open(out, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, error = fill()
    assert status == 2 and "another process writes it" in error


def test_an_output_on_a_file_system_without_locks(
    fill: Fill, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre, mounted without them; any other error of the system is told."""
    for number, status in ((errno.EIO, 2), (errno.ENOSYS, 0)):

        def flock(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        found, error = fill()
        assert found == status and ("has no locks" in error) == (status == 0), error
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(TEXTS)


BAD_LINES = {
    '{"prompt": "b", "x": 1e999}': "Out of range float values",
    '{"prompt": "a"': "is not JSON",
    '{"prompt": "a", "x": NaN}': "NaN is no number",
    '{"text": "a"}': "allowed is an object",
    '{"prompt": 1}': "allowed is an object",
    '["a"]': "allowed is an object",
    '{"prompt": "a", "choices": 1}': "'choices', which the output adds",
    '{"prompt": "\\ud83d"}': "half of a surrogate pair",
    '{"prompt": "' + "x y " * 300 + '"}': "tokens and the context",
    "[" * 100_000: "is not JSON",
    '{"prompt": "a", "n": ' + "9" * 5000 + "}": "is not JSON",
}


@pytest.mark.parametrize(("line", "words"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_line_that_will_not_do_is_named_before_anything_runs(
    fill: Fill, out: Path, tmp_path: Path, line: str, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n\n' + line + "\n", encoding="utf-8")
    status, error = fill()
    assert status == 2 and "in.jsonl: line 3" in error and words in error
    assert not out.exists() and "Traceback" not in error and "loaded" not in error


def test_a_pipe_is_refused_and_settings_that_are_none(fill: Fill, out: Path, tmp_path: Path) -> None:
    out.write_text("mine\n")
    (tmp_path / "out.jsonl.settings.json").write_text("[]")
    assert "which says how it was made, cannot be read" in fill()[1] and out.read_text() == "mine\n"
    (tmp_path / "in.jsonl").unlink()
    os.mkfifo(tmp_path / "in.jsonl")
    status, error = fill()
    assert status == 2 and "in.jsonl: allowed is a file" in error


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfdef")
    assert text.read_text(tmp_path / "a.txt", "a.txt") == "def"


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompt_file x is a folder; give a file"):
        text.read_text(tmp_path, "--prompt_file x")


def test_bytes_that_are_not_utf8_are_named(fill: Fill, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert "line 2: byte 16 (0xe9) is not UTF-8" in fill()[1]
    (tmp_path / "in.jsonl").write_bytes(b"\n")
    assert "no prompts in it" in fill()[1]
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}')
    assert [record for _, record in prompts.read_prompts(tmp_path / "in.jsonl")] == [{"prompt": "a"}]


def test_an_output_of_another_user_is_told(fill: Fill, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.touch()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: path != out and access(path, mode))
    status, error = fill()
    assert status == 2 and error.endswith(
        f"--output {out} is not this user's to go on with; give another one\n"
    )
