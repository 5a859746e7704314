"""Attention and positions within documents on a GPU: as each document alone, also in CUDA graphs and in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from model.documents import Documents, random_documents
from model.fp8 import te_backend
from model.fp8.state import snapshot_fp8_state
from model.graphs import ROOM, use_cuda_graphs
from model.startup_check import attention_errors
from tests.model.document_mask import (
    BF16_ERROR,
    FP32,
    LENGTHS,
    B,
    T,
    alone,
    batch,
    build,
    documents_of,
    gradients,
    kinds,
    largest_error,
    packed,
    relative,
)

backends = pytest.mark.parametrize("backend", ["flash", "fused"])


@pytest.fixture
def attention(backend: str) -> Iterator[str]:
    """The backend of the test, chosen for its time."""
    if backend not in te_backend.document_backends():
        pytest.skip(f"needs {backend} attention within documents, here is {te_backend.document_backends()}")
    te_backend.choose_attention_backend(backend)
    yield backend
    te_backend.choose_attention_backend("auto")


@contextmanager
def deterministic(backend: str) -> Iterator[bool]:
    """Deterministic kernels where the backend has them. Not around torch's own matrix products, for which cuBLAS would
    have to be told before its first."""
    has_them = backend == "flash"
    torch.use_deterministic_algorithms(has_them)
    try:
        yield has_them
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@kinds
@backends
@pytest.mark.parametrize("window", [None, 24])
def test_packed_documents_equal_each_alone_on_the_gpu(
    kind: str, backend: str, window: int | None, attention: str
) -> None:
    """Against the reference in float32, which gets each document by itself."""
    documents = documents_of(LENGTHS)
    model = build(kind, window, compute="bf16")
    ours = packed(model, documents)
    assert te_backend.attention_backend_in_use(model.precision.te).startswith(attention)
    theirs = alone(build(kind, window, document_mask=False, backend="reference", **FP32), documents)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-3)
    assert largest_error(ours, theirs) < BF16_ERROR
    assert max(attention_errors(model.config, model.precision, document_mask=True)) < 2e-2


@pytest.mark.gpu
@backends
def test_empty_pieces_change_nothing_on_the_gpu(backend: str, attention: str) -> None:
    documents = documents_of(LENGTHS)
    with deterministic(attention) as exactly:
        model = build("te_layer", compute="bf16")
        few, many = packed(model, documents), packed(model, documents.padded(8 * documents.pieces))
    assert largest_error(few, many) < 1e-2
    if exactly:
        assert torch.equal(few[0], many[0])
        assert all(torch.equal(g, many[2][name]) for name, g in few[2].items())


@pytest.mark.gpu
@kinds
@backends
@pytest.mark.parametrize("keys", [{"compute": "bf16"}, {"recipe": "delayed"}], ids=["bf16", "delayed"])
def test_graphs_replay_within_documents(kind: str, backend: str, keys: dict, attention: str) -> None:
    """Replayed passes equal launched ones, on documents that change; one batch in between has more than the graphs have
    room for, and is launched."""
    each = batches_of_documents()
    with deterministic(attention) as exactly:
        launched, replayed = (trained(kind, each, graphs, keys) for graphs in (False, True))
    for a, b in zip(launched, replayed, strict=True):
        assert max((relative(x, y) for x, y in zip(a, b, strict=True)), default=0) < BF16_ERROR
        if exactly:
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def batches_of_documents() -> list[Documents]:
    """Of 4 rows each."""
    generator = torch.Generator().manual_seed(0)
    return [random_documents(4, T, mean, generator) for mean in (20, 30, 9, 2, 12)]


def test_one_of_these_batches_does_not_fit_in() -> None:
    room, *others = (documents.pieces for documents in batches_of_documents())
    assert [pieces <= ROOM * room for pieces in others] == [True, True, False, True]


def trained(kind: str, each: list[Documents], graphs: bool, keys: dict) -> list[list[Tensor]]:
    """Loss and gradients of a pass for each batch, then FP8 state, then logits of an evaluation."""
    model = build(kind, **keys)
    device = model.precision.device
    ids, labels = (t.to(device) for t in batch(model.config, 4 * len(each)))
    if graphs:
        use_cuda_graphs(model, model.precision, ids[:4], labels[:4], True, each[0].to(device))
    found = []
    for i, documents in enumerate(each):
        model.zero_grad(set_to_none=True)
        rows = slice(4 * i, 4 * i + 4)
        first, within = i % 2 == 0, documents.to(device)
        loss = model(ids[rows], labels=labels[rows], is_first_microbatch=first, documents=within).loss
        (loss / 2).backward()
        found.append([loss.detach(), *gradients(model).values()])
    # empty histories, of which there are some, have no relative error
    found.append([t for t in snapshot_fp8_state(model, model.precision).values() if t.any()])
    with torch.no_grad():
        found.append([model(ids[:B], documents=documents_of(LENGTHS).to(device)).logits])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_within_documents_on_the_gpu(kind: str, recipe: str) -> None:
    """FP8 on the GPU is as near to bf16 as the reference's FP8 is."""
    documents = documents_of(LENGTHS)
    te_backend.choose_attention_backend(te_backend.document_backends()[0])
    try:
        exact = packed(build(kind, compute="bf16"), documents)
        ours = packed(build(kind, recipe=recipe), documents)
        reference = packed(build(kind, recipe=recipe, backend="reference"), documents)
    finally:
        te_backend.choose_attention_backend("auto")
    assert relative(ours[0], exact[0]) < 1.5 * relative(reference[0], exact[0])
    assert largest_error(ours, exact) < 1.5 * largest_error(reference, exact) + 1e-2
