"""transformers' own Mistral: the variants hf and torchao.

Importing transformers' model class takes seconds, and the variants te_linear and te_layer do without: this file is
imported where it is used.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from model.fp8.precision import Precision
from model.mistral_base import causal_lm_loss


class HuggingFaceMistral(MistralForCausalLM):
    """transformers' own MistralForCausalLM, the baseline, with the forward signature of the other variants."""

    variant = "hf"
    compiled = False
    document_mask = False

    @classmethod
    def build(cls, config: MistralConfig, precision: Precision) -> Self:
        """In training mode, with weights that are yet to be set."""
        given = config.dtype  # of the weights that somebody exported; what is computed in, `precision` says
        with precision.device:
            model = cls._from_config(config, attn_implementation="sdpa", dtype=precision.dtype).train()
        config.dtype = given
        # torch gives the row of a padding_idx no gradient, and pad_token_id may be a token that the data has
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
        """Moves and casts, but keeps the rotary frequencies in float32: `model.bfloat16()`, which DeepSpeed calls,
        would round them and so change the model."""
        rope = self.model.rotary_emb
        inv_freq = rope.inv_freq
        super()._apply(fn, recurse)
        rope.inv_freq = inv_freq.to(rope.inv_freq.device)
        rope.original_inv_freq = rope.inv_freq
        return self

    def compile_layers(self) -> None:
        """Have torch.compile compile each decoder layer, in place (names stay), when it first runs.

        One graph serves all layers. What of a layer cannot be compiled, or more shapes than torch keeps graphs for (8),
        is an error of torch._dynamo when it is met: left uncompiled it would only show as slowness.
        """
        # by default kernels are chosen by benchmarks, whose outcome, and so the last bits, differ between runs
        options = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
        for layer in self.model.layers:
            layer.compile(fullgraph=True, dynamic=False, options=options)
        self.compiled = True


class TorchaoMistral(HuggingFaceMistral):
    """The same, to have its Linears swapped for torchao's FP8 ones."""

    variant = "torchao"
