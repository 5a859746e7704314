"""Prompts from standard input, and what is printed on a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fp8_inference_demo.engine import Engine
from fp8_inference_demo.text import TextStream
from tests.fp8_inference_demo.conftest import Demo, Output


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What the engine is given, as text."""
    texts: list[str] = []
    generate = Engine.generate

    def noted(engine: Engine, rows: list[list[int]], *others: Any) -> Any:
        texts.extend(tokenizer.decode(ids) for ids in rows)
        return generate(engine, rows, *others)

    monkeypatch.setattr(Engine, "generate", noted)
    return texts


@pytest.fixture
def say(folder: Path, demo: Demo) -> Demo:
    """say(standard input, option...) -> exit status."""
    base = ["--model", folder, "--precision", "fp32", "--max_new_tokens", 6, "--ignore_eos"]
    return lambda typed, *options: demo(*base, *options, typed=typed)


def test_piped_lines_are_independent_prompts(say: Demo, prompts: list[str], output: Output) -> None:
    """The last line may end without a newline, the first begin with a byte order mark. Each prompt is one for itself;
    not repeated, for nobody sees it."""
    assert say(b"\xef\xbb\xbf\ndef main\r\n \n\nreturn the") == 0
    assert prompts == ["<s>def main", "<s>return the"]
    assert "def main" not in output()


def test_prompt_is_echoed_on_a_terminal(say: Demo, monkeypatch: pytest.MonkeyPatch, output: Output) -> None:
    """With one sample, the generated text follows the prompt."""
    assert say(b"", "--prompt", "def main") == 0
    answer = output()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert say(b"", "--prompt", "def main") == 0
    assert output() == "def main" + answer


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_are_escaped_on_a_terminal(
    say: Demo, monkeypatch: pytest.MonkeyPatch, output: Output, terminal: bool
) -> None:
    """In the prompt and in the generated text. A pipe gets the unchanged text."""
    controls = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066]))
    monkeypatch.setattr(TextStream, "piece", lambda stream: f"\ta{controls}\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert say(b"", "--prompt", f"\tdef{controls}") == 0
    shown = output()
    assert any(character in shown for character in controls) == (not terminal)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (b"x y " * 300, ()),
        (b"x y " * 40, ("--max_length", 64)),
    ],
)
def test_too_long_line_is_skipped(
    say: Demo, prompts: list[str], line: bytes, options: tuple[object, ...]
) -> None:
    assert say(line + b"\ndef main\n", *options) == 1
    assert prompts == ["<s>def main"]


def test_non_utf8_input_raises(say: Demo) -> None:
    assert say(b"caf\xe9\n") == 2
