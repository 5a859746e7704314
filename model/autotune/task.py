"""What precision.auto measures: the model, batch and settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import MistralConfig

from model.build import build_model
from model.documents import Documents, random_documents
from model.fp8.modules import gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.recipes import RECIPES, Compute, PrecisionConfig
from model.variants import SpeedConfig

# The first micro-batch of a step quantizes the weights. Beyond 4 micro-batches the mean changes by less than 0.2 %.
LONGEST_CYCLE = 4


@dataclass
class Task:
    """The settings of a run, some of which are still to be chosen.

    precision, speed, attention_backend: as configured; compute is fp8. accumulation: micro-batches of a step.
    main_grad: GEMMs add weight gradients into float32 buffers. graphs_allowed: whether the run can use CUDA graphs.
    document_mask: attention stays within documents. other_memory_gib: GPU memory the run needs besides weights,
    gradients and activations, mainly optimizer state.
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

    def resolved(self, compute: Compute) -> Precision:
        """The run's precision with `compute`. Amaxes are not reduced: the other ranks do not measure."""
        config = replace(self.precision, auto=False, compute=compute)
        return Precision(replace(config, reduce_amax=False) if RECIPES[config.recipe].has_state else config)

    def cycle(self, precision: Precision) -> int | None:
        """Passes that share one FP8 copy of the weights; None if each pass quantizes them."""
        return min(self.accumulation, LONGEST_CYCLE) if precision.fp8 and self.accumulation > 1 else None

    def graph_modes(self) -> tuple[bool, ...]:
        """Values of speed.cuda_graphs to measure. If the configuration sets it, it stays on."""
        if not self.graphs_allowed:
            return (False,)
        return (True,) if self.speed.cuda_graphs else (False, True)

    @property
    def mean_document_tokens(self) -> float:
        """Half a sample. With shorter documents attention takes less time and its backend matters less."""
        return self.seq_length / 2

    def documents(self) -> Documents | None:
        """Random documents for a batch, with document_mask."""
        if not self.document_mask:
            return None
        generator = torch.Generator().manual_seed(0)
        return random_documents(self.batch_size, self.seq_length, self.mean_document_tokens, generator)

    def build(self, precision: Precision) -> nn.Module:
        """Build the model as the run would."""
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
