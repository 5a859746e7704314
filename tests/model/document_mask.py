"""Packed batches of documents, and the same documents each alone, for the tests of document masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.build import build_model
from model.documents import Documents
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import reset_fp8_state
from model.variants import SpeedConfig
from tests.conftest import random_ids, small_config

B, T = 3, 64
# Rows of 64 tokens: a document as long as a row; documents of 2 tokens; one that goes on in the next row, which does
# not see the former; one that ends with a row.
LENGTHS = [64, 2, 2, 10, 30, 50, 4, 30]
PIECES = [64, 2, 2, 10, 30, 20, 30, 4, 30]
FP32 = {"compute": "fp32"}
# of a small model's gradients against float32; test_document_mask.py holds the CPU reference to it
BF16_ERROR = 5e-2
# te_layer with te.TransformerLayer itself, and with the parts of it that this project puts together
KINDS = {
    "te_linear": ("te_linear", None),
    "te_layer": ("te_layer", None),
    "te_layer_plain": ("te_layer", SpeedConfig.off()),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def documents_of(lengths: list[int], rows: int = B, tokens: int = T) -> Documents:
    """Of a batch that is the beginning of a stream of documents with these lengths; computed token by token."""
    in_document = [position for length in lengths for position in range(length)]
    positions: list[int] = []
    for index in range(rows * tokens):
        new = index % tokens == 0 or in_document[index] == 0
        positions.append(0 if new else positions[-1] + 1)
    return Documents.of(torch.tensor(positions).view(rows, tokens))


def pieces(documents: Documents) -> list[slice]:
    bounds = documents.cu_seqlens.tolist()
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


def build(kind: str, window: int | None = None, document_mask: bool = True, **keys: object) -> nn.Module:
    variant, speed = KINDS[kind]
    precision = Precision(PrecisionConfig(**keys))
    config = small_config(sliding_window=window, head_dim=64)
    model = build_model(config, variant, precision, seed=2, speed=speed, document_mask=document_mask)
    return model.train()


def batch(config: object, rows: int = B, tokens: int = T) -> tuple[Tensor, Tensor]:
    """input_ids and labels, of which a few are ignored."""
    ids, labels = random_ids(config, rows, tokens), random_ids(config, rows, tokens, seed=1)
    labels[:, 5::20] = -100
    return ids, labels


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def packed(model: nn.Module, documents: Documents) -> tuple[Tensor, float, dict[str, Tensor]]:
    """(logits [B * T, V], loss, gradients) of one batch."""
    device = model.precision.device
    ids, labels = (t.to(device) for t in batch(model.config))
    with torch.no_grad():
        logits = model(ids, documents=documents.to(device)).logits
    model.zero_grad()
    loss = model(ids, labels=labels, documents=documents.to(device)).loss
    loss.backward()
    return logits.flatten(0, 1).float(), float(loss.detach()), gradients(model)


def alone(model: nn.Module, documents: Documents) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The same from a model without a document mask, which gets each piece of a document by itself."""
    ids, labels = (t.to(model.precision.device).flatten() for t in batch(model.config))
    count = int((labels != -100).sum())
    logits = []
    model.zero_grad()
    total = 0.0
    for piece in pieces(documents):
        reset_fp8_state(model, model.precision)
        logits.append(model(ids[None, piece]).logits[0])
        loss = F.cross_entropy(logits[-1].float(), labels[piece], reduction="sum") / count
        loss.backward()
        total += float(loss.detach())
    return torch.cat(logits).detach().float(), total, gradients(model)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def largest_error(ours: tuple, theirs: tuple) -> float:
    """Of logits and of each gradient."""
    errors = [relative(ours[2][name], gradient) for name, gradient in theirs[2].items()]
    return max(relative(ours[0], theirs[0]), *errors)
