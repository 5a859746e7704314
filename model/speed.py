"""The "speed" section: what a run does to be fast besides FP8, each a switch of its own.

docs/performance.md has what each was expected to bring and what it brought. With all off (`SpeedConfig.off()`) a model
computes what te.TransformerLayer and torch compute by themselves, bit for bit.
"""

from __future__ import annotations

import dataclasses

from pydantic.dataclasses import dataclass

from model.keys import STRICT, option


@dataclass(config=STRICT)
class SpeedConfig:
    """The "speed" section. What needs a GPU is without effect on a CPU, whatever the switch says."""

    fused_rope: bool = option("te_layer: one kernel splits q, k and v and rotates q and k", True)
    fused_swiglu: bool = option(
        "te_layer, delayed scaling: the gradient of SwiGLU is cast to FP8 by the kernel that computes it",
        True,
    )
    fused_cross_entropy: bool = option(
        "te_*: the loss in one kernel that overwrites the bf16 logits with their gradient", True
    )
    main_grad: bool = option(
        "te_*: weight-gradient GEMMs add into the float32 accumulation buffer; where there is one "
        "(ZeRO 1 with data_types.grad_accum_dtype fp32)",
        True,
    )
    cuda_graphs: bool = option(
        "te_*: forward and backward are captured once and replayed (ZeRO 0 to 2)", False, resume="free"
    )

    @classmethod
    def off(cls) -> SpeedConfig:
        """Everything off."""
        return cls(**{f.name: False for f in dataclasses.fields(cls)})
