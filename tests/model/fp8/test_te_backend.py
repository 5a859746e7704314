"""model/fp8/te_backend.py: the attention in use, as Transformer Engine records it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from model.fp8 import te_backend
from model.fp8.te_backend import NO_ATTENTION, attention_backend_in_use, choose_attention_backend
from model.variants import ATTENTION_BACKENDS
from tests.conftest import refused

MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
# what Transformer Engine starts with
AT_START = dict.fromkeys(
    ("use_flash_attention", "flash_attention_backend", "use_fused_attention", "fused_attention_backend",
     "use_unfused_attention")
)  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ({}, NO_ATTENTION),
        ({"use_flash_attention": True, "flash_attention_backend": "2.7"}, "flash (2.7)"),
        ({"use_fused_attention": True, "fused_attention_backend": "F16"}, "fused (cuDNN, F16)"),
        ({"use_fused_attention": False, "use_unfused_attention": True}, "unfused"),
    ],
)
def test_attention_backend_in_use(monkeypatch: pytest.MonkeyPatch, chosen: dict, name: str) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(_attention_backends=AT_START | chosen))
    assert attention_backend_in_use(SimpleNamespace(name="transformer_engine")) == name


def test_gpu_without_transformer_engine_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(te_backend, "_prefer_bundled_cudnn", lambda: None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with refused(te_backend.BackendError, code="not_installed"):
        te_backend.load("auto")


@pytest.mark.parametrize(
    ("asked", "version", "dtype", "head_dim", "capability", "chosen"),
    [
        ("auto", "4.0.0b29", torch.bfloat16, 64, (9, 0), "flash"),
        ("auto", "4.0.0b29", torch.float16, 256, (9, 0), "flash"),
        ("auto", "4.0.0b29", torch.float32, 64, (9, 0), "auto"),
        ("auto", "4.0.0b29", torch.bfloat16, 32, (9, 0), "auto"),
        ("auto", "4.0.0b30", torch.bfloat16, 64, (9, 0), "auto"),
        ("auto", "4.0.0b29", torch.bfloat16, 64, (8, 9), "auto"),
        ("auto", "4.0.0b29", torch.bfloat16, 64, (10, 0), "auto"),
        ("auto", None, torch.bfloat16, 64, (9, 0), "auto"),
        ("fused", "4.0.0b29", torch.bfloat16, 64, (9, 0), "fused"),
    ],
)
def test_flash_attention_4_selection(
    asked: str,
    version: str | None,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second time, when the first choice stands in the environment; not against what the user's says."""
    monkeypatch.setattr(te_backend, "package_version", lambda package: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for variable in ATTENTION_BACKENDS["fused"]:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(te_backend, "_attention_environment", {})
    te = SimpleNamespace(name="transformer_engine")
    for _ in range(2):
        assert te_backend.fastest_attention(asked, te, dtype, head_dim) == chosen
        choose_attention_backend(chosen)
    choose_attention_backend("auto")
    reference = SimpleNamespace(name="reference")
    assert te_backend.fastest_attention(asked, reference, dtype, head_dim) == asked
    monkeypatch.setattr(te_backend, "_attention_environment", {})
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert te_backend.fastest_attention(asked, te, dtype, head_dim) == asked


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("deterministic", ["", "torch", "environment"])
def test_document_attention_selection(
    monkeypatch: pytest.MonkeyPatch, installed: bool, deterministic: str
) -> None:
    """cuDNN is never deterministic there. Transformer Engine also reads a variable of its own."""
    versions = {"flash-attn-3": "3.0"} if installed else {}
    monkeypatch.setattr(te_backend, "package_version", versions.get)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic == "torch")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0" if deterministic == "environment" else "1")
    offered = (("flash",) if installed else ()) + (() if deterministic else ("fused",))
    assert te_backend.document_backends() == offered
    te = SimpleNamespace(name="transformer_engine")
    for asked in ("auto", "flash", "fused", "unfused"):
        chosen = offered[0] if asked == "auto" and offered else asked
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if chosen in offered and dtype != torch.float32:
                assert te_backend.document_attention(asked, te, dtype) == chosen
            else:
                with refused(te_backend.BackendError, key="data.document_mask"):
                    te_backend.document_attention(asked, te, dtype)
