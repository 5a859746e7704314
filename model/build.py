"""From a configuration to a model: one of the variants, from scratch or from a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from model import conversion, modeling_mistral_fp8, modeling_mistral_fp8_trans
from model.config import ModelConfigError, head_dim
from model.fp8 import te_backend
from model.fp8.modules import apply_precision
from model.fp8.precision import Precision, PrecisionError, first_key
from model.hf_folder import check_init_from, read_hf_folder
from model.variants import VARIANTS, SpeedConfig, compiles, variant_problems

if TYPE_CHECKING:
    from transformers import MistralConfig


def choose_attention(
    asked: str, variant: str, precision: Precision, config: MistralConfig, document_mask: bool = False
) -> str:
    """Have Transformer Engine run the attention that a value of model.attention_backend means for this model, from the
    next forward on; returns it.

    Raises BackendError: an unknown one, or with a document mask one that does not attend so here."""
    if document_mask:
        asked = te_backend.document_attention(asked, precision.te, precision.dtype)
    elif VARIANTS[variant].te:
        asked = te_backend.fastest_attention(asked, precision.te, precision.dtype, head_dim(config))
    te_backend.choose_attention_backend(asked)
    return asked


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
    """A model to train, on `precision.device` in `precision.dtype`, initialized from `seed` or from the Hugging Face
    folder `init_from`. compile: torch.compile for the layers of hf and torchao; None: of torchao where there is a GPU.
    document_mask: te_*: attention stays within the `documents` of each forward.

    Raises ModelConfigError: an unknown variant, or one that has no document mask;
    WeightsError: an `init_from` of another architecture, or with weights that cannot be used;
    PrecisionError: a precision or `compile` that the variant does not have, a bf16_modules pattern that matches
    nothing, dimensions FP8 cannot take, float16 on a CPU.
    """
    if variant not in VARIANTS:
        message = f"model.variant: {variant!r} is not one of {', '.join(VARIANTS)}"
        raise ModelConfigError(message, key="model.variant")
    if problems := variant_problems(variant, precision.config, compile):
        raise PrecisionError("; ".join(problems), code="combination", key=first_key(problems[0]))
    # a backward takes minutes there
    if precision.config.compute == "fp16" and precision.device.type == "cpu":
        raise PrecisionError(
            "precision.compute: fp16 needs a CUDA device to train on and there is none; use bf16 or fp32",
            code="no_gpu",
            key="precision.compute",
        )
    if document_mask and not VARIANTS[variant].documents:
        raise ModelConfigError(
            f"model.variant {variant} has no document mask; choose te_linear or te_layer, or set data.document_mask "
            "to false",
            key="data.document_mask",
        )
    weights: Any = None
    if init_from is not None:  # before anything is on a GPU
        check_init_from(init_from, config)
        weights = read_hf_folder(init_from, config, precision.dtype)
    model: Any = make_modules(config, variant, precision, speed or SpeedConfig(), document_mask)
    if VARIANTS[variant].te:
        if gradient_checkpointing:
            model.recompute_layers()
    else:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiles(variant, precision.config, compile):
            model.compile_layers()
    apply_precision(model, precision)
    if weights is None:
        conversion.init_weights(model, seed)
    else:
        conversion.load_hf_state_dict(model, weights)
    return model


def make_modules(
    config: MistralConfig, variant: str, precision: Precision, speed: SpeedConfig, document_mask: bool = False
) -> nn.Module:
    """The modules of a variant on `precision.device`, which may be meta, with weights that are yet to be set."""
    if VARIANTS[variant].te:
        module = modeling_mistral_fp8 if variant == "te_linear" else modeling_mistral_fp8_trans
        return module.MistralForCausalLM(config, precision, speed, document_mask)
    from model.hf_baseline import HuggingFaceMistral, TorchaoMistral

    return (TorchaoMistral if variant == "torchao" else HuggingFaceMistral).build(config, precision)
