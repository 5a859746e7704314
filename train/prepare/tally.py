"""What a preparation counts: documents read, dropped, removed and kept, by one task and by all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from train.data.format import DataError
from train.prepare.readers import MISSING_KEY, Damaged, Dropped

if TYPE_CHECKING:
    from datatrove.pipeline.base import PipelineStep

EXAMPLES_PER_REASON = 3


@dataclass
class Stage:
    """A datatrove pipeline that runs in `tasks` tasks, after the stages before it have ended."""

    name: str
    pipeline: list[PipelineStep]
    tasks: int


@dataclass
class Tally:
    """One task's counts. All blocks of a pipeline share one, also after the pipeline was copied or pickled.

    `read` documents could be read, `dropped` ones could not, for a reason; of those read, the optional steps
    `removed` some and `kept` went into shards. `text_bytes` is the UTF-8 size of the documents kept. `damaged`: the
    rows that each damaged file has lost, by path; 0 if the format does not tell. `examples`: of each reason, and of
    each damaged file.
    """

    read: int = 0
    kept: int = 0
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    by_step: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    damaged: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Begin a task."""
        vars(self).update(vars(Tally()))

    def drop(self, item: Dropped) -> None:
        """Count what could not be read, and keep the first places of each reason."""
        self.dropped[item.reason] += item.count
        example = f"{item.where}: {item.detail}" if item.detail else item.where
        self._add_examples({item.reason: [example]})

    def damage(self, item: Damaged) -> None:
        """Count a damaged part of a file, which other tasks may find damaged, too."""
        self.damaged[item.path] += item.lost_rows
        self._add_examples({item.path: [f"{item.reason}: {item.detail}"]})

    def _add_examples(self, found: dict[str, list[str]]) -> None:
        for reason, examples in found.items():
            self.examples[reason] = [*self.examples.get(reason, []), *examples][:EXAMPLES_PER_REASON]

    def add(self, other: Tally) -> None:
        """Count what another task counted."""
        self.read += other.read
        self.kept += other.kept
        self.text_bytes += other.text_bytes
        self.dropped += other.dropped
        self.by_step += other.by_step
        self.damaged.update(other.damaged)  # `+=` would forget a file of which the rows are unknown
        self._add_examples(other.examples)

    def documents(self) -> dict[str, Any]:
        """The manifest's "documents".

        Raises:
            RuntimeError: some documents are neither kept nor accounted for, which is a defect of this program.
        """
        if self.read != self.kept + self.by_step.total():
            raise RuntimeError(
                f"{self.read} documents were read, {self.kept} kept and {self.by_step.total()} removed: the rest is "
                "lost; this is a defect of the preparation, please report it"
            )
        counts = {
            "in": self.read + self.dropped.total(),
            "out": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "removed": dict(sorted(self.by_step.items())),
        }
        return counts | ({"damaged_files": dict(sorted(self.damaged.items()))} if self.damaged else {})

    def table(self) -> str:
        """Removed and dropped documents by reason, with the first places of the latter; every damaged file."""
        lines = [f"{'documents':>11}"] * bool(self.by_step or self.dropped)
        for step, count in self.by_step.most_common():
            lines.append(f"{count:>11,}  removed: {step}")
        for reason, count in self.dropped.most_common():
            lines.append(f"{count:>11,}  dropped: {reason}")
            lines += [f"{'':>13}  {example}" for example in self.examples[reason]]
        lines += [f"{'rows lost':>11}"] * bool(self.damaged)
        for path, rows in sorted(self.damaged.items()):
            lines.append(f"{f'{rows:,}' if rows else 'unknown':>11}  damaged: {path}")
            lines += [f"{'':>13}  {example}" for example in self.examples[path]]
        return "\n".join(lines)

    def check(self, max_dropped: int, max_damaged_files: int, again: str = "") -> None:
        """Check that no more was lost than allowed, and that something is left.

        Raises:
            DataError: it is not so; the message says what to do. `key` is --max_dropped or --max_damaged_files.

        again: what else to do after a repair.
        """
        dropped, damaged = self.dropped.total(), len(self.damaged)
        is_empty = bool(dropped or damaged) and not self.read
        if dropped <= max_dropped and damaged <= max_damaged_files and not is_empty:
            return
        found = f"dropped documents: {dropped} (--max_dropped is {max_dropped}), damaged files: {damaged} "
        found += (
            f"(--max_damaged_files is {max_damaged_files}){', and no document is left' if is_empty else ''}"
        )
        ways = [f"repair the inputs that the table names{again}"]
        if self.dropped[MISSING_KEY]:
            ways.append(f"name the key of the text with --text_key{again}")
        if not is_empty:
            limits = {"--max_dropped": dropped, "--max_damaged_files": damaged}
            options = " ".join(f"{name} {count}" for name, count in limits.items() if count)
            ways.append(f"accept the loss: run it again with {options}")
        raise DataError(
            f"{found}. Nothing was written. Either {', or '.join(ways)}",
            code="nothing_left" if is_empty else "too_much_lost",
            key="--max_dropped" if dropped > max_dropped else "--max_damaged_files",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            key: dict(value) if isinstance(value, Counter) else value for key, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        counters: dict[str, Any] = {
            name: Counter(values.get(name)) for name in ("dropped", "by_step", "damaged")
        }
        return cls(**values | counters)
