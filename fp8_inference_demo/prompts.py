"""--prompts FILE.jsonl --output FILE.jsonl: a file of prompts, checked as a whole before anything runs, to a file of
completions, which grows by whole lines and is gone on with by the same command.

A line of the prompts is a JSON object with a "prompt"; its other fields are kept. A line of the output is the same
object with "choices", a list of {"text", "finish_reason", "tokens"}, one a sample, in the order of the prompts. Beside
the output OUTPUT.settings.json says of what and how it was made.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from fp8_inference_demo.completions import Completion, Request
from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.session import Session
from fp8_inference_demo.text import decoded

ADDED = "choices"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # from flock, where a file system has none
# What completions depend on, besides the prompts, the model and the length of the context. A batch of another size may
# round otherwise, but is what to go on with where memory ran out.
SETTINGS = (
    "precision max_new_tokens temperature top_k top_p min_p repetition_penalty seed num_samples stop "
    "ignore_eos".split()
)


def read_prompts(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank. Raises ValueError: it names the line that will not do."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, _record(line, f"--prompts {path}: line {number}")


def _record(line: bytes, where: str) -> dict[str, Any]:
    text = decoded(line, where)
    try:
        record = json.loads(text, parse_constant=_no_json)
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is infinite
    except UnicodeEncodeError as error:
        message = f"{where} has half of a surrogate pair, which is no character"
        raise InferenceError(message, code="surrogate", key=where) from error
    except (ValueError, RecursionError) as error:
        message = f'{where} is not JSON ({error}); allowed is {{"prompt": "..."}}'
        raise InferenceError(message, code="not_json", key=where) from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        message = f'{where}: allowed is an object with a text "prompt": {{"prompt": "..."}}'
        raise InferenceError(message, code="no_prompt", key=where)
    if ADDED in record:
        message = f"{where} has the field {ADDED!r}, which the output adds; rename it"
        raise InferenceError(message, code="reserved_field", key=where)
    return record


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """On the disk when this returns; until then `path` is as it was."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sha256_sampled(*files: Path) -> str:
    """A hash of the sizes of files and of 64 pieces of 64 KiB of each, spread evenly: other weights have another, and
    14 GB of them need not be read twice."""
    digest, piece = hashlib.sha256(), 2**16
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for part in range(64):
                file.seek(max(0, size - piece) * part // 63)
                digest.update(file.read(piece))
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """What a Hugging Face folder's completions depend on."""
    names = ("*.safetensors", "config.json", "tokenizer*")
    return sorted({path for name in names for path in folder.glob(name) if path.is_file()})


class Output:
    """The output file, open for this process alone, behind the lines that are done."""

    def __init__(self, path: Path, file: BinaryIO, done: int):
        self.path = path
        self.file = file
        self.done = done  # lines that an earlier run has written

    def write(self, records: list[dict[str, Any]]) -> None:
        """Whole lines, on the disk when this returns."""
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        self.file.write("".join(lines).encode())
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def open_output(path: Path, prompts: Path, settings: dict[str, Any]) -> Iterator[Output]:
    """The output for `prompts` with `settings`: new, or behind what an earlier run has finished. A last line without
    its end is cut off.

    Raises ValueError: another process writes it, it was made of other prompts or with other settings (the message says
    which), or its lines are not those of the prompts.
    """
    if path.exists() and not path.is_file():
        raise InferenceError(f"--output {path}: allowed is a file", code="not_a_file", key="--output")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        message = f"--output {path} is not this user's to go on with; give another one"
        raise InferenceError(message, code="permission", key="--output")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"--output {path}: another process writes it"
            raise InferenceError(message, code="locked", key="--output") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(
                f"note: --output {path}: its file system has no locks; let one process write it",
                file=sys.stderr,
            )
        _check_settings(path, settings)
        done = _check_lines(path, prompts, file)
        yield Output(path, file, done)


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Compare with those of the file that is there, or write them beside the one that begins."""
    beside = path.with_name(path.name + ".settings.json")
    again = f"give another --output, or remove {path} to begin anew"
    if not path.stat().st_size:
        write_json(beside, settings)
        return
    try:
        made = json.loads(beside.read_text(encoding="utf-8"))
        if not isinstance(made, dict):
            raise ValueError("no settings")
    except (OSError, ValueError) as error:
        raise InferenceError(
            f"--output {path} is there and {beside.name}, which says how it was made, cannot be read; {again}",
            code="unreadable_settings",
            key="--output",
        ) from error
    keys = [key for key in {**made, **settings} if made.get(key) != settings.get(key)]
    if keys:
        differences = ", ".join(f"{key} {made.get(key)!r} (now {settings.get(key)!r})" for key in keys)
        message = f"--output {path} was made with {differences}; {again}"
        raise InferenceError(message, code="other_settings", key=keys[0])


def _check_lines(path: Path, prompts: Path, file: BinaryIO) -> int:
    """How many whole lines there are, each that of its prompt. Cuts off what comes behind."""
    records, end, done = read_prompts(prompts), 0, 0
    file.seek(0)
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            made = json.loads(line)
            del made[ADDED]
        except (ValueError, TypeError, KeyError):
            made = None
        if made is None or (found := next(records, None)) is None or made != found[1]:
            raise InferenceError(
                f"--output {path}: line {done + 1} is not the completion of its prompt in {prompts}; give another "
                f"--output, or remove {path} to begin anew",
                code="other_prompts",
                key=f"--output {path}: line {done + 1}",
            )
        end, done = end + len(line), done + 1
    file.truncate(end)
    return done


def complete_file(session: Session, prompts: Path, path: Path) -> None:
    """Write the completions of a file of prompts to `path`, behind those that are there.

    Raises ValueError, before anything is loaded: a file that will not do (`read_prompts`, `open_output`). EngineError:
    logits that are not finite; torch.OutOfMemoryError: too little memory. What is written by then stays.
    """
    if not prompts.is_file():
        message = f"--prompts {prompts}: allowed is a file, which is read several times, no pipe"
        raise InferenceError(message, code="not_a_file", key="--prompts")
    lengths = [0]
    for number, record in read_prompts(prompts):
        name = f"--prompts {prompts}: line {number}"
        ids = session.encode(record["prompt"], name)
        session.check_length(ids, name)
        lengths.append(len(ids))
    count, longest = len(lengths) - 1, max(lengths)
    if not count:
        message = f'--prompts {prompts}: no prompts in it; a line is {{"prompt": "..."}}'
        raise InferenceError(message, code="no_prompts", key="--prompts")
    settings = {
        "prompts": _sha256(prompts),
        "model": sha256_sampled(*model_files(session.folder)),
        "max_length": session.max_length(longest),
        **{key: getattr(session.arguments, key) for key in SETTINGS},
    }
    samples = session.arguments.num_samples
    with open_output(path, prompts, settings) as output:
        if output.done == count:
            print(f"{path}: all {count} prompts are done", file=sys.stderr)
            return
        session.load(longest, (count - output.done) * samples)
        rows = _rows(session, prompts, output.done)
        progress = tqdm(total=count, initial=output.done, unit="prompt", mininterval=1.0)
        with progress:
            while batch := list(islice(rows, session.engine.batch_size)):
                completions, _ = session.complete([request for _, request in batch])
                whole = []
                for (record, _), completion in zip(batch, completions, strict=True):
                    # a batch may end amid the samples of a prompt
                    record.setdefault(ADDED, []).append(_choice(completion))
                    if len(record[ADDED]) == samples:
                        whole.append(record)
                output.write(whole)
                progress.update(len(whole))
    print(session.timing.line(), file=sys.stderr)
    session.tell()


def _rows(session: Session, prompts: Path, done: int) -> Iterator[tuple[dict[str, Any], Request]]:
    """Every sample of every prompt behind the first `done` ones, with the prompt's object."""
    for index, (number, record) in islice(enumerate(read_prompts(prompts)), done, None):
        name = f"--prompts {prompts}: line {number}"
        for request in session.requests(name, index, session.encode(record["prompt"], name)):
            yield record, request


def _choice(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
