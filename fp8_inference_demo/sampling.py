"""Sample the next token with temperature, top-k, top-p, min-p and repetition penalty.

A CUDA graph can capture the sampling, because all torch operations have fixed shapes, do not synchronize, and do not
use a random generator on the CPU.

Each random number is a hash of the row's seed and the index of the new token. It therefore does not depend on the
device or on the other rows in the batch, and it changes at each replay of a CUDA graph.

Shapes: B rows (samples), V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Integer weight of the most likely token. The weights of the other tokens are proportional to their probabilities.
# Integer sums do not depend on the order of the terms, and sums over 2**21 tokens are exact in float64.
WEIGHT_ONE = 2.0**32


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    As in transformers, the options are applied in this order: repetition_penalty, temperature, top_k, top_p, min_p.
    temperature 0 always selects the most likely token. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 have no
    effect.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0  # Holtzman et al. 2020, arXiv:1904.09751
    min_p: float = 0.0  # Nguyen et al. 2024, arXiv:2407.01082
    repetition_penalty: float = 1.0  # Keskar et al. 2019, arXiv:1909.05858


def row_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed for one sample of a prompt, from 0 to 2**63 - 1.

    seed: the --seed option. prompt, sample: indices of the prompt and of the sample.
    The result does not depend on the batch size.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mix(x: Tensor) -> Tensor:
    """Hash each int64 element with the output function of SplitMix64, which is a bijection.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators". Products wrap around. The masks turn
    arithmetic right shifts into logical right shifts.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


def uniform(keys: Tensor, steps: Tensor) -> Tensor:
    """Return uniform random float64 numbers in [0, 1).

    keys: the rows' seeds hashed with `mix`, int64. steps: indices of the new tokens, int64. The two shapes broadcast.
    """
    bits = mix(keys + (steps + 1) * -0x61C8864680B583EB)
    return (bits >> 11 & (1 << 53) - 1).double() * 2.0**-53


class Sampler:
    """Sampler for up to `steps` new tokens in each of `rows` rows.

    The sampler's tensors keep their addresses. Replaying a CUDA graph that captured `draw` therefore uses the values
    set by the last call to `begin`.
    """

    def __init__(
        self, sampling: Sampling, rows: int, steps: int, vocab_size: int, device: torch.device | str
    ):
        self.sampling = sampling
        # [steps, rows]: computed in advance, because a dozen small kernels in each step would be expensive
        drawing = steps if sampling.temperature > 0 else 0
        self.uniform = torch.zeros(drawing, rows, dtype=torch.float64, device=device)
        penalised = sampling.repetition_penalty != 1
        # [rows, V]: True for each token in the prompt or in the new text
        self.seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if penalised else None

    def begin(self, rows: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Prepare to sample continuations for a batch of prompts.

        rows: token ids of the prompts. The repetition penalty also applies to these tokens. seeds: one seed per prompt.
        """
        keys = mix(torch.tensor(seeds, dtype=torch.int64, device=self.uniform.device))
        steps = torch.arange(len(self.uniform), device=keys.device)
        self.uniform[:, : len(seeds)] = uniform(keys, steps[:, None])
        if self.seen is None:
            return
        self.seen.zero_()
        for seen, ids in zip(
            self.seen, rows, strict=False
        ):  # the sampler may have more rows than there are prompts
            seen[torch.tensor(ids, device=seen.device)] = True

    @property
    def likeliest(self) -> bool:
        """Return whether `draw` always returns the most likely token."""
        return self.sampling.temperature == 0 and self.seen is None

    def draw(self, logits_BV: Tensor, steps_B: Tensor) -> Tensor:
        """Sample the next token for each of B rows. Return int64 [B].

        logits_BV: [B, V]. steps_B: index of the new token in each row, below `steps`, int64 [B] on the device.

        The token is -1 if a logit of the row is NaN or +inf, or if all logits are -inf.
        """
        rows, logits = len(logits_BV), logits_BV.float()
        if self.seen is not None:
            penalty = self.sampling.repetition_penalty
            said = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self.seen[:rows], said, logits)
        best, token = logits.max(-1, keepdim=True)  # max returns NaN if any logit is NaN
        if self.sampling.temperature > 0:
            scores = (logits - best) / self.sampling.temperature
            token = self._draw_token(scores, self.uniform[:, :rows].gather(0, steps_B[None]).T)
        if self.seen is not None:
            self.seen[:rows].scatter_(1, token, True)
        return torch.where(best.abs() < math.inf, token, -1)[:, 0]

    def _draw_token(self, scores: Tensor, uniform_B1: Tensor) -> Tensor:
        """Sample one token per row. Return int64 [B, 1].

        scores: logits [B, V], shifted so that the maximum of each row is 0, and divided by the temperature.
        uniform_B1: random numbers in [0, 1), float64 [B, 1].
        """
        limits, weights = self.sampling, _weights(scores)
        threshold = torch.full_like(uniform_B1, -math.inf, dtype=torch.float32)
        best_first = None
        if limits.top_k:
            # as in transformers, keep all tokens that have the same score as the last kept token
            best_first = scores.topk(min(limits.top_k, scores.shape[-1])).values
            threshold = best_first[:, -1:]
        if limits.top_p < 1:
            if best_first is None:
                best_first = scores.sort(descending=True).values
            total = torch.where(scores >= threshold, weights, 0).sum(-1, keepdim=True)
            sums = _weights(best_first).cumsum(-1)
            inside = sums - _weights(best_first) < total.double() * limits.top_p
            threshold = best_first.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
        if limits.min_p:
            threshold = threshold.clamp(min=math.log(limits.min_p))
        sums = torch.where(scores >= threshold, weights, 0).cumsum(-1)
        target = (uniform_B1 * sums[:, -1:].double()).long()
        return torch.searchsorted(sums, target, right=True).clamp(max=scores.shape[-1] - 1)


def _weights(scores: Tensor) -> Tensor:
    """Return exp(scores) in units of 2**-32 as int64.

    These are the probabilities relative to the probability of a token with score 0.
    """
    return (scores.exp() * WEIGHT_ONE).long()
