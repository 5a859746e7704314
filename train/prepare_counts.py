"""What a preparation counts and reports: documents in, out and dropped, its rate, the unigram loss of its tokens."""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from train.corpus import Document, Dropped

BATCH_BYTES = 1 << 20  # text sent to a worker at a time: enough to hide the pickling, little enough to spread
EXAMPLES_PER_REASON = 3


@dataclass
class Counts:
    """What went in, and what was dropped why."""

    documents: int = 0
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, item: Dropped) -> None:
        self.dropped[item.reason] += item.count
        examples = self.examples.setdefault(item.reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{item.where}: {item.detail}" if item.detail else item.where)

    def table(self) -> str:
        lines = [f"{'dropped':>9}  reason"]
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:>9}  {reason}")
            lines += [f"{'':>11}  {example}" for example in self.examples[reason]]
        return "\n".join(lines)


def text_batches(
    documents: Iterable[Document | Dropped], counts: Counts, max_bytes: int | None
) -> Iterator[list[str]]:
    """Group texts for the workers, counting; ends before the document that would exceed `max_bytes` of text."""
    batch: list[str] = []
    batch_bytes = 0
    for item in documents:
        if isinstance(item, Dropped):
            counts.drop(item)
            continue
        size = len(item.text.encode())
        if max_bytes is not None and counts.text_bytes + size > max_bytes:
            break
        counts.documents += 1
        counts.text_bytes += size
        batch.append(item.text)
        batch_bytes += size
        if batch_bytes >= BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


class Progress:
    """A line with the rate every few seconds on stderr."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self.start_s = self.last_s = time.monotonic()
        self.interval_s = interval_s

    def update(self, counts: Counts, tokens: int) -> None:
        now = time.monotonic()
        if now - self.last_s >= self.interval_s:
            self.last_s = now
            print(self.line(counts, tokens), file=sys.stderr, flush=True)

    def line(self, counts: Counts, tokens: int) -> str:
        seconds = max(time.monotonic() - self.start_s, 1e-9)
        return (
            f"{counts.documents:,} documents, {counts.text_bytes / 1e6:,.1f} MB, {tokens:,} tokens in {seconds:.1f} s "
            f"({tokens / seconds / 1e6:.2f} M tokens/s), {counts.dropped.total():,} dropped"
        )


def unigram_loss(train_counts: np.ndarray, eval_counts: np.ndarray) -> float | None:
    """Cross entropy in nats per token of the eval counts [V] under the add-one-smoothed train counts [V]."""
    if not train_counts.sum() or not eval_counts.sum():
        return None
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(eval_counts * log_p).sum() / eval_counts.sum())
