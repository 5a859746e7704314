"""Which sample comes at which place: pure functions of a position, with no state and no table of the corpus' size.

`Mixture` says from which source sample n of the stream comes and how many came from it before; `permute` shuffles the
samples of one source and epoch. Both answer for any position at once, so a resume costs nothing.
"""

import hashlib
import heapq
import math
from fractions import Fraction

import numpy as np

# Weights without a common denominator up to this are rounded to multiples of its inverse (a drift of at most one
# sample in two million). It bounds the tables of a mixture: 6 bytes times this.
MAX_PERIOD = 1_000_000
FEISTEL_ROUNDS = 6


class Mixture:
    """Exact quotas: after n samples, of K sources each has given n * its weight to within 1 - 1/(2K - 2), for every n.

    The order is that of the earliest deadline. With d = 1/(2K - 2), the j-th sample of a source of weight w may come
    once n * w has reached j - 1 + d and is due before n * w exceeds j - d; of those that may come, the one due first
    does. None is ever late (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). With
    rational weights the order repeats after their common denominator, so one period is all there is to keep.

    Attributes: `weights`, those in effect, which sum to 1; `period` in samples.
    """

    def __init__(self, weights: list[float] | list[int], max_period: int = MAX_PERIOD) -> None:
        self.quotas = _quotas(weights, max_period)
        self.period = sum(self.quotas)
        self.weights = [quota / self.period for quota in self.quotas]
        self._source = np.array(_schedule(self.quotas), dtype=np.uint16)
        self._rank = np.empty(self.period, dtype=np.uint32)
        for index, quota in enumerate(self.quotas):
            self._rank[self._source == index] = np.arange(quota)

    def locate(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For samples start..start+count-1: their sources [count] and their ordinals within the source [count]."""
        cycle, place = np.divmod(np.arange(start, start + count, dtype=np.int64), self.period)
        source = self._source[place].astype(np.int64)
        return source, cycle * np.array(self.quotas, dtype=np.int64)[source] + self._rank[place]


def _quotas(weights: list[float] | list[int], max_period: int) -> list[int]:
    """Whole numbers in the proportion of the weights: samples of each source in one period."""
    exact = [
        Fraction(str(weight)) for weight in weights
    ]  # 0.1 means one tenth, not its nearest binary fraction
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= max_period:
        return [int(share * period) for share in shares]
    quotas = [int(share * max_period) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (quotas[k] - shares[k] * max_period, k))
    for index in by_remainder[: max_period - sum(quotas)]:
        quotas[index] += 1
    if 0 in quotas:
        raise ValueError(f"weight {weights[quotas.index(0)]} is below one in {max_period} of the sum of the weights; "
                         "raise it or leave the source out")  # fmt: skip
    common = math.gcd(*quotas)
    return [quota // common for quota in quotas]


def _schedule(quotas: list[int]) -> list[int]:
    """The source of each of the sum(quotas) samples of a period."""
    period = sum(quotas)
    if len(quotas) == 1:
        return [0] * period
    scale = 2 * len(quotas) - 2  # 1/d

    def release(source: int, ordinal: int) -> tuple[int, int, int]:
        return -(-(scale * (ordinal - 1) + 1) * period // (scale * quotas[source])), source, ordinal

    waiting = [release(source, 1) for source in range(len(quotas))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []  # (due, source, ordinal)
    order = []
    for taken in range(1, period + 1):
        while waiting and waiting[0][0] <= taken:
            _, source, ordinal = heapq.heappop(waiting)
            heapq.heappush(
                ready, ((scale * ordinal - 1) * period // (scale * quotas[source]), source, ordinal)
            )
        _, source, ordinal = heapq.heappop(ready)
        order.append(source)
        if ordinal < quotas[source]:
            heapq.heappush(waiting, release(source, ordinal + 1))
    return order


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
