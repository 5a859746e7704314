"""The section "speed": switches and CUDA graphs change how a model is computed, not what."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.build import build_model, make_modules
from model.checks.gemm_counts import count_gemms
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import snapshot_fp8_state
from model.graphs import use_cuda_graphs
from model.variants import SpeedConfig
from tests.conftest import random_ids, small_config
from tests.model.cuda_graphs import use_tapes

COMPUTES = [{"compute": "bf16"}, {"recipe": "delayed"}, {"recipe": "current"}, {"recipe": "block"}]
PASSES = 6


def test_fused_swiglu_of_te_layer() -> None:
    """The other switches: test_numerics.py disables the kernel of each, if it is wrong."""
    precision = Precision(PrecisionConfig(backend="reference"), torch.device("meta"))
    precision.te = SimpleNamespace(**vars(precision.te) | {"fused_swiglu": "fused"})
    for is_on, activation in ((True, "fused"), (False, None)):
        speed = dataclasses.replace(SpeedConfig(), fused_swiglu=is_on)
        layers = make_modules(small_config(), "te_layer", precision, speed).model.layers
        assert [getattr(layer.layernorm_mlp, "activation", None) for layer in layers] == [activation] * 2


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        use_tapes(monkeypatch)


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


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("variant", ["te_layer", pytest.param("te_linear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compute", COMPUTES, ids=lambda c: str(*c.values()))
def test_cuda_graph_replay(variant: str, cache_weights: bool, compute: dict) -> None:
    launched, replayed = (passes(graphs, variant, cache_weights, compute) for graphs in (False, True))
    assert len(launched) == len(replayed) and all(map(torch.equal, launched, replayed))


def test_unsupported_calls_skip_the_graph() -> None:
    model, inputs, labels = model_and_batches(recipe="current")
    launched: list[tuple] = []
    eager = model.forward

    def forward(ids: torch.Tensor, **arguments: object) -> object:
        launched.append((len(ids), {key for key, value in arguments.items() if value is not None}))
        return eager(ids, **arguments)

    model.forward = forward
    use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True)
    launched.clear()
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
    both = {"labels", "is_first_microbatch"}
    assert launched == [(3, both), (2, {"labels"}), (2, {"is_first_microbatch"}), (2, both), (2, both)]


def test_capture_with_document_mask() -> None:
    model, inputs, labels = model_and_batches(document_mask=True, recipe="current")
    with pytest.raises(ValueError):
        use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True)


@pytest.mark.parametrize("outer", [False, True])
def test_replayed_gemms_are_counted(outer: bool) -> None:
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
def test_capture_keeps_the_random_state(device: str) -> None:
    """A resumed run captures where the one that went on did not. On a GPU attention alone would draw some."""
    model, inputs, labels = model_and_batches(recipe="delayed")
    drawn = []
    hook = model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(1, device=device)) and None)
    generator = torch.cuda if device == "cuda" else torch
    before = generator.get_rng_state()
    use_cuda_graphs(model, model.precision, inputs[:2], labels[:2], True)
    hook.remove()
    assert drawn and torch.equal(generator.get_rng_state(), before)


def test_rotary_cache_from_inference_mode() -> None:
    model, inputs, labels = model_and_batches("te_linear", compute="bf16")
    with torch.inference_mode():
        model(inputs[:2])
    model(inputs[:2], labels=labels[:2]).loss.backward()
