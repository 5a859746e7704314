"""Complete one batch of prompts: read tokens from the engine and decode them to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_inference_demo.engine import Engine, Generation
from fp8_inference_demo.sampling import Sampling
from fp8_inference_demo.text import StopStrings, TextStream, eos_tokens


@dataclass(frozen=True)
class Options:
    """Generation options that apply to all completions in a batch."""

    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """Request for one completion: the token ids of a prompt and the seed for sampling."""

    ids: list[int]
    seed: int


class Completion:
    """State of one completion while it is generated, and its result.

    finish_reason: "stop" after EOS or a stop string. "length" after max_new_tokens, at the end of the context, or if
        the callback `on_text` stopped the batch. None while tokens are generated.
    tokens: number of new tokens, including EOS.
    text: updated after each token if `updates_text` is True or stop strings are set, otherwise only at the end.
        Decoding after each token costs CPU time, which can exceed the time that the GPU needs to generate the token.
    """

    def __init__(self, tokenizer: Any, request: Request, options: Options, eos: set[int], updates_text: bool):
        self.text = ""
        self.tokens = 0
        self.finish_reason: str | None = None
        self._stream = TextStream(tokenizer, request.ids)
        self._stops = StopStrings(options.stop)
        self._eos = eos
        self._grows = updates_text or bool(options.stop)

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


def complete(
    engine: Engine,
    tokenizer: Any,
    requests: Sequence[Request],
    options: Options,
    on_text: Callable[[Sequence[Completion]], bool] | None = None,
) -> tuple[list[Completion], Generation]:
    """Complete up to `engine.batch_size` requests as one batch.

    Return the completions, and the batch's `Generation` with its timing.

    on_text: called with the completions so far after each token, and at the end. If it returns True, generation stops
    for the whole batch.

    Raises EngineError if the logits are not finite, or if a prompt is empty or fills the context.
    """
    eos = set() if options.ignore_eos else eos_tokens(tokenizer, engine.config)
    run = engine.generate(
        [request.ids for request in requests],
        options.sampling,
        [request.seed for request in requests],
        options.max_new_tokens,
    )
    updates_text = on_text is not None
    completions = [Completion(tokenizer, request, options, eos, updates_text) for request in requests]
    for step in run:
        for row, (completion, token) in enumerate(zip(completions, step, strict=True)):
            if token is None or completion.finish_reason:
                continue
            completion.push(token)
            if completion.finish_reason:
                run.stop(row)
        if on_text is not None and on_text(completions):
            for row in range(len(completions)):
                run.stop(row)
    for completion in completions:
        if not completion.finish_reason:
            completion.finish("length")
    if on_text is not None:
        on_text(completions)
    return completions, run
