"""Prompts from standard input: a conversation goes on with its own text, Ctrl-C ends an answer, no line is lost."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast

from fp8_inference_demo.engine import Engine
from fp8_inference_demo.session import Completion
from fp8_inference_demo.text import TextStream
from tests.fp8_inference_demo.conftest import Demo, Output


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


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


def test_conversation_keeps_history(say: Demo, prompts: list[str], output: Output) -> None:
    assert say(b"def main\n\nreturn the\n", "--interactive") == 0
    assert prompts[0] == "<s>def main"
    assert prompts[1].startswith("<s>def main") and prompts[1].endswith("\nreturn the")
    first = prompts[1].removeprefix("<s>def main").removesuffix("\nreturn the")
    assert first and output().startswith(first), "the answer is in between"


def test_ctrl_c_ends_only_the_answer(
    say: Demo, prompts: list[str], monkeypatch: pytest.MonkeyPatch, output: Output
) -> None:
    counts, push = [], Completion.push

    def pressed_at_the_third_token(completion: Completion, token: int) -> None:
        push(completion, token)
        counts.append(completion.tokens)
        if len(counts) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Completion, "push", pressed_at_the_third_token)
    assert say(b"def main\nreturn the\n", "--interactive") == 0
    assert counts == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    shown = output().split("\n")[0]
    assert prompts[1].startswith("<s>def main" + shown), "what was there by then is part of the text"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_ends_the_session(say: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed_twice(completion: Completion, token: int) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Completion, "push", pressed_twice)
    assert say(b"def main\nreturn the\n", "--interactive") == 130


@pytest.mark.parametrize("end", ["", "  ", EOFError])
def test_conversation_ends_at_empty_line_or_ctrl_d(
    say: Demo, prompts: list[str], monkeypatch: pytest.MonkeyPatch, end: str | type[BaseException]
) -> None:
    monkeypatch.setattr(io, "TextIOWrapper", Terminal)
    monkeypatch.setattr("builtins.input", Mock(side_effect=[KeyboardInterrupt, "def main", end, "never"]))
    assert say(b"") == 0
    assert prompts == ["<s>def main"]
    with pytest.raises(SystemExit):
        say(b"", "--num_samples", 2)


@pytest.mark.parametrize(("new", "most"), [(6, 18), (20, 12)])
def test_long_conversation_is_truncated_on_the_left(
    say: Demo, prompts: list[str], monkeypatch: pytest.MonkeyPatch, new: int, most: int
) -> None:
    """A prompt leaves room for its answer, but has half of the context."""
    generate = Mock(side_effect=Engine.generate)
    monkeypatch.setattr(Engine, "generate", lambda *given: generate(*given))
    assert say(b"def main\n" * 4, "--interactive", "--max_length", 24, "--max_new_tokens", new) == 0
    assert len(prompts) == 4 and all(p.startswith("<s>") and p.endswith("def main") for p in prompts)
    lengths = [len(call.args[1][0]) for call in generate.call_args_list]
    assert max(lengths) == lengths[-1] == most


def test_piped_lines_are_independent_prompts(say: Demo, prompts: list[str], output: Output) -> None:
    """The last line may end without a newline, the first begin with a byte order mark. Each prompt is one for itself;
    not repeated, for nobody sees it."""
    assert say(b"\xef\xbb\xbf\ndef main\r\n \n\nreturn the") == 0
    assert prompts == ["<s>def main", "<s>return the"]
    assert "def main" not in output()


def test_prompt_is_echoed_on_a_terminal(say: Demo, monkeypatch: pytest.MonkeyPatch, output: Output) -> None:
    """Of one sample its answer goes on behind it."""
    assert say(b"", "--prompt", "def main") == 0
    answer = output()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert say(b"", "--prompt", "def main") == 0
    assert output() == "def main" + answer


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_are_escaped_on_a_terminal(
    say: Demo, monkeypatch: pytest.MonkeyPatch, output: Output, terminal: bool
) -> None:
    """Of a prompt, and of what the model generates; a pipe gets the text as it is."""
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


@pytest.mark.parametrize("options", [(), ("--interactive",)])
def test_non_utf8_input_raises(say: Demo, options: tuple[object, ...]) -> None:
    assert say(b"caf\xe9\n", *options) == 2
