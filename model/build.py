"""From a configuration to a model: the variants `hf`, `te_linear`, `te_layer` and `torchao`, from scratch or from a
folder."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import MistralConfig
from transformers import MistralForCausalLM as TransformersMistral
from transformers.modeling_outputs import CausalLMOutput

from model import conversion, modeling_mistral_fp8, modeling_mistral_fp8_trans
from model.fp8.precision import TRANSFORMERS_VARIANTS, Precision, PrecisionError
from model.mistral_base import causal_lm_loss, check_config
from model.speed import SpeedConfig
from model.variants import VARIANTS, compiles, variant_problems

CONFIGS = Path(__file__).parent / "configs"

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

POSITIVE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings".split()
)
# Keys of a config.json that MistralConfig takes besides its fields (older names, options of transformers), and keys of
# other tools and models that resemble a field's name and change nothing here.
LEGACY_KEYS = frozenset("rope_theta rope_scaling torch_dtype".split())
ORDINARY_KEYS = frozenset(
    "attention_bias attn_implementation auto_map chat_template cls_token_id decoder_start_token_id is_decoder "
    "mask_token_id mlp_bias model_name name_or_path num_labels partial_rotary_factor pretraining_tp "
    "quantization_config sep_token_id task_specific_params tie_encoder_decoder tokenizer_class torchscript "
    "transformers.js_config unk_token_id use_return_dict".split()
)
# How alike (difflib's ratio) an unknown key and a field are when the one must be meant to be the other: 0.7 finds
# num_layers and hidden_dim.
MISSPELT = 0.7


def load_config(name_or_path: str) -> MistralConfig:
    """A MistralConfig by name (a file of model/configs), from a config.json or from a folder that has one.

    Raises ValueError: nothing there, not JSON, not a Mistral, a key that looks like a misspelt one (transformers would
    ignore it and take the default of what was meant), a value of another type or one that no model has.
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
    _check_file(path / "config.json" if path.is_dir() else path)
    try:
        config = MistralConfig.from_pretrained(str(path))
        check_config(config)
    except (
        Exception
    ) as error:  # transformers checks types with classes of its own, and other things not at all
        problem = " ".join(str(error).split()).removeprefix("model.config: ")
        raise ValueError(f"model.config: {path}: {problem}") from error
    return config


def _check_file(path: Path) -> None:
    """Raises ValueError for a config.json with something that MistralConfig would let through."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model.config: {path} is not a JSON file that can be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"model.config: {path} holds no JSON object")
    if values.get("model_type") != "mistral":
        raise ValueError(
            f"model.config: {path} has the model_type {values.get('model_type')!r}; only mistral is supported"
        )
    fields = sorted({key for key in MistralConfig().to_dict() if not key.startswith("_")} | LEGACY_KEYS)
    problems = []
    for key in values:
        if key in fields or key in ORDINARY_KEYS or key.startswith("_"):
            continue
        if close := difflib.get_close_matches(key, fields, 1, MISSPELT):
            problems.append(f"{key}: unknown key (did you mean {close[0]}?)")
    problems += [
        f"{key}: {values[key]} must be positive"
        for key in POSITIVE
        if isinstance(values.get(key), int) and values[key] < 1
    ]
    if problems:
        raise ValueError(f"model.config: {path}: " + "; ".join(problems))


class HuggingFaceMistral(TransformersMistral):
    """transformers' own MistralForCausalLM, the baseline, with the forward signature of the other variants."""

    variant = "hf"
    compiled = False
    document_mask = False

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


def build_model(
    config: MistralConfig,
    variant: str,
    precision: Precision,
    *,
    seed: int = 0,
    init_from: str | None = None,
    gradient_checkpointing: bool = False,
    speed: SpeedConfig | None = None,
    compile: bool | None = None,
    document_mask: bool = False,
) -> nn.Module:
    """A model on `precision.device` in `precision.dtype`, initialized from `seed` or from the Hugging Face folder
    `init_from`. compile: torch.compile for the layers of hf and torchao; None: of torchao where there is a GPU.
    document_mask: te_*: attention stays within the `documents` of each forward.

    Raises ValueError: an unknown variant, one that has no document mask, an `init_from` of another architecture;
    PrecisionError: a precision or `compile` that the variant does not have, a bf16_modules pattern that matches
    nothing, dimensions FP8 cannot take.
    """
    if variant not in VARIANTS:
        raise ValueError(f"model.variant: {variant!r} is not one of {', '.join(VARIANTS)}")
    if problems := variant_problems(variant, precision.config, compile):
        raise PrecisionError("; ".join(problems))
    if document_mask and variant in TRANSFORMERS_VARIANTS:
        raise ValueError(
            f"model.variant {variant} has no document mask; choose te_linear or te_layer, or set data.document_mask "
            "to false"
        )
    if variant in TRANSFORMERS_VARIANTS:
        cls = TorchaoMistral if variant == "torchao" else HuggingFaceMistral
        model = _build_transformers(config, precision, cls)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiles(variant, precision.config, compile):
            model.compile_layers()
    else:
        module = modeling_mistral_fp8 if variant == "te_linear" else modeling_mistral_fp8_trans
        model = module.MistralForCausalLM(config, precision, speed or SpeedConfig(), document_mask)
        model.gradient_checkpointing = gradient_checkpointing
    precision.apply(model)
    if init_from is None:
        conversion.init_weights(model, seed)
    else:
        conversion.load_hf_state_dict(model, load_hf_folder(init_from, config))
    return model


def _build_transformers(
    config: MistralConfig, precision: Precision, cls: type[HuggingFaceMistral]
) -> HuggingFaceMistral:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(precision.dtype)
    try:
        with precision.device:
            return cls._from_config(config, attn_implementation="sdpa").train()
    finally:
        torch.set_default_dtype(dtype)


def load_hf_folder(folder: str, config: MistralConfig) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder, which must be of the architecture `config`.

    Raises ValueError: no such folder, an architecture that differs (each difference is named), no weights or weights
    that cannot be read; ConversionError: tensors missing, unknown or of another shape.
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
    try:
        # without ignore_mismatched_sizes transformers prints which tensors differ, and raises without naming them
        model, found = TransformersMistral.from_pretrained(
            folder, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
    except Exception as error:  # safetensors, pickle and json each raise classes of their own
        what = "; ".join(_damaged_files(folder)) or " ".join(str(error).split())
        raise ValueError(f"model.init_from: the weights of {folder!r} cannot be read: {what}") from error
    # transformers fills with random numbers what it does not find
    problems = [f"{name} is missing" for name in found["missing_keys"]]
    problems += [f"{name} is unknown" for name in found["unexpected_keys"]]
    problems += [
        f"{name} has shape {tuple(theirs)}, config.json needs {tuple(ours)}"
        for name, theirs, ours in found["mismatched_keys"]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise conversion.ConversionError(
            f"model.init_from: the weights of {folder!r} are not those of its config.json: "
            + "; ".join(sorted(problems)[:5])
            + more
        )
    return model.state_dict()


def _damaged_files(folder: str) -> list[str]:
    """The safetensors files of a folder that are no such files, or not whole, each with what is wrong."""
    damaged = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            damaged.append(f"{path.name} is truncated or no safetensors file ({error})")
    return damaged
