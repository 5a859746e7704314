"""Inference engine with a fixed-size KV cache. A CUDA graph runs each decoding step.

The GPU uses each new token as the input of its next step. The CPU reads the tokens a few steps later, so the GPU never
waits for the CPU:

    engine = Engine.load(folder, "fp8", batch_size=8, max_length=2048)
    run = engine.generate([[1, 17, 4], [1, 99]], Sampling(temperature=0), seeds=[0, 1], max_new_tokens=64)
    for step in run:  # one token per row, None for a finished row
        ...
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from fp8_inference_demo import InferenceError, reference
from fp8_inference_demo.forward import PREFILL_TOKENS, Cache, Forward
from fp8_inference_demo.sampling import Sampler, Sampling
from fp8_inference_demo.weights import Weights, pack
from model.config import load_config
from model.fp8.precision import DTYPES, check_fp8_gpu
from model.hf_folder import read_hf_folder

# Number of steps that the GPU runs ahead of the CPU. The extra steps are wasted when a row is finished.
STEPS_AHEAD = 8


@dataclass
class Timing:
    """Token counts and times in seconds for the prefill and for decoding, summed over all rows.

    The prefill time includes the first new token of each row.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0

    def add(self, other: Timing) -> None:
        for key, value in vars(other).items():
            setattr(self, key, getattr(self, key) + value)

    def line(self) -> str:
        prefill = (
            f"prefill {self.prefill_tokens} tokens at {self.prefill_tokens / self.prefill_s:,.1f} tokens/s"
        )
        if not self.decode_tokens:
            return prefill
        return f"{prefill}; decode {self.decode_tokens} tokens at {self.decode_tokens / self.decode_s:,.1f} tokens/s"


class Step:
    """Decoding step for a fixed number of rows.

    All tensors keep their addresses, so a CUDA graph can replay the step.
    """

    def __init__(self, forward: Forward, rows: int, sampling: Sampling):
        device, S = forward.weights.device, forward.cache.max_length
        self.forward, self.last = forward, S - 1
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)  # cache positions of `tokens`
        self.steps = torch.zeros(rows, dtype=torch.int64, device=device)  # number of new tokens so far
        self.history = torch.zeros(S, rows, dtype=torch.int64, device=device)
        self.sampler = Sampler(sampling, rows, S, forward.config.vocab_size, device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.counted: Counter[str] = Counter()  # number of matrix products of each kind in one step

    def take(self, logits_BV: torch.Tensor) -> None:
        """Draw and store the next token for each row and advance the positions.

        Stores -1 for a row whose logits are not finite.
        """
        do = self.forward.operations
        if self.sampler.likeliest and do is not reference:
            state = self.history, self.tokens, self.positions, self.steps
            return do.take_likeliest(logits_BV, *state, self.last)
        drawn = self.sampler.draw(logits_BV, self.steps)
        self.history.index_copy_(0, self.steps[:1], drawn[None])
        self.tokens.copy_(drawn.clamp(min=0))
        self.steps += 1
        self.positions.add_(1).clamp_(max=self.last)

    def _step(self) -> None:
        self.take(self.forward.decode(self.tokens, self.positions))

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            self.forward.ran.update(self.counted)
        else:
            self._step()

    def capture(self) -> None:
        """Capture the step as a CUDA graph. Call `Engine.prefill` afterwards, because capturing changes the state."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        before = self.forward.ran.copy()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.steps.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.forward.ran.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.counted = self.forward.ran.copy()
        self.forward.ran.clear()
        self.forward.ran.update(before)
        self.graph = graph


class Generation:
    """Iterable over the new tokens of a batch.

    Each step yields a list with one token per row, or None for a finished row.

    timing: times of the prefill and of decoding, updated during the iteration. full: set of rows that end because they
    reach the engine's max_length.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: int,
    ):
        self.engine, self.sampling, self.seeds, self.timing = engine, sampling, seeds, Timing()
        room = [engine.max_length - len(ids) for ids in rows]
        self.left = [min(max_new_tokens, space) for space in room]
        self.full = {row for row, space in enumerate(room) if space < max_new_tokens}
        self.rows = rows
        self._stopped: set[int] = set()

    def stop(self, row: int) -> None:
        """Stop generating tokens for the row with index `row`."""
        self._stopped.add(row)
        self.full.discard(row)

    def _done(self, row: int, index: int) -> bool:
        return row in self._stopped or index >= self.left[row]

    def _all_done(self, index: int) -> bool:
        return all(self._done(row, index) for row in range(len(self.rows)))

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the new tokens of each step.

        All generations of an engine share one KV cache, so finish one before you start the next.

        Raises InferenceError if the logits are not finite.
        """
        self.timing = Timing()
        self.step = self.engine.step(len(self.rows), self.sampling)
        self.step.sampler.begin(self.rows, self.seeds)
        start = time.perf_counter()
        self.engine.prefill(self.step, self.rows)
        first = self._read(self.step.history[:1].tolist()[0], 0)  # waits for the device
        self.timing.prefill_tokens = sum(map(len, self.rows))
        self.timing.prefill_s = time.perf_counter() - start
        yield first
        start = time.perf_counter()
        for index, tokens in self._steps():
            rows = self._read(tokens, index)
            self.timing.decode_tokens += sum(token is not None for token in rows)
            self.timing.decode_s = time.perf_counter() - start
            yield rows

    def _read(self, tokens: list[int], index: int) -> list[int | None]:
        out = [None if self._done(row, index) else token for row, token in enumerate(tokens)]
        if -1 in out:
            instead = (
                "Try --precision bf16, or another checkpoint."
                if self.engine.weights.fp8
                else "Try another checkpoint."
            )
            raise InferenceError(
                f"the logits of batch row {out.index(-1)} for new token {index} are not finite. The weights are "
                f"damaged, or the model diverged in training. {instead}",
                code="not_finite",
            )
        return out

    def _steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (step index, tokens of all rows) for each step after the prefill.

        On a GPU, several steps are launched before the tokens of the first step are read.
        """
        cuda = self.step.history.is_cuda
        pending: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()
        launched, end = 1, max(self.left)
        while True:
            while (
                launched < end
                and len(pending) * STEPS_AHEAD < (2 * STEPS_AHEAD if cuda else 1)
                and not self._all_done(launched)
            ):
                count = min(STEPS_AHEAD if cuda else 1, end - launched)
                for _ in range(count):
                    self.step.run()
                block = self.step.history[launched : launched + count]
                event = None
                if cuda:
                    pinned = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
                    block = pinned.copy_(block, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                pending.append((launched, block, event))
                launched += count
            if not pending:
                return
            first, block, event = pending.popleft()
            if event is not None:
                event.synchronize()
            for offset, tokens in enumerate(block.tolist()):
                if self._all_done(first + offset):
                    return
                yield first + offset, tokens


class Engine:
    """Loaded model with a KV cache for up to `batch_size` rows.

    Each row has up to `max_length` tokens, including the new tokens.
    """

    def __init__(self, weights: Weights, batch_size: int, max_length: int):
        """Allocate the KV cache.

        Raises InferenceError if `max_length` exceeds max_position_embeddings. Raises torch.OutOfMemoryError if the
        cache does not fit in memory.
        """
        self.config, self.weights = weights.config, weights
        self.batch_size, self.max_length = batch_size, max_length
        if max_length > self.config.max_position_embeddings:
            raise InferenceError(
                f"max_length {max_length} exceeds the model's max_position_embeddings "
                f"{self.config.max_position_embeddings}; use a smaller max_length",
                code="max_length",
                key="max_length",
            )
        self.cache = Cache(weights, batch_size, max_length)
        self.forward = Forward(weights, self.cache)
        self._steps: dict[tuple[int, Sampling], Step] = {}

    @classmethod
    def load(cls, folder: Path, precision: str, batch_size: int = 1, max_length: int = 2048) -> Self:
        """Load a model from a Hugging Face folder. precision: "fp8", "bf16" or "fp32".

        Raises:
            ValueError: the model type is not supported, or weights are missing or damaged.
            InferenceError: `max_length` exceeds max_position_embeddings.
            PrecisionError: the GPU does not support FP8.
        """
        if precision == "fp8":
            check_fp8_gpu()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = load_config(str(folder))
        return cls(
            pack(read_hf_folder(folder, config, DTYPES[precision]), config, precision, device),
            batch_size,
            max_length,
        )

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def generate(
        self, rows: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], max_new_tokens: int
    ) -> Generation:
        """Return the continuations of the prompts `rows` as an iterable that computes each step on demand.

        rows: token ids of each prompt. seeds: one seed per row.

        Raises InferenceError if there are no rows or more than `batch_size` rows, or if a row is empty or leaves no
        room for a new token.
        """
        if not 0 < len(rows) <= self.batch_size:
            raise InferenceError(
                f"the batch has {len(rows)} rows, but the engine was created for 1 to {self.batch_size} rows; change "
                "the number of prompts, or the engine's batch_size",
                code="row_count",
                key="batch_size",
            )
        for index, ids in enumerate(rows):
            if not 0 < len(ids) < self.max_length:
                problem = (
                    f"{len(ids)} tokens, but max_length ({self.max_length}) must also leave room for generated tokens; "
                    f"shorten the prompt to at most {self.max_length - 1} tokens, or increase max_length"
                    if len(ids)
                    else "no tokens; pass a prompt with at least one token, such as BOS"
                )
                raise InferenceError(f"row {index} has {problem}", code="row_length", key=f"row {index}")
        return Generation(self, rows, sampling, seeds, max_new_tokens)

    def step(self, rows: int, sampling: Sampling) -> Step:
        """Return the decoding step for this number of rows. On a GPU, the first call captures a CUDA graph."""
        key = (rows, sampling)
        if key not in self._steps:
            step = self._steps[key] = Step(self.forward, rows, sampling)
            if self.device.type == "cuda":
                with torch.no_grad():
                    step.capture()
        return self._steps[key]

    @torch.no_grad()
    def prefill(self, step: Step, rows: Sequence[Sequence[int]]) -> None:
        """Write the prompts into the KV cache and draw the first new token for each row."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        last = torch.tensor([len(tokens) - 1 for tokens in rows])
        ids, last = ids.to(self.device), last.to(self.device)
        at_once = max(1, PREFILL_TOKENS // longest)
        hidden = []
        for first in range(0, len(rows), at_once):
            x_BTH = self.forward.prefill(ids[first : first + at_once], first)
            wanted = last[first : first + at_once, None, None].expand(-1, -1, x_BTH.shape[2])
            hidden.append(x_BTH.gather(1, wanted)[:, 0])
        step.steps.zero_()
        step.take(self.forward.logits(torch.cat(hidden)))
        step.positions.copy_(last + 1)

    def report(self) -> list[str]:
        """Return lines for the log: kernels, device, memory use, and number of matrix products of each kind."""
        kinds = {
            "fp8 weights": "matrix products used FP8 weights and bf16 activations",
            "fp8 gemm": "matrix products used FP8 weights and FP8 activations",
        }
        how = "plain torch" if self.forward.operations is reference else "Triton kernels"
        lines = [
            f"{count} {kinds.get(kind, f'matrix products used {kind}')}"
            for kind, count in self.forward.ran.items()
        ]
        weights, cache = (f"{n / 2**30:.3g} GiB" for n in (self.weights.nbytes, 2 * self.cache.keys.nbytes))
        return [f"{how} on {self.device}; weights {weights}, KV cache {cache}", *lines]
