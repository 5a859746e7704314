"""A session of the command: load the model and its tokenizer, and stream answers to standard output."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from fp8_inference_demo.completions import Completion, Options, Request, complete
from fp8_inference_demo.engine import Engine, Generation, Timing
from fp8_inference_demo.errors import InferenceError
from fp8_inference_demo.sampling import Sampling, row_seed
from fp8_inference_demo.text import encode, load_tokenizer
from model.config import load_config, trained_length
from model.hf_folder import find_weights
from model.terminal import escape_controls

BATCH_SIZE = 16
CONTEXT_TOKENS = 4096  # default if neither the prompts nor the trained length are known


class Session:
    """The model of a folder with its tokenizer and the options. Raises ValueError for an invalid folder or option."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        self.arguments = arguments
        self.folder = folder
        self.config = load_config(str(folder))
        self.tokenizer = load_tokenizer(folder)
        find_weights(folder, self.config)
        self.timing = Timing()  # sum over all batches
        self.options = Options(
            Sampling(
                arguments.temperature,
                arguments.top_k,
                arguments.top_p,
                arguments.min_p,
                arguments.repetition_penalty,
            ),
            arguments.max_new_tokens,
            tuple(arguments.stop),
            arguments.ignore_eos,
        )

    def encode(self, prompt: str, name: str) -> list[int]:
        """Return the token ids of a prompt. Raises ValueError, with `name`, if it cannot be encoded."""
        try:
            return encode(self.tokenizer, prompt, self.config.vocab_size)
        except InferenceError as error:
            raise InferenceError(f"{name}: {error}", code=error.code, key=name) from error

    def max_length(self, longest: int | None) -> int:
        """Return the context length in tokens: --max_length, or the length that the longest prompt and its answer need.

        The default is at most the trained length, or the model's positions if the trained length is not recorded.
        longest: tokens of the longest prompt, or None if unknown.
        """
        trained = trained_length(self.config)
        needed = (trained or CONTEXT_TOKENS) if longest is None else longest + self.options.max_new_tokens
        return self.arguments.max_length or min(needed, trained or self.config.max_position_embeddings)

    def check_length(self, ids: Sequence[int], name: str, max_tokens: int | None = None) -> None:
        """Raise ValueError if the prompt leaves no room for a new token in a context of `max_tokens` tokens.

        `max_tokens` defaults to the longest allowed context.
        """
        max_tokens = max_tokens or self.max_length(self.config.max_position_embeddings)
        if len(ids) >= max_tokens:
            raise InferenceError(
                f"{name} has {len(ids)} tokens, but the context has {max_tokens} (--max_length, at most "
                f"max_position_embeddings {self.config.max_position_embeddings}). Use a shorter prompt.",
                code="prompt_too_long",
                key=name,
            )

    def load(self, longest: int | None, rows: int) -> None:
        """Load the engine for prompts of up to `longest` tokens (None: unknown) and at most `rows` samples per batch.

        Raises ValueError or torch.OutOfMemoryError.
        """
        begin, arguments = time.perf_counter(), self.arguments
        batch_size = min(rows, arguments.batch_size or BATCH_SIZE)
        self.engine = Engine.load(self.folder, arguments.precision, batch_size, self.max_length(longest))
        seconds = time.perf_counter() - begin
        what = f"{self.folder}: {arguments.precision} on {self.engine.device}"
        print(f"{what}, loaded in {seconds:.1f} s", file=sys.stderr)

    def requests(self, number: int, ids: list[int]) -> list[Request]:
        """Return one request per sample of a prompt."""
        seeds = [row_seed(self.arguments.seed, number, i) for i in range(self.arguments.num_samples)]
        return [Request(ids, seed) for seed in seeds]

    def complete(
        self,
        requests: Sequence[Request],
        on_text: Callable[[Sequence[Completion]], bool] | None = None,
    ) -> tuple[list[Completion], Generation]:
        """Complete one batch."""
        completions, run = complete(self.engine, self.tokenizer, requests, self.options, on_text)
        self.timing.add(run.timing)
        return completions, run

    def answer_one(self, name: str, prompt: str) -> None:
        """Load the engine and answer a single prompt. Raises ValueError for an invalid prompt, or EngineError."""
        ids = self.encode(prompt, name)
        self.check_length(ids, name)
        self.load(len(ids), self.arguments.num_samples)
        self.answer(0, ids, echo=prompt)
        self.log_operations()

    def answer(
        self,
        number: int,
        ids: list[int],
        echo: str = "",
        interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Stream every sample of a prompt to standard output, on a terminal after `echo`. Then print the speed."""
        if sys.stdout.isatty():
            print(escape_controls(echo), end="" if self.arguments.num_samples == 1 else "\n", flush=True)
        requests = iter(self.requests(number, ids))
        answers: list[Completion] = []
        timing, printer = Timing(), Printer(self.arguments.num_samples, interrupted)
        while batch := list(islice(requests, self.engine.batch_size)):
            printer.before = len(answers)
            completions, run = self.complete(batch, printer.on_text)
            answers += completions
            timing.add(run.timing)
            if run.full:
                ends, max_tokens = self.engine.max_length, self.config.max_position_embeddings
                how = (
                    f"; --max_length can be up to {max_tokens}"
                    if ends < max_tokens
                    else ", the maximum of the model"
                )
                print(f"note: the context is full at {ends} tokens{how}", file=sys.stderr)
        print(timing.line(), file=sys.stderr)
        return answers

    def log_operations(self) -> None:
        """Print which operations ran."""
        print(*self.engine.report(), sep="\n", file=sys.stderr)


class Printer:
    """Prints completions to standard output as they grow, one after the other.

    Each completion ends with a newline. If there are several, each starts with a numbered header line.
    """

    def __init__(self, samples: int, interrupted: Callable[[], bool]):
        self.samples = samples
        self.interrupted = interrupted
        self.before = 0  # completions of earlier batches
        self.printed = 0  # complete completions
        self.shown: int | None = None  # characters printed of the next completion; None: none yet

    def on_text(self, completions: Sequence[Completion]) -> bool:
        for completion in completions[self.printed - self.before :]:
            if self.shown is None:
                if self.samples > 1:
                    print(f"=== {self.printed + 1}/{self.samples} ===")
                self.shown = 0
            if len(completion.text) > self.shown:
                text = completion.text[self.shown :]
                # escaped for a terminal, but not for a file or pipe
                print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)
                self.shown = len(completion.text)
            if not completion.finish_reason:
                break
            print(flush=True)
            self.printed, self.shown = self.printed + 1, None
        return self.interrupted()
