"""--prompts FILE.jsonl --output FILE.jsonl: all is checked first, lines are whole, a stopped one goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from fp8_inference_demo import completions, prompts, text
from fp8_inference_demo.errors import InferenceError
from tests.conftest import refused
from tests.fp8_inference_demo.conftest import Demo, refuse

TEXTS = ["def main", "return the", "", "the value of the thing", "東京", "import"]


def write(path: Path, texts: list[str] = TEXTS) -> Path:
    lines = [json.dumps({"id": i, "prompt": text, "tag": {"of": "this"}}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def command(folder: Path, tmp_path: Path) -> list[object]:
    """The arguments that complete a file of prompts."""
    source = write(tmp_path / "in.jsonl")
    base = ["--model", folder, "--prompts", source, "--output", tmp_path / "out.jsonl", "--precision", "fp32"]
    return [*base, "--max_new_tokens", "4", "--batch_size", "4", "--ignore_eos", "--num_samples", "3"]


@pytest.fixture
def fill(command: list[object], demo: Demo) -> Demo:
    """fill(option...) -> exit status."""
    return lambda *options: demo(*command, *options)


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
    fill: Demo, out: Path, folder: Path, demo: Demo, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fill() == 0
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
    assert fill("--stop", text[1:], "--max_new_tokens", 12) == 0
    choice = json.loads(out.read_text(encoding="utf-8").splitlines()[0])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[0], "stop")
    assert choice["tokens"] <= 4, "and the row ended there"


@pytest.mark.parametrize("torn", [b"", b'{"id": 2, "prompt": ""', b'{"id": 2, "choices": []}'])
def test_what_was_stopped_goes_on_to_the_same_output(
    fill: Demo, out: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """Also with another batch size, and where a last line has no end. A batch of 4 rows has 1 1/3 prompts."""
    fill()
    whole = out.read_bytes()
    out.unlink()
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert fill() == 130
    assert out.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    with open(out, "ab") as file:
        file.write(torn)
    assert fill("--batch_size", 5) == 0 and out.read_bytes() == whole
    monkeypatch.setattr("fp8_inference_demo.engine.Engine.load", None)
    assert fill() == 0 and out.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--temperature", "0.5"], ["temperature"]),
        (["--stop", "x", "--seed", "3"], ["seed", "stop"]),
        (["--max_length", "50"], ["max_length"]),
    ],
)
def test_an_output_of_other_settings_is_refused(
    fill: Demo, command: list[object], out: Path, options: list[str], keys: list[str]
) -> None:
    fill("--num_samples", 1)
    before = out.read_bytes()
    error = refuse(*command, "--num_samples", 1, *options, code="other_settings", key=keys[0])
    assert all(key in str(error) for key in keys)
    assert out.read_bytes() == before
    out.write_bytes(b"")
    assert fill("--num_samples", 1, *options) == 0, "an empty one begins anew"


def test_an_output_of_other_prompts_or_another_model_is_refused(
    fill: Demo, command: list[object], folder: Path, tmp_path: Path
) -> None:
    fill()
    write(tmp_path / "in.jsonl", [*TEXTS[:-1], "other"])
    refuse(*command, code="other_settings", key="prompts")
    write(tmp_path / "in.jsonl")
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert fill("--model", moved) == 0, "the same one in another folder"
    with open(moved / "model.safetensors", "r+b") as file:
        file.seek(-(2**16), 2)
        file.write(b"x")
    refuse(*command, "--model", moved, code="other_settings", key="model")


def test_an_output_that_is_not_of_this_command_is_kept(
    fill: Demo, command: list[object], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = out.with_name("out.jsonl.settings.json")
    out.write_text("mine\n")
    for content in (None, "[]"):
        if content is not None:
            settings.write_text(content)
        refuse(*command, code="unreadable_settings", key="--output")
        assert out.read_text() == "mine\n"
    with monkeypatch.context() as patch:
        access = os.access
        patch.setattr("os.access", lambda path, mode: path != out and access(path, mode))
        refuse(*command, code="permission", key="--output")
    out.unlink()
    fill()
    with open(out, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refuse(*command, code="locked", key="--output")
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.write_text("".join([lines[1], *lines[1:]]), encoding="utf-8")
    refuse(*command, code="other_prompts", key=f"--output {out}: line 1")


def test_an_output_on_a_file_system_without_locks(
    fill: Demo, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre, mounted without them; any other error of the system is told."""
    for number, status in ((errno.EIO, 2), (errno.ENOSYS, 0)):

        def flock(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        assert fill() == status
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(TEXTS)


BAD_LINES = {
    b'{"prompt": "b", "x": 1e999}': "not_json",
    b'{"prompt": "a"': "not_json",
    b'{"prompt": "a", "x": NaN}': "not_json",
    b'{"text": "a"}': "no_prompt",
    b'{"prompt": 1}': "no_prompt",
    b'["a"]': "no_prompt",
    b'{"prompt": "a", "choices": 1}': "reserved_field",
    b'{"prompt": "\\ud83d"}': "surrogate",
    b'{"prompt": "caf\xe9"}': "not_utf8",
    b'{"prompt": "' + b"x y " * 300 + b'"}': "prompt_too_long",
    b"[" * 100_000: "not_json",
    b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}": "not_json",
}


@pytest.mark.parametrize(("line", "code"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_line_that_will_not_do_is_named_before_anything_runs(
    command: list[object], out: Path, tmp_path: Path, line: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    monkeypatch.setattr("fp8_inference_demo.engine.Engine.load", None)
    refuse(*command, code=code, key=f"--prompts {source}: line 3")
    assert not out.exists()


def test_files_that_hold_no_prompts(command: list[object], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n")
    refuse(*command, code="no_prompts", key="--prompts")
    source.unlink()
    os.mkfifo(source)
    refuse(*command, code="not_a_file", key="--prompts")
    with refused(InferenceError, code="not_a_file", key="--prompt_file x"):
        text.read_text(tmp_path, "--prompt_file x")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfdef")
    assert text.read_text(tmp_path / "a.txt", "a.txt") == "def"
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}')
    assert [record for _, record in prompts.read_prompts(tmp_path / "in.jsonl")] == [{"prompt": "a"}]
