"""test_fp8/model/baselines.py: the losses and attentions of the cases of transformers' modules, and what ran."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from test_fp8.common.cases import Unavailable
from test_fp8.common.same_model import DifferentModel
from test_fp8.model import baselines
from test_fp8.model.baselines import pinned_sdpa, sdpa_operations, use_loss
from test_fp8.model.measure import named_attention
from tests.conftest import random_ids, small_config
from tests.test_fp8.test_bench_model import small_model


def stand_in(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """With Liger's signature and meaning."""
    assert (hidden.dim(), labels.dim()) == (2, 1)
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels)


@pytest.mark.parametrize("loss", ["torch", "compiled", "liger"])
def test_every_loss_is_the_same(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # a minute of a C++ compiler
    monkeypatch.setattr(baselines, "_liger", lambda model: stand_in)
    ids = random_ids(small_config(), 2, 33)
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[0, :5] = -100
    plain, model = small_model("hf"), small_model("hf")
    use_loss(model, loss)
    losses = [one(inputs, labels=labels).loss for one in (plain, model)]
    for one in losses:
        one.backward()
    assert losses[0] == losses[1] and torch.equal(model(inputs).logits, plain(inputs).logits)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_liger_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("hf")
    for installed in (False, True):
        monkeypatch.setattr(baselines, "is_installed", lambda package, found=installed: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=installed: found)
        with pytest.raises(Unavailable):
            use_loss(model, "liger")
        model.lm_head = torch.nn.Sequential(model.lm_head)  # as one that is swapped for torchao's


def test_what_ran_is_what_was_pinned(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU torch has flash and math. Its profiler prints nothing."""
    model, ids = small_model("hf"), random_ids(small_config(), 1, 32)
    for name in ("flash", "auto"):
        with pinned_sdpa(name):
            assert sdpa_operations(lambda: model(ids, labels=ids).loss.backward()) == ["flash"]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert sdpa_operations(lambda: model(ids)) == ["math"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.usefixtures("scalar_code")
def test_compiled_code_runs_what_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The key of torch's cache on the disk does not have what is pinned."""
    monkeypatch.setitem(baselines.BACKENDS, "math", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = torch.randn(1, 2, 32, 16)
    for name in ("flash", "math"):
        torch._dynamo.reset()
        attend = partial(torch.compile(torch.nn.functional.scaled_dot_product_attention), q, q, q)
        with pinned_sdpa(name):
            assert sdpa_operations(attend) == [name]


def test_another_attention_than_was_pinned_is_found() -> None:
    assert named_attention("torch SDPA", ["cudnn"], "cudnn") == "torch SDPA, cudnn"
    assert named_attention("torch SDPA", ["cudnn"], "auto") == "torch SDPA, cudnn"
    assert named_attention("flash (4.0.0b29)", [], "auto") == "flash (4.0.0b29)"
    with pytest.raises(DifferentModel):
        named_attention("torch SDPA", ["cudnn"], "flash")
