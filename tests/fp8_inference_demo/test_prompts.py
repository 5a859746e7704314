"""--prompts FILE.jsonl --output FILE.jsonl: all is checked first, then the output grows by whole lines."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fp8_inference_demo import text
from fp8_inference_demo.session import Session
from tests.fp8_inference_demo.conftest import Demo, Output, refuse

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
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_completions_keep_order_and_fields(
    command: list[object], out: Path, demo: Demo, output: Output
) -> None:
    assert demo(*command) == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(r["id"], r["prompt"], r["tag"]) for r in records] == [
        (i, text, {"of": "this"}) for i, text in enumerate(TEXTS)
    ]
    for record in records:
        assert [(c["finish_reason"], c["tokens"]) for c in record["choices"]] == [("length", 4)] * 3
        assert len({c["text"] for c in record["choices"]}) > 1, "samples differ"
    assert demo(*command[:2], "--prompt", TEXTS[0], *command[6:-2]) == 0
    text = records[0]["choices"][0]["text"]
    assert output() == text + "\n", "as it is streamed"
    out.unlink()
    assert demo(*command, "--stop", text[1:], "--max_new_tokens", 12) == 0
    choice = json.loads(out.read_text(encoding="utf-8").splitlines()[0])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[0], "stop") and choice["tokens"] <= 4


def test_output_file_is_written_line_by_line(
    command: list[object], out: Path, demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third batch; a batch of 4 rows has 1 1/3 prompts."""
    calls, complete = itertools.count(), Session.complete

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return complete(*arguments)

    monkeypatch.setattr(Session, "complete", interrupted)
    assert demo(*command) == 130
    partial = out.read_bytes()
    refuse(*command, code="exists", key="--output")
    assert out.read_bytes() == partial
    out.unlink()
    assert demo(*command, "--batch_size", 5) == 0
    assert partial == b"".join(out.read_bytes().splitlines(keepends=True)[:2])


BAD_LINES = {
    b'{"prompt": "b", "x": 1e999}': "not_json",
    b'{"prompt": "a"': "not_json",
    b'{"prompt": "a", "x": NaN}': "not_json",
    b'{"text": "a"}': "no_prompt",
    b'{"prompt": 1}': "no_prompt",
    b'["a"]': "no_prompt",
    b'{"prompt": "a", "choices": 1}': "reserved_field",
    b'{"prompt": "\\ud83d"}': "not_json",
    b'{"prompt": "' + b"x y " * 300 + b'"}': "prompt_too_long",
    b"[" * 100_000: "not_json",
    b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}": "not_json",
}


@pytest.mark.parametrize(("line", "code"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_invalid_prompt_line_raises_before_loading(
    command: list[object], out: Path, tmp_path: Path, line: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    monkeypatch.setattr("fp8_inference_demo.engine.Engine.load", None)
    refuse(*command, code=code, key=f"--prompts {source}: line 3")
    assert not out.exists()


def test_files_without_prompts_raise(command: list[object], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n")
    refuse(*command, code="no_prompts", key="--prompts")
    source.write_bytes(b'{"prompt": "caf\xe9"}')
    refuse(*command, code="not_utf8", key=f"--prompts {source}")


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfdef")
    assert text.read_text(tmp_path / "a.txt", "a.txt") == "def"
