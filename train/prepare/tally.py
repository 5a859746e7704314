"""Count the documents that a data preparation reads, drops, removes and keeps."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from train.data.format import DataError
from train.prepare.readers import EMPTY, MISSING_KEY, Damaged, Dropped

logger = logging.getLogger(__name__)
EXAMPLES_PER_REASON = 3


@dataclass
class Tally:
    """Document counts of a preparation task.

    Attributes:
        read: number of documents that could be read.
        kept: number of documents written to shards.
        text_bytes: UTF-8 size of the kept documents.
        dropped: number of documents that could not be read, for each reason.
        by_step: number of documents removed by each optional step.
        examples: up to EXAMPLES_PER_REASON examples for each drop reason and each damaged file.
        damaged: number of rows lost in each damaged file, by path, or 0 if the number is unknown.
    """

    read: int = 0
    kept: int = 0
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    by_step: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    damaged: Counter[str] = field(default_factory=Counter)

    def drop(self, item: Dropped) -> None:
        """Count unreadable documents, and keep the first examples for each reason."""
        self.dropped[item.reason] += item.count
        example = f"{item.where}: {item.detail}" if item.detail else item.where
        self._add_examples({item.reason: [example]})

    def damage(self, item: Damaged) -> None:
        """Count the lost rows of a damaged file. Several tasks can report the same file."""
        path = item.path.encode("utf-8", "backslashreplace").decode()  # the manifest is UTF-8
        self.damaged[path] += item.lost_rows
        self._add_examples({path: [f"{item.reason}: {item.detail}"]})

    def _add_examples(self, found: dict[str, list[str]]) -> None:
        for reason, examples in found.items():
            self.examples[reason] = [*self.examples.get(reason, []), *examples][:EXAMPLES_PER_REASON]

    def add(self, other: Tally) -> None:
        """Add the counts of another task to these counts."""
        self.read += other.read
        self.kept += other.kept
        self.text_bytes += other.text_bytes
        self.dropped += other.dropped
        self.by_step += other.by_step
        self.damaged.update(other.damaged)  # `+=` would drop files whose number of lost rows is 0 (unknown)
        self._add_examples(other.examples)

    def documents(self) -> dict[str, Any]:
        """Return the document counts for the field "documents" of the manifest."""
        assert self.read == self.kept + self.by_step.total(), f"the preparation lost documents: {self}"
        counts = {
            "in": self.read + self.dropped.total(),
            "out": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "removed": dict(sorted(self.by_step.items())),
        }
        return counts | ({"damaged_files": dict(sorted(self.damaged.items()))} if self.damaged else {})

    def table(self) -> str:
        """Return a text table that lists removed documents, dropped documents and damaged files, with examples."""
        lines = [f"{'documents':>11}"]
        lines += [f"{count:>11,}  removed: {step}" for step, count in self.by_step.most_common()]
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:>11,}  dropped: {reason}")
            lines += [f"{'':>13}  {example}" for example in self.examples[reason]]
        for path, rows in sorted(self.damaged.items()):
            lines.append(f"{rows or 'unknown':>11}  rows lost in damaged file {path}")
            lines += [f"{'':>13}  {example}" for example in self.examples[path]]
        return "\n".join(lines)

    def check(self, max_dropped: int, max_damaged_files: int, again: str = "") -> None:
        """Log the dropped documents and damaged files, and check that their numbers are within the limits.

        Empty documents do not count as dropped, because no text is lost.

        Args:
            again: text that follows "run the command again" in the error message, such as " with --overwrite".

        Raises:
            DataError: if a limit is exceeded (`key` is --max_dropped or --max_damaged_files), or no document is left.
        """
        if self.dropped or self.by_step or self.damaged:
            logger.warning(self.table())
        dropped, damaged = self.dropped.total() - self.dropped[EMPTY], len(self.damaged)
        is_empty = not self.read
        if dropped <= max_dropped and damaged <= max_damaged_files and not is_empty:
            return
        limits = f"--max_dropped {dropped} --max_damaged_files {damaged}"
        remedy = "Repair the inputs" + ", or pass the key that contains the text as --text_key," * bool(
            self.dropped[MISSING_KEY]
        )
        raise DataError(
            f"{dropped} documents were dropped (--max_dropped is {max_dropped}) and {damaged} files are damaged "
            f"(--max_damaged_files is {max_damaged_files}). {'No document could be read. ' * is_empty}"
            f"{remedy} and run the command again{again}"
            f"{f', or pass {limits} to continue without this text' * (not is_empty)}",
            code="nothing_left" if is_empty else "too_much_lost",
            key="--max_dropped" if dropped > max_dropped else "--max_damaged_files",
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        """Build a tally from a dictionary of its attributes that was saved as JSON."""
        counters: dict[str, Any] = {
            name: Counter(values.get(name)) for name in ("dropped", "by_step", "damaged")
        }
        return cls(**values | counters)
