"""Compute the order of training samples: the source and the sample at each position of the data stream.

The order is a pure function of the position. It needs no state and no table of the size of the corpus, so resuming is
fast. `mix` builds a `Mixture` from the configured weights. The mixture gives the source of each sample, and the number
of earlier samples from that source. `permute` shuffles the samples of a source in each epoch. `next_position` finds the
start of a step in a run that skips samples after a rollback. The configuration key data.weights is one of

    null                                          weights in proportion to the number of tokens in the sources
    {"web": 0.7, "code": 0.3}                     constant weights
    [{"until_tokens": 10^10, "weights": {...}},   weights in phases; the last phase has no end. A source without a
     {"weights": {...}}]                          weight has weight 0, but may still reach its quota (see Mixture).
"""

import bisect
import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from train.data.format import DataError

# Largest common denominator of the weights in a mixture. Other weights are rounded to multiples of 1 / MAX_PERIOD,
# which shifts at most one sample in two million. The tables of a mixture need up to 6 bytes * MAX_PERIOD per phase.
MAX_PERIOD = 1_000_000
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
            problems.append(
                f"{what}: until_tokens is {end}, but must be greater than {begin}, the token count at which the phase "
                "begins. Every phase except the last must set until_tokens; the last phase must omit it"
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


def mix(weights: Weights, names: Sequence[str], seq_length: int) -> "Mixture":
    """Build the mixture of data sources from the configured weights.

    Args:
        weights: weights that passed `weight_problems`, or the number of windows in each source.
        names: names of the sources, in the order of their indices in the mixture.
        seq_length: tokens per sample.

    Raises:
        DataError: if a weight is too small, or a phase has no samples.
    """
    phases = _phases(weights)
    starts = [0] + [-(-(phase.until_tokens or 0) // seq_length) for phase in phases[:-1]]
    for index, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == stop:
            raise DataError(
                f"data.weights[{index}] (phase {index + 1} of {len(phases)}): no sample of {seq_length} tokens "
                f"begins before until_tokens {phases[index].until_tokens}; raise until_tokens or remove the phase",
                code="stage_without_sample",
                key=f"data.weights[{index}]",
            )
    shares = [[phase.weights.get(name, 0) for name in names] for phase in phases]
    try:
        return Mixture(shares[0], later=list(zip(starts[1:], shares[1:], strict=True)))
    except ValueError as error:
        raise DataError(
            f"data.weights: {error}. By default, the weight of each source is its number of samples",
            code="weight_too_small",
            key="data.weights",
        ) from error


# ---------------------------------------------------------------- the source of each sample


class Mixture:
    """The order in which K sources are interleaved, with exact quotas.

    After any number of samples n, the number of samples from each source differs from its target by at most 1 - 1/(2K -
    2). The target is n * weight. With several phases, it is the sum of samples * weight over the phases.

    The next sample is taken from the source with the earliest deadline. With d = 1/(2K - 2), sample j of a source is
    released when the target of the source reaches j - 1 + d, and is due before the target exceeds j - d. No sample is
    late, even if the weights change (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). A
    deadline in a later phase is computed with the weights of that phase.

    With rational weights, the order within a phase repeats, with the common denominator of the weights as its period.
    There are two exceptions. The first period may compensate for the previous phase, and the end of the phase depends
    on deadlines in the next phase. Only these two parts and one period are stored.

    Args:
        weights: weights of the first phase, one per source. A weight of 0 is allowed if the source has a higher weight
            in another phase.
        max_period: maximum of the common denominator.
        later: the first sample (increasing, above 0) and the weights of each later phase.

    Attributes:
        starts: first sample of each phase.
        weights: weights in each phase, normalized to a sum of 1.

    Raises:
        ValueError: if a weight is so small that no period up to `max_period` contains a sample from its source.
    """

    def __init__(
        self,
        weights: Sequence[float],
        max_period: int = MAX_PERIOD,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        phases = [_quotas(each, max_period) for each in (weights, *(each for _, each in later))]
        self.starts = [0, *(start for start, _ in later)]
        self.weights = [[quota / sum(quotas) for quota in quotas] for quotas in phases]
        self._segments: list[_Segment] = []
        targets, given = _Targets(self.starts, phases), [0] * len(weights)
        for phase in range(len(phases)):
            given = self._add_phase(targets, phase, given)

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Locate samples start..start+count-1 in their sources.

        Returns:
            The index of the source of each sample, and the number of earlier samples from that source, [count] each.
        """
        parts, stop = [], start + count
        index = bisect.bisect_right(self._segments, start, key=lambda segment: segment.start) - 1
        while start < stop:
            last = index + 1 == len(self._segments)
            end = stop if last else min(stop, self._segments[index + 1].start)
            parts.append(self._segments[index].locate(start, end))
            start, index = end, index + 1
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _add_phase(self, targets: "_Targets", phase: int, given: list[int]) -> list[int]:
        """Compute the segments of one phase and append them to the stored order.

        Args:
            given: number of samples from each source before this phase.

        Returns:
            The number of samples from each source before the next phase.
        """
        start, stop = self.starts[phase], self.starts[phase + 1] if phase + 1 < len(self.starts) else None
        smallest = min(quota for quota in targets.quotas[phase] if quota)
        # From sample `settled`, a released sample can have its deadline in the next phase.
        settled = None if stop is None else max(start, stop - sum(targets.quotas[phase]) // smallest - 2)
        for part in targets.periods(phase, list(given), settled):
            if part:
                self._segments.append(_Segment.from_order(start, part, given))
                start += len(part)
                given = self._segments[-1].given(start)
        if stop is None or settled is None:
            return given
        if start < settled:  # the last part repeats until `settled`
            given = self._segments[-1].given(settled)
        self._segments.append(
            _Segment.from_order(settled, targets.order(phase, list(given), settled, stop), given)
        )
        return self._segments[-1].given(stop)


@dataclass(frozen=True)
class _Segment:
    """A part of the sample order in which a sequence of K sources repeats until the next segment begins.

    Attributes:
        start: first sample of the segment.
        source: the repeated sequence of source indices, [length].
        rank: number of earlier samples from the same source within a repetition, [length].
        quotas: number of samples from each source in a repetition, [K].
        before: number of samples from each source before the segment, [K].
    """

    start: int
    source: np.ndarray
    rank: np.ndarray
    quotas: np.ndarray
    before: np.ndarray

    @classmethod
    def from_order(cls, start: int, order: list[int], given: list[int]) -> "_Segment":
        source, rank = np.array(order, dtype=np.uint16), np.empty(len(order), dtype=np.uint32)
        quotas = np.bincount(source, minlength=len(given)).astype(np.int64)
        for index, quota in enumerate(quotas):
            rank[source == index] = np.arange(quota)
        return cls(start, source, rank, quotas, np.array(given, dtype=np.int64))

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        cycle, place = np.divmod(np.arange(start, stop, dtype=np.int64) - self.start, len(self.source))
        source = self.source[place].astype(np.int64)
        return source, self.before[source] + cycle * self.quotas[source] + self.rank[place]

    def given(self, position: int) -> list[int]:
        """Return the number of samples from each source before position `position` in the order."""
        cycles, place = divmod(position - self.start, len(self.source))
        rest = np.bincount(self.source[:place], minlength=len(self.quotas))
        return [int(n) for n in self.before + cycles * self.quotas + rest]


class _Targets:
    """Exact target for the number of samples from each source after n samples. The target is linear within a phase.

    In phase s, the target for source k is (offset[s][k] + slope[s][k] * n) / unit[s], where all values are integers.
    """

    def __init__(self, starts: list[int], quotas: list[list[int]]) -> None:
        self.starts, self.quotas, self.sources = starts, quotas, len(quotas[0])
        self.slope, self.offset, self.unit = [], [], []
        reached = [Fraction(0)] * self.sources
        for phase, parts in enumerate(quotas):
            period, common = sum(parts), math.lcm(*(value.denominator for value in reached))
            slope = [quota * common for quota in parts]
            self.slope.append(slope)
            self.offset.append(
                [int(r * common) * period - starts[phase] * s for r, s in zip(reached, slope, strict=True)]
            )
            self.unit.append(common * period)
            if phase + 1 < len(starts):
                samples = starts[phase + 1] - starts[phase]
                reached = [r + Fraction(q * samples, period) for r, q in zip(reached, parts, strict=True)]

    def release(self, phase: int, source: int, ordinal: int) -> float:
        """Return the earliest position (counted from 1) at which sample `ordinal` of a source may be placed.

        The target of the source is computed with the weights of `phase`.
        """
        scale = 2 * self.sources - 2  # 1/d, see Mixture
        level = self.unit[phase] * (scale * (ordinal - 1) + 1) - self.offset[phase][source] * scale
        if slope := self.slope[phase][source]:
            return -(-level // (scale * slope))
        return 0 if level <= 0 else math.inf

    def due(self, phase: int, source: int, ordinal: int) -> float:
        """Return the latest position (counted from 1) at which sample `ordinal` of a source may be placed."""
        scale = 2 * self.sources - 2
        for s in range(phase, len(self.starts)):
            if slope := self.slope[s][source]:
                level = self.unit[s] * (scale * ordinal - 1) - self.offset[s][source] * scale
                sample = level // (scale * slope)
                if s + 1 == len(self.starts) or sample < self.starts[s + 1]:
                    return sample
        return math.inf

    def periods(self, phase: int, given: list[int], stop: int | None) -> tuple[list[int], list[int]]:
        """Compute the order of sources in a phase, up to the first repetition.

        Args:
            given: number of samples from each source before the phase, updated in place.
            stop: position at which to stop, or None.

        Returns:
            The source of each sample before the repeated part, and of each sample in the repeated part. The repeated
            part is empty if `stop` is reached first.
        """
        start, quotas = self.starts[phase], self.quotas[phase]
        period, order = sum(quotas), list[int]()
        # Maps the lead of each source over its quotas at the end of a period to the position in the order.
        seen: dict[tuple[int, ...], int] = {}
        ahead = tuple(given)
        while ahead not in seen:
            seen[ahead] = len(order)
            now = start + len(order)
            end = now + period if stop is None else min(now + period, stop)
            order += self.order(phase, given, now, end)
            if end < now + period:
                return order, []
            cycles = len(order) // period
            ahead = tuple(n - cycles * quota for n, quota in zip(given, quotas, strict=True))
        return order[: seen[ahead]], order[seen[ahead] :]

    def order(self, phase: int, given: list[int], start: int, stop: int) -> list[int]:
        """Return the sources of samples start..stop-1, which are all in `phase`.

        Args:
            given: number of samples from each source before `start`, updated in place.
        """
        if self.sources == 1:
            given[0] += stop - start
            return [0] * (stop - start)
        waiting = [(self.release(phase, source, n + 1), source) for source, n in enumerate(given)]
        heapq.heapify(waiting)
        ready: list[tuple[float, int]] = []  # (due, source)
        order = []
        for sample in range(start + 1, stop + 1):
            while waiting and waiting[0][0] <= sample:
                _, source = heapq.heappop(waiting)
                heapq.heappush(ready, (self.due(phase, source, given[source] + 1), source))
            _, source = heapq.heappop(ready)
            order.append(source)
            given[source] += 1
            heapq.heappush(waiting, (self.release(phase, source, given[source] + 1), source))
        return order


def _quotas(weights: Sequence[float], max_period: int) -> list[int]:
    """Convert weights to the number of samples from each source in one period of the order."""
    # Convert through str, so that a weight of 0.1 is exactly one tenth.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= max_period:
        return [int(share * period) for share in shares]
    quotas = [int(share * max_period) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (quotas[k] - shares[k] * max_period, k))
    for index in by_remainder[: max_period - sum(quotas)]:
        quotas[index] += 1
    for weight, quota in zip(weights, quotas, strict=True):
        if weight and not quota:
            raise ValueError(
                f"weight {weight} is less than 1/{max_period} of the sum of the weights; raise the weight or remove "
                "the source"
            )
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


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
