"""model/fp8/te_backend.py: the attention in use, as Transformer Engine records it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

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

    choose_attention_backend("flash")
    assert (os.environ["NVTE_FUSED_ATTN"], os.environ["NVTE_FLASH_ATTN"]) == ("0", "1")
    assert state["attention_params"] is None and state["backend_selection_requires_update"] is True
    assert attention_backend_in_use(SimpleNamespace(name="transformer_engine")) == NO_ATTENTION_YET
    choose_attention_backend("fused")
    choose_attention_backend("auto")
    assert os.environ["NVTE_FLASH_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in os.environ and "NVTE_UNFUSED_ATTN" not in os.environ
