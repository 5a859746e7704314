"""What is measured: a run's model, batch and settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import MistralConfig

from model.build import build_model
from model.config import ARCHITECTURE, GIB
from model.documents import Documents, random_documents
from model.fp8 import te_backend
from model.fp8.modules import gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.recipes import RECIPES, Compute, PrecisionConfig
from model.variants import SpeedConfig

# FP8 copies of weights are made in the first micro-batch of a step; what more than 4 micro-batches would change is
# below 0.2 %.
LONGEST_CYCLE = 4
PACKAGES = ("torch", "flash-attn", "flash-attn-4", "triton")  # besides TE; their kernels are measured


@dataclass
class Task:
    """What the run would do, and what of it is still to be chosen.

    precision, speed, attention_backend: as asked for; compute is fp8. accumulation: micro-batches of a step. main_grad:
    the GEMMs add weight gradients into float32 buffers. graphs_allowed: whether the run can use CUDA graphs.
    document_mask: attention stays within documents. other_memory_gib: what the run holds besides weights, gradients and
    activations (optimizer state); a way to run that leaves no room for it is not chosen. ranks, zero_stage: of the run.
    """

    config: MistralConfig
    variant: str
    precision: PrecisionConfig
    batch_size: int
    seq_length: int
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    attention_backend: str = "auto"
    gradient_checkpointing: bool = False
    accumulation: int = 8
    main_grad: bool = False
    graphs_allowed: bool = True
    document_mask: bool = False
    other_memory_gib: float = 0.0
    ranks: int = 1
    zero_stage: int = 0

    def resolved(self, compute: Compute) -> Precision:
        """The run's precision with `compute`. Amaxes are not shared: the other ranks do not measure along."""
        config = replace(self.precision, auto=False, compute=compute)
        return Precision(replace(config, reduce_amax=False) if RECIPES[config.recipe].has_state else config)

    def cycle(self, precision: Precision) -> int | None:
        """Passes that share one FP8 copy of the weights; None where each makes its own."""
        return min(self.accumulation, LONGEST_CYCLE) if precision.fp8 and self.accumulation > 1 else None

    def graph_modes(self) -> tuple[bool, ...]:
        """Whether CUDA graphs are used, for each way that may be chosen; what the user turned on stays on."""
        if not self.graphs_allowed:
            return (False,)
        return (True,) if self.speed.cuda_graphs else (False, True)

    @property
    def mean_document_tokens(self) -> float:
        """Half a row each: where documents are shorter, attention takes less time, and what is chosen matters less."""
        return self.seq_length / 2

    def documents(self) -> Documents | None:
        """Some for a batch of the run, if it has any."""
        if not self.document_mask:
            return None
        generator = torch.Generator().manual_seed(0)
        return random_documents(self.batch_size, self.seq_length, self.mean_document_tokens, generator)

    def build(self, precision: Precision) -> nn.Module:
        """The model as the run would have it."""
        model = build_model(
            self.config,
            self.variant,
            precision,
            gradient_checkpointing=self.gradient_checkpointing,
            speed=self.speed,
            document_mask=self.document_mask,
        ).train()
        if self.main_grad:
            for module in gemm_modules(model, precision).values():
                for weight in matrices(module):
                    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                module.fuse_wgrad_accumulation = True
        return model

    def made_for(self) -> dict[str, dict[str, Any]]:
        """What a choice holds for, as JSON values: `asked`, `circumstances`, `versions` (see Record)."""
        precision = asdict(self.precision)
        del precision["auto"]
        gpu: dict[str, Any] = {"GPU": "none"}
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            gpu = {"GPU": properties.name, "GPU memory, GiB": round(properties.total_memory / GIB)}
        packages = {p: version for p in PACKAGES if (version := te_backend.version_of(p))}
        return {
            "asked": {
                "model": {key: getattr(self.config, key, None) for key in ARCHITECTURE},
                "model.variant": self.variant,
                "model.attention_backend": self.attention_backend,
                "data.document_mask": self.document_mask,
                "precision": precision,
                "speed": asdict(self.speed),
            },
            "circumstances": {
                "per_device_train_batch_size": self.batch_size,
                "max_seq_length": self.seq_length,
                "gradient_checkpointing": self.gradient_checkpointing,
                "more than one micro-batch a step": self.accumulation > 1,
                "weight gradients added in float32 by the GEMMs": self.main_grad,
                "CUDA graphs allowed": self.graphs_allowed,
                "ranks": self.ranks,
                "ZeRO stage": self.zero_stage,
                "memory that the optimizer takes, GiB": round(self.other_memory_gib, 1),
                "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
                **gpu,
            },
            "versions": {
                **packages,
                "fp8": self.resolved("bf16").te.version,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            },
        }
