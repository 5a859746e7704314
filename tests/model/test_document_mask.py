"""Attention and positions within documents: a packed batch is computed as if each document stood alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.build import build_model
from model.checks.startup import attention_errors, check_startup
from model.config import ModelConfigError
from model.documents import FEWEST_PIECES, Documents, random_documents, reached
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import calibrate, reset_fp8_state, snapshot_fp8_state
from model.graphs import CAPACITY_FACTOR, use_cuda_graphs
from model.variants import SpeedConfig
from tests.conftest import random_ids, refused, small_config
from tests.model.conftest import gradients, relative

B, T = 3, 64
# Rows of 64 tokens: a document as long as a row; two short documents; one that continues in the next row, where it
# cannot attend to its first part; one that ends with a row.
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
    return Documents.from_positions(torch.tensor(positions).view(rows, tokens))


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
    """Return input_ids and labels. A few labels are ignored."""
    ids, labels = random_ids(config, rows, tokens), random_ids(config, rows, tokens, seed=1)
    labels[:, 5::20] = -100
    return ids, labels


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


def largest_error(ours: tuple, theirs: tuple) -> float:
    """Of logits and of each gradient."""
    errors = [relative(ours[2][name], gradient) for name, gradient in theirs[2].items()]
    return max(relative(ours[0], theirs[0]), *errors)


@kinds
@pytest.mark.parametrize(
    ("lengths", "window"), [(LENGTHS, None), (LENGTHS, 24), ([2] * (T // 2) + [T] * (B - 1), None)]
)
def test_packed_documents_equal_separate_documents(kind: str, lengths: list[int], window: int | None) -> None:
    documents = documents_of(lengths)
    assert lengths != LENGTHS or [p.stop - p.start for p in pieces(documents)] == PIECES
    ours = packed(build(kind, window, **FP32), documents)
    theirs = alone(build(kind, window, document_mask=False, **FP32), documents)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
    assert largest_error(ours, theirs) < 2e-6
    # and what is compared depends on the mask
    plain = packed(build(kind, window, **FP32), Documents.whole_rows(B, T, "cpu"))
    assert largest_error(plain, theirs) > 0.1


@kinds
@pytest.mark.parametrize("keys", [FP32, {"compute": "bf16"}, {"recipe": "delayed"},
                                  *(pytest.param({"recipe": r}, marks=pytest.mark.slow) for r in ("current", "block"))],
                         ids=lambda keys: "-".join(keys.values()))  # fmt: skip
def test_single_document_equals_causal_attention(kind: str, keys: dict) -> None:
    """With gradients, in FP8 too; and no documents mean that."""
    ours, theirs = build(kind, **keys), build(kind, document_mask=False, **keys)
    ids, labels = batch(ours.config)
    results = []
    for model in (ours, theirs):
        loss = model(ids, labels=labels).loss
        loss.backward()
        results.append((float(loss.detach()), gradients(model), snapshot_fp8_state(model, model.precision)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    tolerance = {"fp32": 1e-6}.get(keys.get("compute", ""), 2e-2)
    assert max(relative(g, results[1][1][name]) for name, g in results[0][1].items()) < tolerance
    assert results[0][2].keys() == results[1][2].keys()


def test_number_of_pieces_is_rounded() -> None:
    documents = documents_of(LENGTHS)
    ends = [0, 64, 66, 68, 78, 108, 128, 158, 162, *[192] * (FEWEST_PIECES - 8)]
    assert documents.cu_seqlens.tolist() == ends
    assert (documents.pieces, documents.longest, documents.cu_seqlens.dtype) == (
        FEWEST_PIECES,
        T,
        torch.int32,
    )
    assert [documents_of([2] * n, 1, 2 * n).pieces for n in (32, 33, 64, 65, 96)] == [32, 64, 64, 128, 128]
    other = documents_of([2] * 20 + [40, 64, 48])
    room = documents.padded(2 * FEWEST_PIECES).clone()
    room.copy_(other)
    assert pieces(room) == pieces(other) and torch.equal(room.positions, other.positions)


def test_invalid_documents_raise() -> None:
    documents = documents_of(LENGTHS)
    with refused(ModelConfigError, key="data.document_mask"):
        build_model(small_config(), "hf", Precision(PrecisionConfig(compute="bf16")), document_mask=True)
    model = build("te_linear", document_mask=False, **FP32)
    ids = batch(model.config)[0]
    with pytest.raises(ValueError):
        model(ids, documents=documents)


@kinds
def test_startup_check_with_document_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind, 40, recipe="delayed")
    check_startup(model, model.precision)
    assert max(attention_errors(model.config, model.precision, document_mask=True)) < 1e-2
    whole = Documents.whole_rows(2, 256, "cpu").attention_arguments()
    monkeypatch.setattr(Documents, "attention_arguments", lambda self: whole)
    assert max(attention_errors(model.config, model.precision, document_mask=True)) > 0.1


def test_calibration_with_document_mask() -> None:
    """The scales are those of the batch as it will be trained on."""
    states = []
    for documents in (documents_of(LENGTHS), documents_of([2] * 96)):
        model = build("te_layer", recipe="delayed")
        calibrate(model, model.precision, *batch(model.config), 1, documents)
        states.append(snapshot_fp8_state(model, model.precision))
    assert any(not torch.equal(t, states[1][key]) for key, t in states[0].items())


backends = pytest.mark.parametrize("backend", ["flash", "fused"])


@pytest.fixture
def attention(backend: str) -> str:
    """The backend of the test, chosen for its time."""
    if backend not in te_backend.document_backends():
        pytest.skip(f"needs {backend} attention within documents, here is {te_backend.document_backends()}")
    te_backend.choose_attention_backend(backend)
    return backend


@pytest.mark.gpu
@kinds
@backends
@pytest.mark.parametrize("window", [None, 24])
def test_packed_documents_equal_separate_documents_on_gpu(
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
def test_empty_pieces_on_gpu(backend: str, attention: str) -> None:
    documents = documents_of(LENGTHS)
    torch.use_deterministic_algorithms(attention == "flash")  # cuDNN has no such kernels
    model = build("te_layer", compute="bf16")
    few, many = packed(model, documents), packed(model, documents.padded(8 * documents.pieces))
    assert largest_error(few, many) < 1e-2
    if attention == "flash":
        assert torch.equal(few[0], many[0])
        assert all(torch.equal(g, many[2][name]) for name, g in few[2].items())


@pytest.mark.gpu
@kinds
@backends
@pytest.mark.parametrize("keys", [{"compute": "bf16"}, {"recipe": "delayed"}], ids=["bf16", "delayed"])
def test_cuda_graphs_with_document_mask(kind: str, backend: str, keys: dict, attention: str) -> None:
    """Replayed passes equal launched ones, on documents that change; one batch in between has more than the graphs have
    room for, and is launched."""
    each = batches_of_documents()
    torch.use_deterministic_algorithms(attention == "flash")
    launched, replayed = (trained(kind, each, graphs, keys) for graphs in (False, True))
    for a, b in zip(launched, replayed, strict=True):
        assert max((relative(x, y) for x, y in zip(a, b, strict=True)), default=0) < BF16_ERROR
        if attention == "flash":
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def batches_of_documents() -> list[Documents]:
    """Of 4 rows each."""
    generator = torch.Generator().manual_seed(0)
    return [random_documents(4, T, mean, generator) for mean in (20, 30, 9, 2, 12)]


def test_batch_with_too_many_pieces() -> None:
    room, *others = (documents.pieces for documents in batches_of_documents())
    assert [pieces <= CAPACITY_FACTOR * room for pieces in others] == [True, True, False, True]


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
    # some histories are empty and have no relative error
    found.append([t for t in snapshot_fp8_state(model, model.precision).values() if t.any()])
    with torch.no_grad():
        found.append([model(ids[:B], documents=documents_of(LENGTHS).to(device)).logits])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_with_document_mask_on_gpu(kind: str, recipe: str) -> None:
    """FP8 on the GPU is as near to bf16 as the reference's FP8 is."""
    documents = documents_of(LENGTHS)
    te_backend.choose_attention_backend(te_backend.document_backends()[0])
    exact = packed(build(kind, compute="bf16"), documents)
    ours = packed(build(kind, recipe=recipe), documents)
    reference = packed(build(kind, recipe=recipe, backend="reference"), documents)
    assert relative(ours[0], exact[0]) < 1.5 * relative(reference[0], exact[0])
    assert largest_error(ours, exact) < 1.5 * largest_error(reference, exact) + 1e-2


@pytest.mark.parametrize(
    ("window", "longest", "reached_window"),
    [((-1, 0), 64, (-1, 0)), ((63, 0), 64, (-1, 0)), ((62, 0), 64, (62, 0))],
)
def test_unreachable_window_is_dropped(
    window: tuple[int, int], longest: int, reached_window: tuple[int, int]
) -> None:
    assert reached(window, longest) == reached_window
