"""transformers' own Mistral, for the variants hf and torchao.

Importing transformers' model class takes seconds, and te_linear and te_layer do not need it. Import this file only
where it is used.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from model.fp8.precision import Precision
from model.mistral_base import causal_lm_loss


class HuggingFaceMistral(MistralForCausalLM):
    """The baseline: transformers' MistralForCausalLM with the forward signature of the other variants."""

    variant = "hf"
    compiled = False
    document_mask = False

    @classmethod
    def build(cls, config: MistralConfig, precision: Precision) -> Self:
        """Build the model in training mode, with weights not yet set."""
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
        """Move and cast the model, but keep the rotary frequencies in float32.

        `model.bfloat16()`, which DeepSpeed calls, would round them and change the model.
        """
        rope = self.model.rotary_emb
        inv_freq = rope.inv_freq
        super()._apply(fn, recurse)
        rope.inv_freq = inv_freq.to(rope.inv_freq.device)
        rope.original_inv_freq = rope.inv_freq
        return self

    def compile_layers(self) -> None:
        """Compile each decoder layer in place with torch.compile when it first runs. Names do not change.

        One graph serves all layers. If part of a layer cannot be compiled, or if there are more shapes than torch keeps
        graphs for (8), torch._dynamo raises an error. Running uncompiled instead would only show as slowness.
        """
        # by default benchmarks choose the kernels; their choice, and so the last bits, differ between runs
        options = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
        for layer in self.model.layers:
            layer.compile(fullgraph=True, dynamic=False, options=options)
        self.compiled = True


class TorchaoMistral(HuggingFaceMistral):
    """The same model; torchao replaces its Linears by FP8 ones."""

    variant = "torchao"
