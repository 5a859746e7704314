"""A choice as it is printed and saved: what was measured, what follows, and what it was made for."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from model.autotune.decide import AttentionTime, StepTime
from model.autotune.task import Task
from model.config import ARCHITECTURE
from model.fp8.recipes import Compute, PrecisionConfig
from model.variants import ATTENTION_BACKENDS, SpeedConfig

SCHEMA = 1
PACKAGES = ("flash-attn", "flash-attn-4", "triton")  # besides torch and TE, whose kernels are measured


@dataclass
class Choice:
    """precision.compute, speed.cuda_graphs, model.attention_backend; precision.bf16_modules as it was given, or, in
    older records, with modules more for which bf16 was faster."""

    compute: Compute
    bf16_modules: list[str]
    cuda_graphs: bool
    attention_backend: str

    def apply(self, precision: PrecisionConfig, speed: SpeedConfig) -> tuple[PrecisionConfig, SpeedConfig]:
        """Copies with this choice in them: what a user would write who knew it."""
        return (
            replace(precision, auto=False, compute=self.compute, bf16_modules=list(self.bf16_modules)),
            replace(speed, cuda_graphs=self.cuda_graphs),
        )


@dataclass
class Record:
    """asked: the model and what its user asked for. circumstances: batch, GPU and what else decides times. why: the
    reasons, a line each. measurements: "attention", "steps"."""

    asked: dict[str, Any]
    circumstances: dict[str, Any]
    versions: dict[str, str]
    choice: Choice
    why: list[str]
    seconds: float
    measurements: dict[str, list[dict[str, Any]]]

    def summary(self) -> str:
        """One line: the choice as a user would write it."""
        c = self.choice
        return (
            f"precision.auto: precision.compute {c.compute}, precision.bf16_modules {json.dumps(c.bf16_modules)}, "
            f"speed.cuda_graphs {json.dumps(c.cuda_graphs)}, model.attention_backend {c.attention_backend}; "
            f"measured in {self.seconds:.0f} s"
        )

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises ValueError: not what `to_json` writes."""
        try:
            values = json.loads(text)
            schema = values.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"it has schema {schema}, this version reads {SCHEMA}")
            choice = Choice(**values.pop("choice"))
            record = cls(choice=choice, **values)
            # of the right types too: the choice goes into the configuration unread
            valid = (
                choice.compute in ("fp8", "bf16")
                and isinstance(choice.bf16_modules, list)
                and all(isinstance(pattern, str) for pattern in choice.bf16_modules)
                and isinstance(choice.cuda_graphs, bool)
                and choice.attention_backend in ATTENTION_BACKENDS
            )
            if not valid:
                raise ValueError("its choice is damaged")
            return record
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it is no saved choice: {error!r}") from error


def asked_of(task: Task) -> dict[str, Any]:
    precision = asdict(task.precision)
    del precision["auto"]
    return _plain(
        {
            "model": {key: getattr(task.config, key, None) for key in ARCHITECTURE},
            "model.variant": task.variant,
            "model.attention_backend": task.attention_backend,
            **({"data.document_mask": True} if task.document_mask else {}),  # older records lack it
            "precision": precision,
            "speed": asdict(task.speed),
        }
    )


def circumstances_of(task: Task) -> dict[str, Any]:
    gpu: dict[str, Any] = {"GPU": "none"}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {"GPU": properties.name, "GPU memory, GiB": round(properties.total_memory / 2**30)}
    return _plain(
        {
            "per_device_train_batch_size": task.batch_size,
            "max_seq_length": task.seq_length,
            "gradient_checkpointing": task.gradient_checkpointing,
            "more than one micro-batch a step": task.accumulation > 1,
            "weight gradients added in float32 by the GEMMs": task.main_grad,
            "CUDA graphs allowed": task.graphs_allowed,
            "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
            **gpu,
        }
    )


def versions_of(task: Task) -> dict[str, str]:
    versions = {"torch": str(torch.__version__), "fp8": task.resolved("bf16").te.version}
    if torch.cuda.is_available():
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As it reads after a way through JSON."""
    return json.loads(json.dumps(values))


def table(
    task: Task,
    attention: Sequence[AttentionTime],
    steps: Sequence[StepTime],
    memory_gib: float | None,
) -> list[str]:
    """The measurements for the log."""
    rows = [("", "FP8", "bf16", "")]
    for a in attention:
        error = "" if a.error is None else f"relative error against SDPA {a.error:.1e}"
        rows.append((f"attention {a.backend}", "", _ms(a.ms), "; ".join(filter(None, (a.note, error)))))
    tokens = task.batch_size * task.seq_length
    for s in steps:
        notes = [s.note] if s.note else []
        if s.ms is not None:
            notes.append(f"{tokens / s.ms * 1e3:,.0f} tokens/s")
        if s.peak_gib is not None:
            notes.append(f"{s.peak_gib:.1f} GiB")
            if memory_gib is not None and s.peak_gib > memory_gib:
                notes.append(f"more than the {memory_gib:.1f} GiB that the run leaves")
        times = ("", _ms(s.ms)) if s.compute == "bf16" else (_ms(s.ms), "")
        rows.append((f"step: {s}", *times, ", ".join(notes)))
    width = max(len(row[0]) for row in rows)
    header = f"forward + backward of {task.batch_size} x {task.seq_length} tokens, ms"
    lines = [f"  {name:<{width}} {fp8:>9} {bf16:>9}  {rest}".rstrip() for name, fp8, bf16, rest in rows]
    return [header, *lines]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
