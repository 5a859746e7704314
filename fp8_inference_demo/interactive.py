"""Read prompts from standard input: as a conversation (--interactive), or one independent prompt per line."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.session import Session
from fp8_inference_demo.text import decoded

PROMPT = "> "


def piped_prompts() -> Iterator[str | InferenceError]:
    """Yield the non-blank lines of standard input, and an error in place of each line that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = decoded(line, f"standard input, line {number}").rstrip("\r\n")
        except InferenceError as error:
            yield error
            continue
        text = text.removeprefix("\ufeff") if number == 1 else text
        if text.strip():
            yield text


def typed_prompts() -> Iterator[str | InferenceError]:
    """Yield typed lines, with line editing and history, until Ctrl-D or an empty line. Ctrl-C drops a line.

    If standard input is not a terminal, yield `piped_prompts`.
    """
    if not sys.stdin.isatty():
        yield from piped_prompts()
        return
    import readline  # noqa: F401  input() edits lines with it

    if isinstance(sys.stdin, io.TextIOWrapper):  # do not raise on bytes that are not UTF-8
        sys.stdin.reconfigure(errors="replace")
    print("Ctrl-C stops an answer; an empty line or Ctrl-D ends the session", file=sys.stderr, flush=True)
    while True:
        try:
            line = _typed_line()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not line.strip():
            return
        yield line


def _typed_line() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # input() would write its prompt to standard output
    print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


class Interruption:
    """Records Ctrl-C during an answer."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the first Ctrl-C in the block, so that the answer ends after a whole token. A second one raises
        KeyboardInterrupt.
        """
        self.pressed = False
        before = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def cut_left(ids: list[int], most: int, bos: int | None) -> list[int]:
    """Return the last `most` ids. If `ids` start with BOS, the result starts with BOS too."""
    if len(ids) <= most:
        return ids
    head = ids[:1] if ids[0] == bos else []
    return head + ids[len(ids) - most + len(head) :]


def answer_lines(session: Session) -> int:
    """Answer each line of standard input independently. Return how many could not be answered."""
    session.load(None, session.arguments.num_samples)
    failed = 0
    for number, line in enumerate(piped_prompts()):
        name = f"prompt {number + 1}"
        try:
            if isinstance(line, InferenceError):
                raise line
            ids = session.encode(line, name)
            session.check_length(ids, name, session.engine.max_length)
            session.answer(name, number, ids, echo=line)
        except ValueError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    session.log_operations()
    return failed


def converse(session: Session) -> int:
    """Continue a conversation. Return how many lines of a pipe could not be answered.

    The model continues one text: all prompts and answers so far. Each prompt starts a new line. If the text is too long
    for the context, its beginning is dropped.
    """
    session.load(None, 1)
    length = session.engine.max_length
    most = max(length - session.options.max_new_tokens, length // 2)  # tokens of a prompt
    text, interruption, failed = "", Interruption(), 0
    for number, line in enumerate(typed_prompts()):
        if isinstance(line, InferenceError):
            failed += 1
            print(f"error: {line}", file=sys.stderr)
            continue
        text += ("\n" if text and not text.endswith("\n") else "") + line
        whole = session.encode(text, f"prompt {number + 1}")
        ids = cut_left(whole, most, session.tokenizer.bos_token_id)
        if len(ids) < len(whole):
            print(f"note: dropped the first {len(whole) - len(ids)} tokens", file=sys.stderr)
        with interruption.watched():
            answers = session.answer(
                f"prompt {number + 1}", number, ids, interrupted=lambda: interruption.pressed
            )
        text += answers[0].text
    session.log_operations()
    return failed
