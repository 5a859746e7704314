"""Read prompts from standard input, either as a conversation (--interactive) or as one independent prompt per line."""

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
    """Yield the non-blank lines of standard input. Raises UnicodeDecodeError if a line is not UTF-8."""
    for line in io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig"):
        if line.strip():
            yield line.rstrip("\n")


def read_typed_prompts() -> Iterator[str]:
    """Yield the lines that the user types in a terminal, until Ctrl-D or an empty line.

    Line editing and a history are available. Ctrl-C discards the current line. If standard input is not a terminal,
    yield its non-blank lines.
    """
    if not sys.stdin.isatty():
        yield from read_piped_prompts()
        return
    import readline  # noqa: F401  input() edits lines with it

    print(
        "Press Ctrl-C to stop an answer. Enter an empty line or press Ctrl-D to end the session.",
        file=sys.stderr,
        flush=True,
    )
    while True:
        try:
            line = input(PROMPT if sys.stdout.isatty() else "")  # a file or pipe receives only the answers
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
    """Context manager that records the first Ctrl-C instead of raising KeyboardInterrupt.

    Yields a function that returns whether Ctrl-C was pressed. The caller can then stop after a complete token. A second
    Ctrl-C raises KeyboardInterrupt.
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
    """Return the last `max_tokens` token ids. Keep BOS as the first id if `ids` starts with BOS."""
    if len(ids) <= max_tokens:
        return ids
    head = ids[:1] if ids[0] == bos else []
    return head + ids[len(ids) - max_tokens + len(head) :]


def answer_lines(session: Session) -> int:
    """Answer each line of standard input as an independent prompt. Return the number of lines that failed."""
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
    """Run a conversation between the user and the model until the user ends the input.

    All prompts and answers form one text, which the model continues. Each prompt starts a new line of this text. If the
    text is too long for the context, its beginning is dropped.
    """
    session.load(None, 1)
    length = session.engine.max_length
    max_tokens = max(length - session.options.max_new_tokens, length // 2)  # maximum number of prompt tokens
    text = ""
    for number, line in enumerate(read_typed_prompts()):
        text += ("\n" if text and not text.endswith("\n") else "") + line
        whole = session.encode(text, f"prompt {number + 1}")
        ids = truncate_left(whole, max_tokens, session.tokenizer.bos_token_id)
        if len(ids) < len(whole):
            print(
                f"note: dropped the first {len(whole) - len(ids)} tokens of the conversation, because the "
                "context is full",
                file=sys.stderr,
            )
        with record_first_ctrl_c() as interrupted:
            answers = session.answer(number, ids, interrupted=interrupted)
        text += answers[0].text
    session.log_operations()
