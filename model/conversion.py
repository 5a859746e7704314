"""Convert weights losslessly between Hugging Face's names and the parameter names of each model variant.

Every parameter of a variant is one Hugging Face tensor, or several tensors stacked along the rows. `hf_parts` returns
this mapping. Exporting splits parameters into Hugging Face tensors, and loading copies them back.
| te_layer parameter                          | Hugging Face tensors, top to bottom                |
|---------------------------------------------|----------------------------------------------------|
| self_attention.layernorm_qkv.layer_norm_weight | input_layernorm.weight                          |
| self_attention.layernorm_qkv.weight         | self_attn.{q,k,v}_proj.weight                      |
| self_attention.{q,k}_norm_weight            | self_attn.{q,k}_norm.weight (Qwen3)                |
| self_attention.proj.weight                  | self_attn.o_proj.weight                            |
| layernorm_mlp.layer_norm_weight             | post_attention_layernorm.weight                    |
| layernorm_mlp.fc1_weight                    | mlp.gate_proj.weight, mlp.up_proj.weight           |
| layernorm_mlp.fc2_weight                    | mlp.down_proj.weight                               |
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import MistralConfig

from model.config import head_dim
from model.errors import UserError

Parts = list[tuple[str, int]]


class ConversionError(UserError, ValueError):
    """An error raised when the names or shapes of weights do not match the model."""

    code = "conversion"


def hf_parts(name: str, shape: torch.Size, config: MistralConfig) -> Parts:
    """Return (Hugging Face name, number of rows) for each tensor that is stacked in a variant's parameter `name`."""
    layer, _, rest = (
        name.partition(".self_attention.")
        if ".self_attention." in name
        else name.partition(".layernorm_mlp.")
    )
    if not rest:
        return [(name, shape[0])]  # hf, te_linear, and the modules around the layers of te_layer
    q, kv = config.num_attention_heads * head_dim(config), config.num_key_value_heads * head_dim(config)
    table: dict[str, Parts] = {
        "layernorm_qkv.layer_norm_weight": [("input_layernorm.weight", config.hidden_size)],
        "layernorm_qkv.weight": [
            ("self_attn.q_proj.weight", q),
            ("self_attn.k_proj.weight", kv),
            ("self_attn.v_proj.weight", kv),
        ],
        "q_norm_weight": [("self_attn.q_norm.weight", shape[0])],
        "k_norm_weight": [("self_attn.k_norm.weight", shape[0])],
        "proj.weight": [("self_attn.o_proj.weight", config.hidden_size)],
        "layer_norm_weight": [("post_attention_layernorm.weight", config.hidden_size)],
        "fc1_weight": [
            ("mlp.gate_proj.weight", config.intermediate_size),
            ("mlp.up_proj.weight", config.intermediate_size),
        ],
        "fc2_weight": [("mlp.down_proj.weight", config.hidden_size)],
    }
    return [(f"{layer}.{part}", rows) for part, rows in table[rest]]


def to_hf(weights: Mapping[str, torch.Tensor], config: MistralConfig) -> dict[str, torch.Tensor]:
    """Convert a variant's parameters to Hugging Face tensors. Returns contiguous copies keyed by Hugging Face name."""
    out = {}
    for name, tensor in weights.items():
        parts = hf_parts(name, tensor.shape, config)
        pieces = tensor.detach().split([rows for _, rows in parts])
        out.update({part: piece.clone() for (part, _), piece in zip(parts, pieces, strict=True)})
    return out


def to_hf_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model of any variant, keyed by Hugging Face name. Tied embeddings appear once, as
    embed_tokens.
    """
    return to_hf(dict(model.named_parameters()), model.config)


@torch.no_grad()
def load_hf_state_dict(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load Hugging Face weights into a model of any variant. With tied embeddings, `weights` must not contain lm_head.

    Raises ConversionError if tensors are missing, unknown or have the wrong shape.
    """
    parameters = dict(model.named_parameters())
    parts = {name: hf_parts(name, p.shape, model.config) for name, p in parameters.items()}
    expected = {part: (rows, *parameters[name].shape[1:]) for name, ps in parts.items() for part, rows in ps}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wrong := sorted(name for name in {*expected, *given} if given.get(name) != expected.get(name)):
        raise ConversionError(
            f"{len(wrong)} weights do not match the model: {', '.join(wrong[:5])}. For example, {wrong[0]} "
            f"has shape {given.get(wrong[0])}, but the model expects {expected.get(wrong[0])} (None means "
            "that the tensor does not exist)",
            key=wrong[0],
        )
    for name, parameter in parameters.items():
        rows = [rows for _, rows in parts[name]]
        for (part, _), target in zip(parts[name], parameter.split(rows), strict=True):
            target.copy_(weights[part])
