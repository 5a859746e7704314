"""From a configuration to a model: the variants `hf`, `te_linear` and `te_layer`, from scratch or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, MistralConfig
from transformers import MistralForCausalLM as TransformersMistral
from transformers.modeling_outputs import CausalLMOutput

from model import conversion, modeling_mistral_fp8, modeling_mistral_fp8_trans
from model.mistral_base import causal_lm_loss, check_config
from model.precision import Precision, PrecisionError

CONFIGS = Path(__file__).parent / "configs"
VARIANTS = ("hf", "te_linear", "te_layer")

# What must agree for weights of one configuration to be the same model under another.
ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
)


def load_config(name_or_path: str) -> MistralConfig:
    """A MistralConfig by name (a file of model/configs), from a config.json or from a folder that has one.

    Raises ValueError: nothing there, or not a Mistral.
    """
    path = Path(name_or_path)
    if not path.exists():
        path = CONFIGS / f"{name_or_path}.json"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json")))
        raise ValueError(
            f"model.config: {name_or_path!r} is neither a file, nor a folder, nor one of {names}"
        )
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"model.config: the folder {name_or_path!r} has no config.json")
    config = AutoConfig.from_pretrained(str(path))
    if not isinstance(config, MistralConfig):
        raise ValueError(
            f"model.config: {name_or_path!r} is a {config.model_type!r} model; only mistral is supported"
        )
    check_config(config)
    return config


class HuggingFaceMistral(TransformersMistral):
    """transformers' own MistralForCausalLM, the baseline, with the forward signature of the other variants."""

    variant = "hf"

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
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


def build_model(
    config: MistralConfig,
    variant: str,
    precision: Precision,
    *,
    seed: int = 0,
    init_from: str | None = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """A model on `precision.device` in `precision.dtype`, initialized from `seed` or from the Hugging Face folder
    `init_from`.

    Raises ValueError: an unknown variant, an `init_from` of another architecture; PrecisionError: FP8 with hf, a
    bf16_modules pattern that matches nothing, dimensions that FP8 cannot take.
    """
    if variant not in VARIANTS:
        raise ValueError(f"model.variant: {variant!r} is not one of {', '.join(VARIANTS)}")
    if variant == "hf":
        if precision.fp8:
            raise PrecisionError(
                "model.variant hf runs no FP8; choose te_linear or te_layer, or set precision.compute to bf16"
            )
        model = _build_hf(config, precision)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        module = modeling_mistral_fp8 if variant == "te_linear" else modeling_mistral_fp8_trans
        model = module.MistralForCausalLM(config, precision)
        model.gradient_checkpointing = gradient_checkpointing
        precision.apply(model)
    if init_from is None:
        conversion.init_weights(model, seed)
    else:
        conversion.load_hf_state_dict(model, load_hf_folder(init_from, config))
    return model


def _build_hf(config: MistralConfig, precision: Precision) -> HuggingFaceMistral:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(precision.dtype)
    try:
        with precision.device:
            return HuggingFaceMistral._from_config(config, attn_implementation="sdpa").train()
    finally:
        torch.set_default_dtype(dtype)


def load_hf_folder(folder: str, config: MistralConfig) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder, which must be of the architecture `config`.

    Raises ValueError: no such folder, or an architecture that differs (each difference is named).
    """
    if not Path(folder).is_dir():
        raise ValueError(f"model.init_from: {folder!r} is not a folder")
    theirs = load_config(folder)
    differences = [
        f"{key}: {getattr(theirs, key, None)} there, {getattr(config, key, None)} in model.config"
        for key in ARCHITECTURE
        if getattr(theirs, key, None) != getattr(config, key, None)
    ]
    if differences:
        raise ValueError(f"model.init_from: {folder!r} is another model: " + "; ".join(differences))
    return TransformersMistral.from_pretrained(folder, dtype="auto").state_dict()
