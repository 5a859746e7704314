"""Compute the order of training samples: the source and the sample at each position of the data stream.

The order is a pure function of the seed, the manifests, the sequence length, the mixture and the samples drawn so far
from each source, which a checkpoint contains (`RunState.sources`). `Mixture` chooses the source of each sample.
`permute` shuffles the samples of a source in each epoch, without a table of the size of the corpus. `next_position`
finds the start of a step in a run that skips samples after a rollback. The configuration key data.weights is one of

    null                                          weights in proportion to the number of tokens in the sources
    {"web": 0.7, "code": 0.3}                     constant weights
    [{"until_tokens": 10^10, "weights": {...}},   weights in phases; the last phase has no end. A source without a
     {"weights": {...}}]                          weight is not drawn in the phase.
"""

import bisect
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from train.data.format import DataError

FEISTEL_ROUNDS = 6


def next_position(position: int, count: int, skipped: list[list[int]]) -> int:
    """Return the position of the first sample of the next step, after any skipped samples.

    Args:
        position: number of samples consumed so far.
        count: number of samples in the step. The step does not overlap a skipped range.
        skipped: position ranges [first, end) that rollbacks skip (`skipped_samples` in a checkpoint).
    """
    for first, end in sorted(skipped):
        if position < end and first < position + count:
            position = end
    return position


# ---------------------------------------------------------------- the configured weights


@dataclass(frozen=True, kw_only=True)
class MixturePhase:
    """One phase of a data mixture, configured in data.weights.

    Attributes:
        weights: weight of each source, by name.
        until_tokens: number of training tokens (samples * sequence length) after which the next phase begins. None only
            in the last phase.
    """

    weights: dict[str, float]
    until_tokens: int | None = None


Weights = Mapping[str, float] | Sequence[MixturePhase]


def weight_problems(weights: Weights, names: Sequence[str]) -> list[str]:
    """Check the configured weights, and return a list of error messages.

    Args:
        names: names of the configured sources.
    """
    if not (phases := _phases(weights)):
        return [
            "data.weights is empty; set weights, or null to weight the sources in proportion to their size"
        ]
    problems, begin = list[str](), 0
    for index, phase in enumerate(phases):
        what = "data.weights" if isinstance(weights, Mapping) else f"data.weights[{index}]"
        for name, weight in phase.weights.items():
            if name not in names:
                problems.append(
                    f"{what}: there is no source named {name!r}; data.sources contains {', '.join(sorted(names))}"
                )
            if not (math.isfinite(weight) and weight >= 0):
                problems.append(
                    f"{what}: the weight of {name!r} is {weight}, but must be finite and at least 0"
                )
        if not any(weight > 0 for weight in phase.weights.values()):
            problems.append(f"{what}: no source has a weight above 0; set at least one weight above 0")
        is_last, end = index == len(phases) - 1, phase.until_tokens
        if is_last != (end is None) or (end is not None and end <= begin):
            rule = f"must be set to more than {begin}, the number of tokens before this phase; it is {end}"
            problems.append(
                f"{what}: until_tokens {'must not be set in the last phase' if is_last else rule}"
            )
        begin = end or begin
    problems += [
        f"data.weights: the source {name!r} has no weight above 0; set its weight, or remove the source"
        for name in names
        if not any(phase.weights.get(name, 0) > 0 for phase in phases)
    ]
    return problems


def _phases(weights: Weights) -> list[MixturePhase]:
    return [MixturePhase(weights=dict(weights))] if isinstance(weights, Mapping) else list(weights)


# ---------------------------------------------------------------- the source of each sample


@dataclass(frozen=True)
class Drawn:
    """The numbers of samples drawn from the sources of a mixture before a position in the sample order.

    Attributes:
        position: number of samples drawn from all sources, including samples that rollbacks skip.
        samples: number of samples drawn from each source.
        deficits: number of samples by which each source is behind its share (negative: ahead).
    """

    position: int
    samples: tuple[int, ...]
    deficits: tuple[float, ...]


class Mixture:
    """The order in which samples are drawn from several sources.

    Each sample comes from the source with the largest deficit. The deficit of a source is the sum of its weights over
    all samples of the mixture so far, minus the number of samples drawn from the source.

    Args:
        weights: weights for which `weight_problems` returns no problem, or the number of windows in each source.
        names: names of the sources.
        seq_length: tokens per sample.

    Attributes:
        starts: position of the first sample in each phase.
        weights: weights in each phase, normalized to a sum of 1, in the order of `names`.

    Raises:
        DataError: if a phase has no samples.
    """

    def __init__(self, weights: Weights, names: Sequence[str], seq_length: int) -> None:
        phases = _phases(weights)
        self.starts = [0] + [-(-(phase.until_tokens or 0) // seq_length) for phase in phases[:-1]]
        for index, (start, stop) in enumerate(itertools.pairwise(self.starts)):
            if start == stop:
                raise DataError(
                    f"data.weights[{index}] (phase {index + 1} of {len(phases)}): no sample of {seq_length} tokens "
                    f"begins in this phase; raise until_tokens ({phases[index].until_tokens}), or remove the phase",
                    code="stage_without_sample",
                    key=f"data.weights[{index}]",
                )
        shares = [[phase.weights.get(name, 0) for name in names] for phase in phases]
        self.weights = [[share / math.fsum(each) for share in each] for each in shares]

    def weights_at(self, position: int) -> list[float]:
        """Return the weights of all sources for the sample at `position`. The sum of the weights is 1."""
        return self.weights[bisect.bisect_right(self.starts, position) - 1]

    def draw(self, drawn: Drawn, count: int) -> tuple[np.ndarray, Drawn]:
        """Choose the sources of the next `count` samples.

        Args:
            drawn: the numbers of samples drawn so far.
            count: number of samples to draw.

        Returns:
            The index of the source of each sample, int64 [count], and the updated `drawn`.
        """
        order, deficits, end = np.empty(count, dtype=np.int64), list(drawn.deficits), drawn.position + count
        for number in range(count):
            weights = self.weights_at(drawn.position + number)
            deficits = [deficit + weight for deficit, weight in zip(deficits, weights, strict=True)]
            source = max((k for k, weight in enumerate(weights) if weight), key=deficits.__getitem__)
            deficits[source] -= 1
            order[number] = source
        totals = np.bincount(order, minlength=len(deficits)) + drawn.samples
        return order, Drawn(end, tuple(totals.tolist()), tuple(deficits))


# ---------------------------------------------------------------- the samples of a source


def spread(count: int, total: int) -> np.ndarray:
    """Return `count` evenly spaced numbers from range(total), int64 [count]."""
    return (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * max(count, 1))


def permutation_key(seed: int, source: str, epoch: int) -> np.ndarray:
    """Return the keys with which `permute` shuffles a source in one epoch, uint64 [FEISTEL_ROUNDS]."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Apply a keyed random permutation of range(size) to indices.

    A Feistel network permutes a range whose size is the next power of two. A result outside range(size) is permuted
    again until it is inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: values in range(size), int64 [n].
        key: keys from `permutation_key`.

    Returns:
        The permuted values, int64 [n].
    """
    bits = max(2, (size - 1).bit_length())
    value = _feistel(index.astype(np.uint64), bits, key)
    outside = np.flatnonzero(value >= size)
    while len(outside):
        value[outside] = _feistel(value[outside], bits, key)
        outside = outside[value[outside] >= size]
    return value.astype(np.int64)


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    low, high = value & low_mask, value >> np.uint64(low_bits)
    for number in range(0, FEISTEL_ROUNDS, 2):
        low ^= _mix(high, key[number]) & low_mask
        high ^= _mix(low, key[number + 1]) & high_mask
    return (high << np.uint64(low_bits)) | low


def _mix(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hash 64-bit values with the finalizer of splitmix64 (Steele et al., "Fast splittable pseudorandom number
    generators", 2014).
    """
    value = value + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
