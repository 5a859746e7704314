"""model/graphs.py: a replay is the pass that was captured, on other data; on a GPU, and without one on tapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model.build import build_model
from model.documents import Documents
from model.fp8.gemms import count_gemms
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.graphs import ROOM, use_cuda_graphs
from model.te_reference.attention import DotProductAttention
from tests.conftest import random_ids, small_config
from tests.model.cuda_graphs import use_tapes

COMPUTES = [{"compute": "bf16"}, {"recipe": "delayed"}, {"recipe": "current"}, {"recipe": "block"}]
computes = pytest.mark.parametrize("compute", COMPUTES, ids=lambda c: str(*c.values()))
on_tapes = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
PASSES = 6


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        use_tapes(monkeypatch)
    yield
    torch.use_deterministic_algorithms(False)


def model_and_batches(
    variant: str = "te_layer", document_mask: bool = False, **compute: object
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, int64 input ids and labels [2 x PASSES, 64]."""
    precision = Precision(PrecisionConfig(**compute))
    config = small_config(head_dim=64, num_hidden_layers=1)
    model = build_model(config, variant, precision, seed=3, document_mask=document_mask).train()
    ids = random_ids(model.config, 2 * PASSES, 65).to(precision.device)
    return model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def passes(graphs: bool, variant: str, cache_weights: bool, compute: dict) -> list[torch.Tensor]:
    """Losses and gradients of passes on data that changes, with weights that change; FP8 state; an evaluation."""
    model, inputs, labels = model_and_batches(variant, **compute)
    if cache_weights:  # as calibration does, so that there is FP8 state to be kept
        model(inputs[:2], labels=labels[:2]).loss.backward()
    if graphs:
        use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], cache_weights)
    found = []
    for i in range(PASSES):
        model.zero_grad(set_to_none=True)
        rows = slice(2 * i, 2 * i + 2)
        first = i % 3 == 0 if cache_weights else None
        loss = model(inputs[rows], labels=labels[rows], is_first_microbatch=first).loss
        (loss / 2).backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        if i % 3 == 2:  # a step of the optimizer
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    found += list(snapshot_fp8_state(model, model.precision).values())
    with torch.no_grad():
        found.append(model(inputs[:3]).logits)
    return found


def check_replays(variant: str, cache_weights: bool, compute: dict) -> None:
    launched, replayed = (passes(graphs, variant, cache_weights, compute) for graphs in (False, True))
    assert len(launched) == len(replayed)
    assert all(torch.equal(a, b) for a, b in zip(launched, replayed, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("cache_weights", [True, False])
@computes
def test_graphs_replay_what_was_captured(variant: str, cache_weights: bool, compute: dict) -> None:
    check_replays(variant, cache_weights, compute)


@on_tapes
@pytest.mark.parametrize("variant", ["te_layer", pytest.param("te_linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
@computes
def test_tapes_replay_what_was_captured(variant: str, cache_weights: bool, compute: dict) -> None:
    check_replays(variant, cache_weights, compute)


def captured(document_mask: bool = False, documents: Documents | None = None) -> tuple:
    """A model with graphs for 2 x 64 tokens, its batches, and what the forwards that were not replays were given."""
    model, inputs, labels = model_and_batches(document_mask=document_mask, recipe="current")
    launched: list[tuple] = []
    eager = model.forward

    def forward(ids: torch.Tensor, **arguments: object) -> object:
        launched.append((tuple(ids.shape), {k: v for k, v in arguments.items() if v is not None}))
        return eager(ids, **arguments)

    model.forward = forward
    use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True, documents)
    launched.clear()
    return model, inputs, labels, launched


def test_other_calls_are_launched() -> None:
    model, inputs, labels, launched = captured()
    few, first = {"labels": labels[:2]}, {"is_first_microbatch": True}
    model(inputs[:2], **few, **first).loss.backward()
    model(inputs[:2], **few, is_first_microbatch=False).loss.backward()
    assert launched == []
    model(inputs[:3], labels=labels[:3], **first)  # another shape
    model(inputs[:2], **few)  # not captured: quantizes its weights
    model(inputs[:2], **first)  # no loss
    with torch.no_grad():
        model(inputs[:2], **few, **first)
    model.eval()
    model(inputs[:2], **few, **first)
    assert [shape for shape, _ in launched] == [(3, 64), *[(2, 64)] * 4]
    given = [{"labels", *first}, {"labels"}, {*first}, {"labels", *first}, {"labels", *first}]
    assert [arguments.keys() for _, arguments in launched] == given


def pieces(length: int) -> Documents:
    """2 x 64 tokens in documents of so many."""
    return Documents.of((torch.arange(128) % length).view(2, 64)).to(Precision(PrecisionConfig()).device)


def attend_packed(
    self: DotProductAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """The reference's attention within documents in tensor operations alone, as a GPU's: [T, N, D] -> [T, N * D]."""
    assert window == -1  # none is reached
    place = torch.arange(len(q))
    piece = torch.searchsorted(bounds, place, right=True)
    visible = (piece[:, None] == piece) & (place[:, None] >= place)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@on_tapes
def test_documents_of_each_batch_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DotProductAttention, "_attend_packed", attend_packed)
    few = pieces(64)
    with pytest.raises(ValueError):
        captured(True)
    model, inputs, labels, launched = captured(True, few)
    plain, *_ = model_and_batches(document_mask=True, recipe="current")
    for documents in (few, pieces(16), pieces(2)):  # the last of twice as many as there were in the capture
        results = []
        for m in (model, plain):
            m.zero_grad(set_to_none=True)
            loss = m(inputs[:2], labels=labels[:2], is_first_microbatch=True, documents=documents).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in m.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert launched == []
    assert pieces(1).pieces > ROOM * few.pieces
    model(
        inputs[:2], labels=labels[:2], is_first_microbatch=True
    )  # each row is a document: not what was captured
    assert len(launched) == 1 and "documents" not in launched.pop()[1]
    many = pieces(1)
    model(inputs[:2], labels=labels[:2], is_first_microbatch=True, documents=many)
    assert [shape for shape, _ in launched] == [(2, 64)] and launched[0][1]["documents"] is many


@pytest.mark.parametrize("outer", [False, True])
def test_replays_are_counted_as_what_was_captured(outer: bool) -> None:
    """Also by who counts while the graphs are made, which is no pass of his."""
    model, inputs, labels = model_and_batches(recipe="delayed")

    def capture() -> None:
        use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True)

    if not outer:
        capture()
    with count_gemms(model, model.precision) as gemms:
        if outer:
            capture()
        for first in (True, False, False):
            model(inputs[:2], labels=labels[:2], is_first_microbatch=first).loss.backward()
    assert gemms.forward.total() == 3 * 4 and not gemms.problem(passes=3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_capturing_draws_no_random_numbers(device: str) -> None:
    """A resumed run captures where the one that went on did not. On a GPU attention alone would draw some."""
    model, inputs, labels = model_and_batches(recipe="delayed")
    drawn = []
    hook = model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(1, device=device)) and None)
    generator = torch.cuda if device == "cuda" else torch
    before = generator.get_rng_state()
    use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True)
    hook.remove()
    assert drawn and torch.equal(generator.get_rng_state(), before)


def test_angles_that_inference_made_are_trained_with() -> None:
    model, inputs, labels = model_and_batches("te_linear", compute="bf16")
    with torch.inference_mode():
        model(inputs[:2])
    model(inputs[:2], labels=labels[:2]).loss.backward()
