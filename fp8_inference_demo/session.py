"""Load a model and its tokenizer, complete batches of prompts, and stream answers to standard output.

The prompts come from the command line, from standard input (one per line) or from a file (--prompts).
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fp8_inference_demo import InferenceError
from fp8_inference_demo.engine import Engine, Generation, Timing
from fp8_inference_demo.sampling import Sampling, row_seed
from fp8_inference_demo.text import StopStrings, TextStream, encode, eos_tokens, load_tokenizer, read_text
from model.config import load_config, trained_length
from model.hf_folder import find_weights
from model.terminal import escape_controls

BATCH_SIZE = 16
RESULTS_KEY = "choices"  # key that --prompts adds to each object
CONTEXT_TOKENS = 4096  # default if neither the prompt lengths nor the trained sequence length are known


@dataclass(frozen=True)
class Request:
    """Request for one completion: the token ids of a prompt and the seed for sampling."""

    ids: list[int]
    seed: int


class Completion:
    """State of one completion while it is generated, and its result.

    finish_reason: "stop" after EOS or a stop string. "length" after max_new_tokens, or at the end of the context. None
        while tokens are generated.
    tokens: number of new tokens, including EOS.
    text: updated after each token if `updates_text` is True or stop strings are set, otherwise only at the end.
        Decoding after each token costs CPU time, which can exceed the time that the GPU needs to generate the token.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], eos: set[int], updates_text: bool
    ):
        self.text = ""
        self.tokens = 0
        self.finish_reason: str | None = None
        self._stream = TextStream(tokenizer, prompt)
        self._stops = StopStrings(stop)
        self._eos = eos
        self._grows = updates_text or bool(stop)

    def push(self, token: int) -> None:
        self.tokens += 1
        if token in self._eos:
            self.finish("stop")
            return
        self._stream.add(token)
        if self._grows:
            self.text += self._stops.push(self._stream.piece())
        if self._stops.found:
            self.finish_reason = "stop"

    def finish(self, reason: str) -> None:
        """Set finish_reason and append the text that was held back as a possible start of a stop string."""
        self.text += self._stops.push(self._stream.rest())
        if not self._stops.found:
            self.text += self._stops.held
        self.finish_reason = "stop" if self._stops.found else reason


class Session:
    """State shared by all tasks of the command: model, tokenizer, generation options and timing.

    The constructor raises InferenceError, or another ValueError, if the folder has no valid model or tokenizer.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self.arguments = arguments
        self.folder = folder
        self.config = load_config(str(folder))
        self.tokenizer = load_tokenizer(folder)
        find_weights(folder, self.config)
        self.timing = Timing()  # total of all batches
        self.sampling = Sampling(
            arguments.temperature,
            arguments.top_k,
            arguments.top_p,
            arguments.min_p,
            arguments.repetition_penalty,
        )

    def encode(self, prompt: str, name: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises InferenceError if encoding fails. The message starts with `name`.
        """
        try:
            return encode(self.tokenizer, prompt, self.config.vocab_size)
        except InferenceError as error:
            raise InferenceError(f"{name}: {error}", code=error.code, key=name) from error

    def max_length(self, longest: int | None) -> int:
        """Return the context length in tokens: --max_length, or the length of the longest prompt plus --max_new_tokens.

        Without --max_length, the result is capped at the training sequence length, or at max_position_embeddings if the
        model folder does not record the training sequence length.
        longest: number of tokens in the longest prompt, or None if unknown.
        """
        trained = trained_length(self.config)
        needed = (trained or CONTEXT_TOKENS) if longest is None else longest + self.arguments.max_new_tokens
        return self.arguments.max_length or min(needed, trained or self.config.max_position_embeddings)

    def check_length(self, ids: Sequence[int], name: str, max_tokens: int | None = None) -> None:
        """Raise InferenceError if the prompt leaves no room for a new token in the context.

        ids: token ids of the prompt. name: name of the prompt in the message. max_tokens: context length in tokens. The
        default is the longest context that the options allow.
        """
        max_tokens = max_tokens or self.max_length(self.config.max_position_embeddings)
        if len(ids) >= max_tokens:
            most = self.config.max_position_embeddings
            longer = f", or increase --max_length (maximum {most})" if max_tokens < most else ""
            raise InferenceError(
                f"{name} has {len(ids)} tokens, but the prompt and the generated tokens together must fit in a "
                f"context of {max_tokens} tokens. Use a shorter prompt{longer}.",
                code="prompt_too_long",
                key=name,
            )

    def load(self, longest: int | None, rows: int) -> None:
        """Load the model and allocate the KV cache.

        longest: number of tokens in the longest prompt, or None if unknown. rows: number of samples, which limits the
        batch size. Raises ValueError or torch.OutOfMemoryError.
        """
        begin, arguments = time.perf_counter(), self.arguments
        batch_size = min(rows, arguments.batch_size or BATCH_SIZE)
        self.engine = Engine.load(self.folder, arguments.precision, batch_size, self.max_length(longest))
        seconds = time.perf_counter() - begin
        what = f"{self.folder} in {arguments.precision} on {self.engine.device}"
        print(f"loaded {what} in {seconds:.1f} s", file=sys.stderr)

    def requests(self, number: int, ids: list[int]) -> list[Request]:
        """Return one request for each of the --num_samples samples of a prompt. number: index of the prompt."""
        seeds = [row_seed(self.arguments.seed, number, i) for i in range(self.arguments.num_samples)]
        return [Request(ids, seed) for seed in seeds]

    def complete(
        self,
        requests: Sequence[Request],
        on_text: Callable[[Sequence[Completion]], None] | None = None,
    ) -> tuple[list[Completion], Generation]:
        """Complete one batch of requests, and add the time of the batch to `timing`.

        Return the completions, and the `Generation` of the batch.

        on_text: callback that receives the completions so far, after each token and at the end.

        Raises InferenceError if the logits are not finite, or if a prompt is empty or fills the context.
        """
        eos = set() if self.arguments.ignore_eos else eos_tokens(self.tokenizer, self.config)
        run = self.engine.generate(
            [request.ids for request in requests],
            self.sampling,
            [request.seed for request in requests],
            self.arguments.max_new_tokens,
        )
        completions = [
            Completion(
                self.tokenizer, request.ids, self.arguments.stop, eos, updates_text=on_text is not None
            )
            for request in requests
        ]
        for step in run:
            for row, (completion, token) in enumerate(zip(completions, step, strict=True)):
                if token is None or completion.finish_reason:
                    continue
                completion.push(token)
                if completion.finish_reason:
                    run.stop(row)
            if on_text is not None:
                on_text(completions)
        for completion in completions:
            if not completion.finish_reason:
                completion.finish("length")
        if on_text is not None:
            on_text(completions)
        self.timing.add(run.timing)
        return completions, run

    def answer_one(self, name: str, prompt: str) -> None:
        """Load the model and answer a single prompt. Raises InferenceError if the prompt is empty or too long."""
        ids = self.encode(prompt, name)
        self.check_length(ids, name)
        self.load(len(ids), self.arguments.num_samples)
        self.answer(0, ids, echo=prompt)
        self.log_operations()

    def answer(self, number: int, ids: list[int], echo: str) -> None:
        """Stream all samples of a prompt to standard output and print the speed to standard error.

        number: index of the prompt. echo: text to print first on a terminal.
        """
        if sys.stdout.isatty():
            print(escape_controls(echo), end="" if self.arguments.num_samples == 1 else "\n", flush=True)
        requests = iter(self.requests(number, ids))
        timing, printer = Timing(), Printer(self.arguments.num_samples)
        while batch := list(islice(requests, self.engine.batch_size)):
            _, run = self.complete(batch, printer.on_text)
            printer.before += len(batch)
            timing.add(run.timing)
            if run.full:
                ends, max_tokens = self.engine.max_length, self.config.max_position_embeddings
                how = (
                    f"; pass --max_length (up to {max_tokens}) for a longer context"
                    if ends < max_tokens
                    else ", the model's maximum"
                )
                print(f"note: the context is full at {ends} tokens{how}", file=sys.stderr)
        print(timing.line(), file=sys.stderr)

    def log_operations(self) -> None:
        """Print which kernels ran and how much memory the weights and the cache use."""
        print(*self.engine.report(), sep="\n", file=sys.stderr)


class Printer:
    """Callback that prints completions to standard output while they are generated.

    Completions are printed one after the other, each followed by a newline. If a prompt has several samples, each
    completion starts with a numbered header line.
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.before = 0  # number of completions in earlier batches
        self.printed = 0  # number of completions printed in full
        self.shown: int | None = (
            None  # number of printed characters of the current completion; None if it has not started
        )

    def on_text(self, completions: Sequence[Completion]) -> None:
        for completion in completions[self.printed - self.before :]:
            if self.shown is None:
                if self.samples > 1:
                    print(f"=== {self.printed + 1}/{self.samples} ===")
                self.shown = 0
            if len(completion.text) > self.shown:
                text = completion.text[self.shown :]
                # escape control characters only on a terminal
                print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)
                self.shown = len(completion.text)
            if not completion.finish_reason:
                break
            print(flush=True)
            self.printed, self.shown = self.printed + 1, None


# ---------------------------------------------------------------- tasks with several prompts


def answer_lines(session: Session) -> int:
    """Answer each non-blank line of standard input as an independent prompt. Return the number of lines that failed.

    Raises UnicodeDecodeError if a line is not UTF-8.
    """
    session.load(None, session.arguments.num_samples)
    failed = 0
    lines = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig")
    for number, line in enumerate(line.rstrip("\n") for line in lines if line.strip()):
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


def parse_prompt(line: str, name: str) -> dict[str, Any]:
    """Parse one line of a prompt file and return the JSON object.

    Raises InferenceError if the line is not a JSON object, has no string under the key "prompt", or has the reserved
    key "choices".
    """
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
    if RESULTS_KEY in record:
        message = f"{name} has the key {RESULTS_KEY!r}, which is reserved for the output. Rename the key."
        raise InferenceError(message, code="reserved_field", key=name)
    return record


def complete_file(session: Session, prompts: Path, path: Path) -> None:
    """Complete the prompts in the file `prompts` and write the result to the new file `path`.

    Each line of the file is a JSON object with the key "prompt". The output has the same objects in the same order,
    with the additional key "choices": a list with one {"text", "finish_reason", "tokens"} per sample. The whole file is
    checked before the model is loaded.

    If a batch fails, `path` keeps the lines of all earlier batches.

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
                choices = record.setdefault(RESULTS_KEY, [])
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
