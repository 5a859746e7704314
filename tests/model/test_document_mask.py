"""Attention and positions within documents: a packed batch is computed as if each document stood alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.build import build_model
from model.config import ModelConfigError
from model.documents import FEWEST_PIECES, Documents
from model.fp8.calibration import calibrate
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.startup_check import attention_errors, check_startup
from model.te_reference import DotProductAttention
from tests.conftest import refused, small_config
from tests.model.document_mask import (
    FP32,
    LENGTHS,
    PIECES,
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
    pieces,
    relative,
)


@kinds
@pytest.mark.parametrize(
    ("lengths", "window"), [(LENGTHS, None), (LENGTHS, 24), ([2] * (T // 2) + [T] * (B - 1), None)]
)
def test_packed_documents_equal_each_alone(kind: str, lengths: list[int], window: int | None) -> None:
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
@pytest.mark.parametrize("document_mask", [False, True])
def test_a_window_that_no_sample_reaches_is_dropped(
    monkeypatch: pytest.MonkeyPatch, kind: str, document_mask: bool
) -> None:
    """Of as many tokens as a sample, to Transformer Engine's eyes; of one token less it is there and counts."""
    given, forward = set(), DotProductAttention.forward

    def noted(self: DotProductAttention, *qkv: Tensor, **options: object) -> Tensor:
        given.add(options["window_size"])
        return forward(self, *qkv, **options)

    monkeypatch.setattr(DotProductAttention, "forward", noted)
    logits, windows = [], []
    for window in (None, T, T - 1):
        model = build(kind, window, document_mask, **FP32)
        given.clear()
        logits.append(model(batch(model.config)[0]).logits)
        windows.append(set(given))
        assert model.config.sliding_window == window
    assert windows == [{(-1, 0)}, {(-1, 0)}, {(T - 2, 0)}]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
    assert torch.equal(logits[0][:, : T - 1], logits[2][:, : T - 1])


@kinds
@pytest.mark.parametrize("keys", [FP32, {"compute": "bf16"}, *({"recipe": r} for r in ("delayed", "current", "block"))],
                         ids=lambda keys: "-".join(keys.values()))  # fmt: skip
def test_a_row_that_is_one_document_is_a_row_without_documents(kind: str, keys: dict) -> None:
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


def test_documents_have_few_shapes() -> None:
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


def test_what_is_refused() -> None:
    documents = documents_of(LENGTHS)
    with refused(ModelConfigError, key="data.document_mask"):
        build_model(small_config(), "hf", Precision(PrecisionConfig(compute="bf16")), document_mask=True)
    model = build("te_linear", document_mask=False, **FP32)
    ids = batch(model.config)[0]
    with pytest.raises(ValueError):
        model(ids, documents=documents)


@kinds
def test_the_startup_check_sees_the_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind, 40, recipe="delayed")
    check_startup(model, model.precision)
    assert max(attention_errors(model.config, model.precision, document_mask=True)) < 1e-2
    whole = Documents.whole_rows(2, 256, "cpu").attention_arguments()
    monkeypatch.setattr(Documents, "attention_arguments", lambda self: whole)
    assert max(attention_errors(model.config, model.precision, document_mask=True)) > 0.1


def test_calibration_within_documents() -> None:
    """The scales are those of the batch as it will be trained on."""
    states = []
    for documents in (documents_of(LENGTHS), documents_of([2] * 96)):
        model = build("te_layer", recipe="delayed")
        calibrate(model, model.precision, *batch(model.config), 1, documents)
        states.append(snapshot_fp8_state(model, model.precision))
    assert any(not torch.equal(t, states[1][key]) for key, t in states[0].items())
