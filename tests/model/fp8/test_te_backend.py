"""model/fp8/te_backend.py: the attention in use, as Transformer Engine records it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from model.fp8 import te_backend
from model.fp8.te_backend import NO_ATTENTION_YET, attention_backend_in_use, choose_attention_backend

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
# what Transformer Engine starts with
AT_START = dict.fromkeys(
    ("use_flash_attention", "flash_attention_backend", "use_fused_attention", "fused_attention_backend",
     "use_unfused_attention")
)  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ({}, NO_ATTENTION_YET),
        ({"use_flash_attention": True, "flash_attention_backend": "2.7"}, "flash (2.7)"),
        ({"use_fused_attention": True, "fused_attention_backend": "F16"}, "fused (cuDNN, F16)"),
        ({"use_fused_attention": False, "use_unfused_attention": True}, "unfused"),
    ],
)
def test_attention_in_use(monkeypatch: pytest.MonkeyPatch, chosen: dict, name: str) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(_attention_backends=AT_START | chosen))
    assert attention_backend_in_use(SimpleNamespace(name="transformer_engine")) == name


@pytest.mark.parametrize("chosen", ["", "/of/the/user"])
@pytest.mark.parametrize("bundled", [True, False])
def test_the_cudnn_of_torch_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch, chosen: str, bundled: bool
) -> None:
    package = SimpleNamespace(__path__=["/of/torch"]) if bundled else None
    monkeypatch.setitem(sys.modules, "nvidia.cudnn", package)
    monkeypatch.setenv("CUDNN_HOME", chosen)
    if not chosen:
        monkeypatch.delenv("CUDNN_HOME")
    te_backend._prefer_torchs_cudnn()
    assert os.environ.get("CUDNN_HOME", "") == (chosen or ("/of/torch" if bundled else ""))


@pytest.mark.parametrize(
    ("capability", "recipe", "available", "problem"),
    [
        ((9, 0), "delayed", False, None),
        ((9, 0), "block", True, None),
        ((9, 0), "block", False, "recipe block is not available on NVIDIA X: CUDA is too old; use delayed or current"),
        ((8, 9), "delayed", True, 'needs a Hopper GPU .*NVIDIA X has 8.9; set precision.compute to "bf16"'),
    ],
)  # fmt: skip
def test_what_fp8_asks_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple, recipe: str, available: bool, problem: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    asked = SimpleNamespace(
        is_fp8_block_scaling_available=lambda return_reason: (available, "CUDA is too old")
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", asked)
    te = SimpleNamespace(name="transformer_engine")
    if problem is None:
        te_backend.require_fp8(te, recipe)
    else:
        with pytest.raises(te_backend.BackendError, match=problem):
            te_backend.require_fp8(te, recipe)
        with pytest.raises(
            te_backend.BackendError, match=problem.replace("use delayed or current", "go home$")
        ):
            te_backend.require_fp8(te, recipe, "go home")
    te_backend.require_fp8(SimpleNamespace(name="reference"), recipe)


def test_a_gpu_without_transformer_engine_is_no_reason_for_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(te_backend, "_prefer_torchs_cudnn", lambda: None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    monkeypatch.setattr(
        te_backend, "_load_transformer_engine", te_backend._load_transformer_engine.__wrapped__
    )
    with pytest.raises(te_backend.BackendError, match=r"there is a CUDA device, but .*requirements-gpu\.txt"):
        te_backend.load("auto")


def test_attention_of_the_reference() -> None:
    assert attention_backend_in_use(SimpleNamespace(name="reference")) == "torch SDPA"


def test_a_choice_of_attention_takes_effect_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a forward, when TE has chosen for these shapes; "auto" is the user's environment again."""
    monkeypatch.setattr(te_backend, "_attention_environment", {})
    for variable, value in (("NVTE_FUSED_ATTN", None), ("NVTE_FLASH_ATTN", "0"), ("NVTE_UNFUSED_ATTN", None)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    made = {
        "attention_params": "of these shapes",
        "use_fused_attention": True,
        "fused_attention_backend": "F16",
    }
    state = AT_START | made | {"backend_selection_requires_update": False}
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(_attention_backends=state))

    switches = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")
    for name, expected in (("fused", "100"), ("unfused", "001"), ("flash", "010")):
        choose_attention_backend(name)
        assert "".join(os.environ[switch] for switch in switches) == expected
    assert state["attention_params"] is None and state["backend_selection_requires_update"] is True
    assert attention_backend_in_use(SimpleNamespace(name="transformer_engine")) == NO_ATTENTION_YET
    choose_attention_backend("fused")
    choose_attention_backend("auto")
    assert os.environ["NVTE_FLASH_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in os.environ and "NVTE_UNFUSED_ATTN" not in os.environ
