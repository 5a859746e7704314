"""transformers' own Mistral, Llama and Qwen3 models for the variants hf and torchao.

Importing transformers' model class takes seconds, and the variants te_linear and te_layer do not need it. Import this
module only where the class is used.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from model.decoder import causal_lm_loss
from model.fp8.precision import Precision


class _Baseline:
    """Adapter that gives a transformers model class the forward signature of the other model variants.

    Attributes:
        variant: "hf", or "torchao", which replaces the Linear modules of the same model with FP8 modules.
    """

    variant: str
    compiled = False
    document_mask = False
    loss_of = staticmethod(causal_lm_loss)
    model: Any

    @classmethod
    def build(cls: Any, config: MistralConfig, precision: Precision, variant: str) -> Any:
        """Build the model in training mode with uninitialized weights."""
        given = config.dtype  # dtype of exported weights, which _from_config overwrites
        with precision.device:
            model = cls._from_config(config, attn_implementation="sdpa", dtype=precision.dtype).train()
        config.dtype, model.variant = given, variant
        # torch gives the padding_idx row no gradient, but pad_token_id may occur in the data
        model.model.embed_tokens.padding_idx = None
        return model

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: None = None,
    ) -> CausalLMOutput:
        logits = super().forward(input_ids=input_ids, use_cache=False).logits  # type: ignore[misc]
        loss = None if labels is None else self.loss_of(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the model, but keep the rotary frequencies in float32.

        DeepSpeed calls `model.bfloat16()`, which would round the frequencies and change the model.
        """
        rope = self.model.rotary_emb
        inv_freq = rope.inv_freq
        super()._apply(fn, recurse)  # type: ignore[misc]
        rope.inv_freq = inv_freq.to(rope.inv_freq.device)
        rope.original_inv_freq = rope.inv_freq
        return self

    def compile_layers(self) -> None:
        """Compile each decoder layer and the loss with torch.compile on their first run. Parameter names do not change.

        All layers share one graph. torch._dynamo raises an error if part of a layer cannot be compiled, or if there are
        more input shapes than the 8 graphs that torch keeps. A silent fallback to uncompiled layers would only be slow
        and easy to miss.
        """
        # by default benchmarks choose the kernels; their choice, and so the last bits, differ between runs
        options = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else None
        for layer in self.model.layers:
            layer.compile(fullgraph=True, dynamic=False, options=options)
        self.loss_of = torch.compile(causal_lm_loss, fullgraph=True, dynamic=False, options=options)
        self.compiled = True


class HuggingFaceMistral(_Baseline, MistralForCausalLM):
    """Mistral model from transformers, adapted to this project's model interface."""


class HuggingFaceLlama(_Baseline, LlamaForCausalLM):
    """Llama model from transformers, adapted to this project's model interface."""


class HuggingFaceQwen3(_Baseline, Qwen3ForCausalLM):
    """Qwen3 model from transformers, adapted to this project's model interface."""


BASELINES = {"mistral": HuggingFaceMistral, "llama": HuggingFaceLlama, "qwen3": HuggingFaceQwen3}
