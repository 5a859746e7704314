"""Which sample comes at which place: pure functions of a position, with no state and no table of the corpus' size.

`Mixture` says from which source sample n of the stream comes and how many came from it before; `permute` shuffles the
samples of one source and epoch. Both answer for any position at once, so a resume costs nothing. `next_position` is
where a step begins in a run that skips samples after a rollback.
"""

import bisect
import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Weights without a common denominator up to this are rounded to multiples of its inverse (a drift of at most one
# sample in two million). It bounds the tables of a mixture: 6 bytes times this, a stage.
MAX_PERIOD = 1_000_000
FEISTEL_ROUNDS = 6


def next_position(position: int, count: int, skipped: list[list[int]]) -> int:
    """Return the first position, `position` or later, where a step of `count` samples uses none of the `skipped` ones.

    Args:
        skipped: ranges [first, end) of positions that rollbacks removed (`skipped_samples` of a checkpoint).
    """
    for first, end in sorted(skipped):
        if position < end and first < position + count:
            position = end
    return position


class Mixture:
    """Exact quotas: after any n samples each of K sources has given its target to within 1 - 1/(2K - 2) samples.

    The target is n * weight, and with stages the sum over the stages of their samples * weight. The order is that of
    the earliest deadline. With d = 1/(2K - 2), the j-th sample of a source may come once its target has reached
    j - 1 + d and is due before it exceeds j - d; of those that may come, the one due first does. None is ever late,
    for weights that change too (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980), where a
    deadline beyond a change is that of the weights to come. With rational weights the order of a stage repeats after
    their common denominator, but for its end, where such deadlines count, and perhaps its first period, which takes
    up what the stage before left: so these are all there is to keep.

    Args: `weights` of the first stage, one a source, 0 allowed where another stage has more; `later` stages, each with
    its first sample, increasing and above 0, and its weights.

    Attributes: `starts`, the first sample of each stage; `weights` in effect in each stage, which sum to 1.

    Raises:
        ValueError: a weight so small that no period up to `max_period` has a sample of its source.
    """

    def __init__(
        self,
        weights: Sequence[float],
        max_period: int = MAX_PERIOD,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        stages = [_quotas(each, max_period) for each in (weights, *(each for _, each in later))]
        self.starts = [0, *(start for start, _ in later)]
        self.weights = [[quota / sum(quotas) for quota in quotas] for quotas in stages]
        self._segments: list[_Segment] = []
        targets, given = _Targets(self.starts, stages), [0] * len(weights)
        for stage in range(len(stages)):
            given = self._add_stage(targets, stage, given)

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For samples start..start+count-1: their sources [count] and their ordinals within the source [count]."""
        parts, stop = [], start + count
        index = bisect.bisect_right(self._segments, start, key=lambda segment: segment.start) - 1
        while start < stop:
            last = index + 1 == len(self._segments)
            end = stop if last else min(stop, self._segments[index + 1].start)
            parts.append(self._segments[index].locate(start, end))
            start, index = end, index + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _add_stage(self, targets: "_Targets", stage: int, given: list[int]) -> list[int]:
        """Append the segments of a stage; `given` and the answer: samples of each source before and after it."""
        start, stop = self.starts[stage], self.starts[stage + 1] if stage + 1 < len(self.starts) else None
        smallest = min(quota for quota in targets.quotas[stage] if quota)
        # From here on a sample that may come can have its deadline in the next stage.
        settled = None if stop is None else max(start, stop - sum(targets.quotas[stage]) // smallest - 2)
        for part in targets.periods(stage, list(given), settled):
            if part:
                self._segments.append(_Segment.of(start, part, given))
                start += len(part)
                given = self._segments[-1].given(start)
        if stop is None or settled is None:
            return given
        if start < settled:  # the last part repeats until there
            given = self._segments[-1].given(settled)
        self._segments.append(_Segment.of(settled, targets.order(stage, list(given), settled, stop), given))
        return self._segments[-1].given(stop)


@dataclass(frozen=True)
class _Segment:
    """From sample `start` on, `source` [length] over and over, until the next segment begins.

    `rank` [length] counts the samples of the same source before in the segment, `quotas` [K] those of one repetition,
    and `before` [K] what the sources had given when the segment began.
    """

    start: int
    source: np.ndarray
    rank: np.ndarray
    quotas: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, start: int, order: list[int], given: list[int]) -> "_Segment":
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
        """Samples that each source has given before sample `position` of the run."""
        cycles, place = divmod(position - self.start, len(self.source))
        rest = np.bincount(self.source[:place], minlength=len(self.quotas))
        return [int(n) for n in self.before + cycles * self.quotas + rest]


class _Targets:
    """What each source should have given after n samples of the run, exact and linear within a stage.

    In stage s that of source k is (offset[s][k] + slope[s][k] * n) / unit[s], all whole numbers.
    """

    def __init__(self, starts: list[int], quotas: list[list[int]]) -> None:
        self.starts, self.quotas, self.sources = starts, quotas, len(quotas[0])
        self.slope, self.offset, self.unit = [], [], []
        reached = [Fraction(0)] * self.sources
        for stage, parts in enumerate(quotas):
            period, common = sum(parts), math.lcm(*(value.denominator for value in reached))
            slope = [quota * common for quota in parts]
            self.slope.append(slope)
            self.offset.append(
                [int(r * common) * period - starts[stage] * s for r, s in zip(reached, slope, strict=True)]
            )
            self.unit.append(common * period)
            if stage + 1 < len(starts):
                samples = starts[stage + 1] - starts[stage]
                reached = [r + Fraction(q * samples, period) for r, q in zip(reached, parts, strict=True)]

    def release(self, stage: int, source: int, ordinal: int) -> float:
        """The first sample, counted from 1, at which the ordinal-th of a source may come, as seen in `stage`."""
        scale = 2 * self.sources - 2  # 1/d
        level = self.unit[stage] * (scale * (ordinal - 1) + 1) - self.offset[stage][source] * scale
        if slope := self.slope[stage][source]:
            return -(-level // (scale * slope))
        return 0 if level <= 0 else math.inf

    def due(self, stage: int, source: int, ordinal: int) -> float:
        """The last sample, counted from 1, at which it may come."""
        scale = 2 * self.sources - 2
        for s in range(stage, len(self.starts)):
            if slope := self.slope[s][source]:
                level = self.unit[s] * (scale * ordinal - 1) - self.offset[s][source] * scale
                sample = level // (scale * slope)
                if s + 1 == len(self.starts) or sample < self.starts[s + 1]:
                    return sample
        return math.inf

    def periods(self, stage: int, given: list[int], stop: int | None) -> tuple[list[int], list[int]]:
        """The order of a stage from its start, as (what comes once, what repeats after it); each may be empty.

        All of it comes once if `stop` is reached before anything repeats. `given` is counted up.
        """
        start, quotas = self.starts[stage], self.quotas[stage]
        period, order = sum(quotas), list[int]()
        # what each source is ahead of its quotas at the end of a period -> where that is in the order
        seen: dict[tuple[int, ...], int] = {}
        ahead = tuple(given)
        while ahead not in seen:
            seen[ahead] = len(order)
            now = start + len(order)
            end = now + period if stop is None else min(now + period, stop)
            order += self.order(stage, given, now, end)
            if end < now + period:
                return order, []
            cycles = len(order) // period
            ahead = tuple(n - cycles * quota for n, quota in zip(given, quotas, strict=True))
        return order[: seen[ahead]], order[seen[ahead] :]

    def order(self, stage: int, given: list[int], start: int, stop: int) -> list[int]:
        """The sources of samples start..stop-1, which are of `stage`; `given`, before them, is counted up."""
        if self.sources == 1:
            given[0] += stop - start
            return [0] * (stop - start)
        waiting = [(self.release(stage, source, n + 1), source) for source, n in enumerate(given)]
        heapq.heapify(waiting)
        ready: list[tuple[float, int]] = []  # (due, source)
        order = []
        for sample in range(start + 1, stop + 1):
            while waiting and waiting[0][0] <= sample:
                _, source = heapq.heappop(waiting)
                heapq.heappush(ready, (self.due(stage, source, given[source] + 1), source))
            _, source = heapq.heappop(ready)
            order.append(source)
            given[source] += 1
            heapq.heappush(waiting, (self.release(stage, source, given[source] + 1), source))
        return order


def _quotas(weights: Sequence[float], max_period: int) -> list[int]:
    """Whole numbers in the proportion of the weights: samples of each source in one period."""
    # 0.1 means one tenth, not its nearest binary fraction
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
                f"weight {weight} is below one in {max_period} of the sum of the weights; raise it or leave the "
                "source out"
            )
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


def spread(count: int, total: int) -> np.ndarray:
    """Choose `count` of range(total) at even distances; all of them when `count` is `total`. Returns int64 [count]."""
    return (2 * np.arange(count, dtype=np.int64) + 1) * total // (2 * max(count, 1))


def permutation_key(seed: int, source: str, epoch: int) -> np.ndarray:
    """Round keys [FEISTEL_ROUNDS] uint64 for one source and epoch."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """A keyed permutation of range(size), applied to index [n] int64 with values in that range.

    A Feistel network permutes the smallest power of two that holds the range, and what falls outside is put through
    it again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
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
    """The finalizer of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    value = value + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
