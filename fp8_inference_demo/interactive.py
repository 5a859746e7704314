"""Read prompts from standard input: as a conversation (--interactive), or one independent prompt per line."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

from fp8_inference_demo.session import Session

PROMPT = "> "


def read_piped_prompts() -> Iterator[str]:
    """Yield the non-blank lines of standard input, which is UTF-8. Raises UnicodeDecodeError, a ValueError."""
    for line in io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig"):
        if line.strip():
            yield line.rstrip("\n")


def read_typed_prompts() -> Iterator[str]:
    """Yield typed lines, with line editing and history, until Ctrl-D or an empty line. Ctrl-C drops a line.

    If standard input is not a terminal, yield `read_piped_prompts`.
    """
    if not sys.stdin.isatty():
        yield from read_piped_prompts()
        return
    import readline  # noqa: F401  input() edits lines with it

    print("Ctrl-C stops an answer; an empty line or Ctrl-D ends the session", file=sys.stderr, flush=True)
    while True:
        try:
            line = input(PROMPT if sys.stdout.isatty() else "")  # a file gets the answers only
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if not line.strip():
            return
        yield line


@contextmanager
def record_first_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C in the block, so that an answer ends after a whole token.

    Yields a function that returns whether it was pressed. A second Ctrl-C raises KeyboardInterrupt.
    """
    pressed = Event()

    def record(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, record)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def truncate_left(ids: list[int], max_tokens: int, bos: int | None) -> list[int]:
    """Return the last `max_tokens` ids. If `ids` start with BOS, the result starts with BOS too."""
    if len(ids) <= max_tokens:
        return ids
    head = ids[:1] if ids[0] == bos else []
    return head + ids[len(ids) - max_tokens + len(head) :]


def answer_lines(session: Session) -> int:
    """Answer each line of standard input independently. Return how many could not be answered."""
    session.load(None, session.arguments.num_samples)
    failed = 0
    for number, line in enumerate(read_piped_prompts()):
        name = f"prompt {number + 1}"
        try:
            ids = session.encode(line, name)
            session.check_length(ids, name, session.engine.max_length)
            session.answer(number, ids, echo=line)
        except ValueError as error:
            failed += 1
            print(f"error: {error}", file=sys.stderr)
    session.log_operations()
    return failed


def hold_conversation(session: Session) -> None:
    """Continue a conversation.

    The model continues one text: all prompts and answers so far. Each prompt starts a new line. If the text is too long
    for the context, its beginning is dropped.
    """
    session.load(None, 1)
    length = session.engine.max_length
    max_tokens = max(length - session.options.max_new_tokens, length // 2)  # tokens of a prompt
    text = ""
    for number, line in enumerate(read_typed_prompts()):
        text += ("\n" if text and not text.endswith("\n") else "") + line
        whole = session.encode(text, f"prompt {number + 1}")
        ids = truncate_left(whole, max_tokens, session.tokenizer.bos_token_id)
        if len(ids) < len(whole):
            print(f"note: dropped the first {len(whole) - len(ids)} tokens", file=sys.stderr)
        with record_first_ctrl_c() as interrupted:
            answers = session.answer(number, ids, interrupted=interrupted)
        text += answers[0].text
    session.log_operations()
