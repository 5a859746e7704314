"""Draw the initial weights of a model (model.initialization).

"normal" draws every matrix, embeddings included, from normal(0, initializer_range), as transformers does. The embedding
is then much smaller than the outputs of the layers. The residual stream hardly depends on the token, and rounding
errors grow with depth and width. With "scaled", the embedding dominates the residual stream at first, at every size of
a model. FP8 gradients are as accurate as with trained weights (docs/validation.md).
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import MistralConfig

from model.conversion import hf_parts
from model.variants import Initialization


def standard_deviation(
    name: str, columns: int, config: MistralConfig, initialization: Initialization
) -> float:
    """Return the standard deviation for the initial weights of a matrix.

    With "normal", it is initializer_range for every matrix. With "scaled", it depends on the matrix:

    - Embedding: 1, similar to torchtitan's Llama 3, or 1 / sqrt(hidden size) if lm_head shares the weight.
    - Decoder layers: 1 / sqrt(columns) (LeCun et al. 1998). The outputs of the output projections are added to the
      embedding, so these matrices are also multiplied by its standard deviation, and divided by sqrt(2 * layers).
    - lm_head: initializer_range.

    Args:
        name: Hugging Face name of the matrix.
        columns: input width of the matrix.
    """
    module = name.split(".")[-2]
    if initialization == "scaled":
        # a tied embedding is also lm_head: with 1, all logits would be large, and not only that of the input token
        embedding = config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0
        if module == "embed_tokens":
            return embedding
        if module in ("o_proj", "down_proj"):
            return embedding * (columns * 2 * config.num_hidden_layers) ** -0.5
        if ".layers." in name:
            return columns**-0.5
    return config.initializer_range


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, initialization: Initialization = "scaled") -> None:
    """Initialize a model's weights from scratch. Norm weights are set to 1.

    Each Hugging Face tensor has its own float32 random stream, seeded with (seed, tensor name). On the same type of
    device, a seed therefore produces the same model in every variant and, up to rounding, in every precision.
    """
    for name, parameter in model.named_parameters():
        parts = hf_parts(name, parameter.shape, model.config)
        for (part, _), target in zip(parts, parameter.split([rows for _, rows in parts]), strict=True):
            if target.dim() == 1:
                target.fill_(1.0)
                continue
            key = int.from_bytes(hashlib.sha256(f"{seed}/{part}".encode()).digest()[:7], "little")
            generator = torch.Generator(device=target.device).manual_seed(key)
            noise = torch.randn(target.shape, generator=generator, device=target.device, dtype=torch.float32)
            target.copy_(noise * standard_deviation(part, target.shape[1], model.config, initialization))
