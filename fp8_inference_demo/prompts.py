"""Read prompts from standard input or from a file, and answer them.

Standard input is a conversation (--interactive) or has one independent prompt per line. --prompts FILE.jsonl has JSON
objects with the key "prompt". Other keys are copied to --output, and the key "choices" is added: a list with one
{"text", "finish_reason", "tokens"} per sample. The output has the same order as the input. The whole input is checked
before the model is loaded.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

from tqdm import tqdm

from fp8_inference_demo import InferenceError
from fp8_inference_demo.session import Request, Session
from fp8_inference_demo.text import read_text

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
    max_tokens = max(
        length - session.arguments.max_new_tokens, length // 2
    )  # maximum number of prompt tokens
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


OUTPUT_KEYS = "choices"


def parse_prompt(line: str, name: str) -> dict[str, Any]:
    """Parse one line of a prompt file. Raises InferenceError if the line is not a JSON object with a "prompt"."""
    try:
        record = json.loads(line)
        # refuse NaN, infinity and lone surrogates, which cannot be written to the output
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        message = f'{name} is not valid JSON: {error}. Expected {{"prompt": "..."}}.'
        raise InferenceError(message, code="not_json", key=name) from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        message = f'{name} has no string under the key "prompt". Expected {{"prompt": "..."}}.'
        raise InferenceError(message, code="no_prompt", key=name)
    if OUTPUT_KEYS in record:
        message = f"{name} has the key {OUTPUT_KEYS!r}, which is reserved for the output. Rename the key."
        raise InferenceError(message, code="reserved_field", key=name)
    return record


def complete_file(session: Session, prompts: Path, path: Path) -> None:
    """Complete the prompts in the file `prompts` and write the result to the new file `path`.

    If a batch fails, the file keeps the lines of all earlier batches.

    Raises:
        InferenceError: a prompt is invalid or `path` exists (raised before the model is loaded), or the model computed
            logits that are not finite.
        torch.OutOfMemoryError: the device has too little memory.
    """
    if path.exists():
        message = f"--output {path} already exists. Remove the file, or pass another path."
        raise InferenceError(message, code="exists", key="--output")
    rows: list[tuple[dict[str, Any], Request]] = []
    lines = enumerate(read_text(prompts, f"--prompts {prompts}").split("\n"), 1)
    for index, (number, line) in enumerate((number, line) for number, line in lines if line.strip()):
        name = f"--prompts {prompts}: line {number}"
        record = parse_prompt(line, name)
        ids = session.encode(record["prompt"], name)
        session.check_length(ids, name)
        rows += [(record, request) for request in session.requests(index, ids)]
    if not rows:
        message = f'--prompts {prompts} has no prompts. Expected lines like {{"prompt": "..."}}.'
        raise InferenceError(message, code="no_prompts", key="--prompts")
    session.load(max(len(request.ids) for _, request in rows), len(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    size, samples = session.engine.batch_size, session.arguments.num_samples
    with (
        open(path, "w", encoding="utf-8") as file,
        tqdm(total=len(rows) // samples, unit="prompt") as progress,
    ):
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            completions, _ = session.complete([request for _, request in batch])
            for (record, _), completion in zip(batch, completions, strict=True):
                choices = record.setdefault(OUTPUT_KEYS, [])
                choices.append(
                    {
                        "text": completion.text,
                        "finish_reason": completion.finish_reason,
                        "tokens": completion.tokens,
                    }
                )
                if len(choices) == samples:  # a batch can end between two samples of one prompt
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    progress.update()
            file.flush()
    print(session.timing.line(), file=sys.stderr)
    session.log_operations()
