"""Shared parts of the two Transformer Engine variants: embedding, rotary frequencies, layer stack, head and loss.

Shape suffixes: B batch, T tokens, H hidden size, N query heads, K key/value heads, D head dimension, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MistralConfig
from transformers.modeling_outputs import CausalLMOutput

from model.config import check_config, head_dim, rope_frequencies, softmax_scale, window_size
from model.documents import Documents
from model.fp8.precision import Precision
from model.fp8.recipes import fits_fp8
from model.head import make_head
from model.variants import SpeedConfig


def causal_attention(config: MistralConfig, te: Any, layer_number: int | None = None) -> nn.Module:
    """Build the attention module for a model configuration. Call the module through `documents.attend`.

    Inputs are q [B, T, N, D] and k and v [B, T, K, D]; the output is [B, T, N * D] (B batch, T tokens, N query heads, K
    key/value heads, D head dimension).
    """
    return te.DotProductAttention(
        config.num_attention_heads,
        head_dim(config),
        num_gqa_groups=config.num_key_value_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        window_size=window_size(config),
        softmax_scale=softmax_scale(config),
        layer_number=layer_number,
    )


def causal_lm_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats over all labels except -100, computed in float32.

    If all labels are -100, the loss is 0, as in fused/cross_entropy.py. torch would return NaN, and the step would be
    skipped. Labels are already shifted: labels[b, t] is the token after input_ids[b, t].

    Args:
        logits_BTV: [B, T, V] (B batch, T tokens, V vocabulary size).
        labels_BT: int64 [B, T].
    """
    labels_M = labels_BT.flatten()
    total = F.cross_entropy(logits_BTV.float().flatten(0, -2), labels_M, ignore_index=-100, reduction="sum")
    return total / (labels_M != -100).sum().clamp(min=1)


class Embedding(nn.Embedding):
    """Token embedding with an optional fused kernel.

    If `fused` is set and gradients are enabled, the forward pass returns `fused(ids, weight)`.
    """

    fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.fused is None or not torch.is_grad_enabled():
            return super().forward(input)
        return self.fused(input, self.weight)


class MistralModel(nn.Module):
    """Decoder without the head: token embedding, `num_hidden_layers` decoder layers and a final RMSNorm."""

    def __init__(
        self, config: MistralConfig, precision: Precision, speed: SpeedConfig, layers: Iterable[nn.Module]
    ):
        super().__init__()
        placement = {"dtype": precision.dtype, "device": precision.device}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placement)
        self.embed_tokens.fused = precision.te.embedding if speed.fused_embedding else None
        self.layers = nn.ModuleList(layers)
        self.norm = precision.te.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **placement)


class MistralBase(nn.Module):
    """Causal language model, the base class of the two Transformer Engine variants.

    Subclasses set `variant` and `layer_class`. The parameters outside the decoder layers have Hugging Face names.

    Args:
        document_mask: whether attention stays within documents and positions restart at 0 in each document. The model's
            parameters do not depend on this setting.
    """

    variant: ClassVar[str]
    layer_class: ClassVar[type[nn.Module]]

    def __init__(
        self, config: MistralConfig, precision: Precision, speed: SpeedConfig, document_mask: bool = False
    ):
        super().__init__()
        check_config(config)
        self.config, self.speed, self.document_mask = config, speed, document_mask
        self.precision = precision
        # the fused kernel has not been tested with float16
        fused = speed.fused_cross_entropy and precision.dtype != torch.float16
        self.fused_cross_entropy = precision.te.cross_entropy if fused else None
        layers = (
            self.layer_class(config, precision, speed, index) for index in range(config.num_hidden_layers)
        )
        self.model = MistralModel(config, precision, speed, layers)
        self.lm_head = make_head(
            precision.te,
            config.hidden_size,
            config.vocab_size,
            fp8_gradients=precision.head_gradients and fits_fp8(config.hidden_size, config.vocab_size),
            params_dtype=precision.dtype,
            device=precision.device,
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rope_freqs: torch.Tensor | None = None
        _drop_extra_state(self)

    def recompute_layers(self) -> None:
        """Enable gradient checkpointing for the decoder layers.

        Only the input of each layer is saved. The activations of the layer are recomputed in the backward pass. The CPU
        reference implementation does not recompute.

        This method wraps each layer's `forward` instead of its `__call__`, so that the recomputation does not run the
        layer's hooks again. ZeRO 3 gathers weights in a hook before the backward and frees them in a hook after the
        forward.
        """
        for layer in self.model.layers:
            layer.forward = partial(self._recomputed, layer, layer.forward)

    def _recomputed(
        self,
        layer: nn.Module,
        forward: Callable[..., torch.Tensor],
        hidden_BTH: torch.Tensor,
        **arguments: Any,
    ) -> torch.Tensor:
        # TE's own checkpoint: it recomputes with the scales of the first forward
        checkpoint = self.precision.te.checkpoint
        if not layer.training or checkpoint is None:
            return forward(hidden_BTH, **arguments)
        return checkpoint(forward, hidden_BTH, use_reentrant=False, **arguments)

    def rope_freqs(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the rotary angles for positions 0 to `length` - 1: float32 [length, 1, 1, D], with head dimension D.

        The angles are not a buffer or submodule, because `model.bfloat16()`, which DeepSpeed calls, would round them.
        """
        cached = self._rope_freqs
        if cached is None or cached.shape[0] < length or cached.device != device:
            with torch.inference_mode(False):  # tensors of inference mode cannot be used in training
                rope = self.precision.te.RotaryPositionEmbedding(head_dim(self.config)).to(device)
                rope.inv_freq = rope_frequencies(self.config, device)[0]
                cached = self._rope_freqs = rope(length)
        return cached[:length]

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: Documents | None = None,
    ) -> CausalLMOutput:
        """Compute the logits, and the loss if `labels` is given. Shapes: B batch, T tokens, V vocabulary size.

        Args:
            input_ids: int64 [B, T].
            labels: int64 [B, T], already shifted: labels[b, t] is the token after input_ids[b, t]. -100 is ignored.
            is_first_microbatch: None quantizes the weights in this call. True also keeps the FP8 copies, and False
                reuses them in later micro-batches of the same optimizer step.
            documents: document boundaries for a model with a document mask, on the device of input_ids. None treats
                each row as one document.

        Returns:
            loss: float32 scalar in nats per token.
            logits: [B, T, V], or None if a fused loss overwrites them with their gradient.

        Raises ValueError if `documents` is given, but the model has no document mask.
        """
        if documents is not None and not self.document_mask:
            raise ValueError(
                "documents were passed to a model without a document mask; build the model with "
                "document_mask=True"
            )
        B, T = input_ids.shape
        if documents is None and self.document_mask:
            documents = Documents.whole_rows(B, T, input_ids.device)
        with self.precision.autocast():
            hidden_BTH = self.model.embed_tokens(input_ids)
            freqs = self.rope_freqs(T, input_ids.device)
            if documents is not None:
                # Flatten the batch into one row, with an angle for each token instead of one for each position.
                hidden_BTH, freqs = hidden_BTH.flatten(0, 1)[None], freqs[documents.positions.flatten()]
            for layer in self.model.layers:
                hidden_BTH = layer(
                    hidden_BTH,
                    rotary_pos_emb=freqs,
                    is_first_microbatch=is_first_microbatch,
                    documents=documents,
                )
            hidden_BTH = self.model.norm(hidden_BTH)
            if labels is not None and self._head_computes_loss():
                return CausalLMOutput(loss=self.lm_head(hidden_BTH, labels=labels))
            logits_BTV = self.lm_head(hidden_BTH, is_first_microbatch=is_first_microbatch)
            if documents is not None:
                logits_BTV = logits_BTV.view(B, T, -1)
        if labels is None:
            return CausalLMOutput(logits=logits_BTV)
        if self.fused_cross_entropy is not None and torch.is_grad_enabled():
            return CausalLMOutput(loss=self.fused_cross_entropy(logits_BTV, labels))
        return CausalLMOutput(loss=causal_lm_loss(logits_BTV, labels), logits=logits_BTV)

    def _head_computes_loss(self) -> bool:
        """Return whether lm_head also computes the loss (model/head.py)."""
        possible = getattr(self.lm_head, "fp8_gradients", False) and self.precision.te.fp8_cross_entropy
        return bool(possible and self.fused_cross_entropy and torch.is_grad_enabled())


def _drop_extra_state(model: nn.Module) -> None:
    """Remove Transformer Engine's `_extra_state` entries from state dicts.

    The entries are pickles that Transformer Engine itself refuses to load. `fp8_state` in model/fp8/state.py saves the
    FP8 state as plain tensors.
    """

    def strip(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
        for key in [k for k in state_dict if k.endswith("_extra_state")]:
            del state_dict[key]

    def forgive(_: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [
            k for k in incompatible.missing_keys if not k.endswith("_extra_state")
        ]

    model.register_state_dict_post_hook(strip)
    model.register_load_state_dict_post_hook(forgive)
