"""Text from a trained Mistral, token by token, with a key/value cache. fp8_inference.py imports this once its arguments
are checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from model.build import build_model
from model.config import load_config
from model.fp8.gemms import count_gemms
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class DemoError(ValueError):
    """Something the user gave cannot be used; the message says what, and what to do."""


@dataclass
class Sampling:
    """How the next token is drawn. temperature 0: always the likeliest. top_k 0 and top_p 1: no limit."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0

    def draw(self, logits_V: torch.Tensor, generator: torch.Generator) -> int:
        """The next token for the logits of one position (Holtzman et al. 2020, arXiv:1904.09751, for top_p)."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        sorted_logits, order = (logits_V.float() / self.temperature).sort(descending=True)
        if self.top_k:
            sorted_logits = sorted_logits[: self.top_k]
        probabilities = sorted_logits.softmax(-1)
        # the likeliest tokens whose sum reaches top_p, at least one
        probabilities[probabilities.cumsum(-1) - probabilities >= self.top_p] = 0
        return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass
class Timing:
    """Tokens and seconds of the prompt (prefill) and of the tokens after the first generated one (decode)."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def line(self) -> str:
        prefill = (
            f"prefill {self.prefill_tokens} tokens at {self.prefill_tokens / self.prefill_s:,.1f} tokens/s"
        )
        if not self.decode_tokens:
            return prefill
        return f"{prefill}; decode {self.decode_tokens} tokens at {self.decode_tokens / self.decode_s:,.1f} tokens/s"


class TextStream:
    """Token ids -> text, piece by piece. A character whose bytes are spread over several tokens comes out once it is
    complete."""

    CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Any, context: list[int]):
        """`context`: the ids before the first piece. A tokenizer decodes a word differently at the start of a text."""
        self.tokenizer = tokenizer
        self.ids = context[-self.CONTEXT_TOKENS :]
        self.start, self.done = (
            0,
            len(self.ids),
        )  # ids[start:done] are out already, and the context of what follows

    def _new_text(self) -> str:
        before, now = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (self.ids[self.start : self.done], self.ids[self.start :])
        )
        return now[len(before) :]

    def push(self, token: int) -> str:
        """The text that `token` completes, often ''."""
        self.ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.start, self.done = self.done, len(self.ids)
        return text

    def rest(self) -> str:
        """What never became complete."""
        return self._new_text()


@dataclass
class Generator:
    """A loaded model with its tokenizer."""

    model: nn.Module
    tokenizer: Any
    precision: Precision
    sampling: Sampling
    seed: int = 0
    ignore_eos: bool = False
    _calls: int = field(default=0, init=False)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, BOS first, as each training document begins.

        Raises DemoError: nothing to begin with, a tokenizer of another model, more than the model's positions.
        """
        bos = self.tokenizer.bos_token_id
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = ([] if bos is None else [bos]) + list(ids)
        config = self.model.config
        if not ids:
            raise DemoError(
                "the prompt is empty and the tokenizer has no BOS token to begin with; give some text"
            )
        if max(ids) >= config.vocab_size:
            raise DemoError(
                f"the tokenizer gives the id {max(ids)} and the model has {config.vocab_size} tokens; "
                "they do not belong together"
            )
        if len(ids) >= config.max_position_embeddings:
            raise DemoError(
                f"the prompt has {len(ids)} tokens and max_position_embeddings is {config.max_position_embeddings}; "
                "give a shorter one"
            )
        return ids

    def stop_tokens(self) -> set[int]:
        if self.ignore_eos:
            return set()
        configured = self.model.config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return {token for token in [*ids, self.tokenizer.eos_token_id] if token is not None}

    def tokens(self, ids: list[int], max_new_tokens: int, timing: Timing) -> Iterator[int]:
        """New token ids, one at a time, without the EOS that ends them. Fills `timing`."""
        device = self.precision.device
        random = torch.Generator(device).manual_seed(self.seed)
        cache = self.model.new_cache(1, len(ids) + max_new_tokens)
        stop, pending = self.stop_tokens(), torch.tensor([ids], device=device)
        for index in range(max_new_tokens):
            start = time.perf_counter()
            token = self.sampling.draw(self._logits(pending, cache), random)  # an int: the GPU is through
            seconds = time.perf_counter() - start
            if index == 0:
                timing.prefill_tokens, timing.prefill_s = len(ids), seconds
            else:
                timing.decode_tokens, timing.decode_s = index, timing.decode_s + seconds
            if token in stop:
                return
            yield token
            pending = torch.tensor([[token]], device=device)

    @torch.no_grad()
    def _logits(self, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Raises DemoError: a module did not run what was asked for, in the first calls, a prefill and a decode."""
        # Weights do not change: they are quantized in the first call, and later ones reuse the FP8 copy.
        first, counts = self._calls == 0, self._calls < 2
        with count_gemms(self.model, self.precision) if counts else nullcontext() as gemms:
            out = self.model(input_ids, cache=cache, is_first_microbatch=first)
        if gemms is not None and (problem := gemms.problem(backward=False)):
            raise DemoError(problem)
        self._calls += 1
        return out.logits[0, -1]

    def stream(self, ids: list[int], max_new_tokens: int, timing: Timing) -> Iterator[str]:
        """The continuation of the prompt `ids` in pieces of text. It ends early at the model's last position."""
        room = self.model.config.max_position_embeddings - len(ids)
        if room < max_new_tokens:
            print(f"note: the model's positions end after {room} new tokens", file=sys.stderr)
        text = TextStream(self.tokenizer, ids)
        for token in self.tokens(ids, min(room, max_new_tokens), timing):
            yield text.push(token)
        yield text.rest()


def load(folder: Path, precision: Precision, sampling: Sampling, seed: int, ignore_eos: bool) -> Generator:
    """The model of a Hugging Face folder as te.Linear variant, with its tokenizer.

    Raises DemoError: no tokenizer, or a broken one. ValueError: not a Mistral, weights that are missing, damaged or of
    another model (model.build says which).
    """
    transformers_logging.disable_progress_bar()
    config = load_config(str(folder))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DemoError(
            f"--model {folder}: no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy the model's into it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # tokenizers raises plain Exception for a broken file
        raise DemoError(f"--model {folder}: its tokenizer cannot be read: {error}") from error
    model = build_model(config, "te_linear", precision, init_from=str(folder)).eval()
    return Generator(model, tokenizer, precision, sampling, seed, ignore_eos)


def answer(generator: Generator, prompt: str, max_new_tokens: int) -> None:
    """Print the prompt and its continuation, then the speed and what ran FP8.

    Raises DemoError: a module did not run what was asked for.
    """
    ids, timing = generator.encode(prompt), Timing()
    print(prompt, end="", flush=True)
    for piece in generator.stream(ids, max_new_tokens, timing):
        print(piece, end="", flush=True)
    print(flush=True)
    print(timing.line(), file=sys.stderr)
    precision = generator.precision
    report = fp8_modules(generator.model, precision)
    if not precision.fp8:
        print(f"{len(report.kept)} GEMM modules ran {precision.config.compute}, as asked", file=sys.stderr)
        return
    print("\n".join(report.lines(precision.config.recipe, len(report.planned))), file=sys.stderr)
