"""model/te_backend.py: the attention in use, as Transformer Engine records it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from model.te_backend import NO_ATTENTION_YET, attention_backend_in_use

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
