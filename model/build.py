"""Build a model variant from a configuration, with random initial weights or weights from a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from model import conversion, te_layer, te_linear
from model.config import ModelConfigError, head_dim
from model.fp8 import te_backend
from model.fp8.modules import apply_precision
from model.fp8.precision import Precision, PrecisionError, first_key
from model.hf_folder import check_init_from, read_hf_folder
from model.initialization import init_weights
from model.variants import (
    VARIANTS,
    GradientCheckpointing,
    Initialization,
    SpeedConfig,
    compiles,
    variant_problems,
)

if TYPE_CHECKING:
    from transformers import MistralConfig


def choose_attention(
    requested: str, variant: str, precision: Precision, config: MistralConfig, document_mask: bool = False
) -> str:
    """Select the attention backend of Transformer Engine for a model, and return the name of the backend.

    The choice takes effect in the next forward pass.

    Args:
        requested: the value of model.attention_backend.

    Raises BackendError if `document_mask` is true, but the backend cannot restrict attention to documents on this GPU.
    """
    if document_mask:
        requested = te_backend.document_attention(requested, precision.te, precision.dtype)
    elif VARIANTS[variant].te:
        requested = te_backend.fastest_attention(requested, precision.te, precision.dtype, head_dim(config))
    te_backend.choose_attention_backend(requested)
    return requested


def build_model(
    config: MistralConfig,
    variant: str,
    precision: Precision,
    *,
    seed: int = 0,
    initialization: Initialization = "scaled",
    init_from: str | None = None,
    gradient_checkpointing: GradientCheckpointing = False,
    speed: SpeedConfig | None = None,
    compile: bool | None = None,
    document_mask: bool = False,
) -> nn.Module:
    """Build a model for training on `precision.device` and in `precision.dtype`.

    Args:
        variant: a key of VARIANTS.
        seed: seed for random initial weights.
        initialization: how random initial weights are drawn (model.initialization).
        init_from: a Hugging Face folder with the initial weights. None initializes the weights randomly.
        compile: whether torch.compile compiles the layers of hf and torchao. None compiles only torchao on a GPU.
        document_mask: whether attention is restricted to the `documents` passed to each forward (te_linear and
            te_layer).

    Raises:
        ModelConfigError: If the variant does not support document masks.
        WeightsError: If `init_from` has a different architecture or unusable weights.
        PrecisionError: If the variant does not support the precision or `compile`, a pattern in bf16_modules matches
            no module, or FP8 does not support the sizes of the layers.
    """
    if problems := variant_problems(variant, precision.config, compile):
        raise PrecisionError("; ".join(problems), code="combination", key=first_key(problems[0]))
    if document_mask and not VARIANTS[variant].te:
        raise ModelConfigError(
            f"model.variant {variant} does not support document masks; choose te_linear or te_layer, or set "
            "data.document_mask to false",
            key="data.document_mask",
        )
    weights: Any = None
    if init_from is not None:  # fail before anything is allocated on a GPU
        check_init_from(init_from, config)
        weights = read_hf_folder(init_from, config, precision.dtype)
    model: Any = make_modules(config, variant, precision, speed or SpeedConfig(), document_mask)
    if VARIANTS[variant].te:
        if gradient_checkpointing == "mlp":
            model.pack_swiglu()
        elif gradient_checkpointing:
            model.recompute_layers()
    else:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiles(variant, precision.config, compile):
            model.compile_layers()
    apply_precision(model, precision)
    if weights is None:
        init_weights(model, seed, initialization)
    else:
        conversion.load_hf_state_dict(model, weights)
    return model


def make_modules(
    config: MistralConfig, variant: str, precision: Precision, speed: SpeedConfig, document_mask: bool = False
) -> nn.Module:
    """Build the modules of a model variant with uninitialized weights.

    The modules are on `precision.device`, which can be the meta device.
    """
    if VARIANTS[variant].te:
        module = te_linear if variant == "te_linear" else te_layer
        return module.MistralForCausalLM(config, precision, speed, document_mask)
    from model.hf import BASELINES

    return BASELINES[config.model_type].build(config, precision, variant)
