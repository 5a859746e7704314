"""transformers' own Mistral model for the variants hf and torchao.

Importing transformers' model class takes seconds, and the variants te_linear and te_layer do not need it. Import this
module only where the class is used.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from model.fp8.precision import Precision
from model.mistral_base import causal_lm_loss


class HuggingFaceMistral(MistralForCausalLM):
    """Baseline model: transformers' MistralForCausalLM with the forward signature of the other variants."""

    variant = "hf"
    compiled = False
    document_mask = False

    @classmethod
    def build(cls, config: MistralConfig, precision: Precision) -> Self:
        """Build the model in training mode with uninitialized weights."""
        given = config.dtype  # dtype of exported weights, which _from_config overwrites
        with precision.device:
            model = cls._from_config(config, attn_implementation="sdpa", dtype=precision.dtype).train()
        config.dtype = given
        # torch gives the padding_idx row no gradient, but pad_token_id may occur in the data
        model.model.embed_tokens.padding_idx = None
        return model

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: None = None,
    ) -> CausalLMOutput:
        logits = super().forward(input_ids=input_ids, use_cache=False).logits
        loss = None if labels is None else causal_lm_loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the model, but keep the rotary frequencies in float32.

        DeepSpeed calls `model.bfloat16()`, which would round the frequencies and change the model.
        """
        rope = self.model.rotary_emb
        inv_freq = rope.inv_freq
        super()._apply(fn, recurse)
        rope.inv_freq = inv_freq.to(rope.inv_freq.device)
        rope.original_inv_freq = rope.inv_freq
        return self

    def compile_layers(self) -> None:
        """Compile each decoder layer in place with torch.compile on its first run. Parameter names do not change.

        All layers share one graph. torch._dynamo raises an error if part of a layer cannot be compiled, or if there are
        more input shapes than the 8 graphs that torch keeps. A silent fallback to uncompiled layers would only be slow
        and easy to miss.
        """
        # by default benchmarks choose the kernels; their choice, and so the last bits, differ between runs
        options = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
        for layer in self.model.layers:
            layer.compile(fullgraph=True, dynamic=False, options=options)
        self.compiled = True


class TorchaoMistral(HuggingFaceMistral):
    """Baseline model in which torchao replaces the Linear modules with FP8 modules."""

    variant = "torchao"
