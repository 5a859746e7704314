"""model/fp8/te_backend.py: the attention in use, as Transformer Engine records it."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from model.fp8 import machine, te_backend
from model.fp8.te_backend import NO_ATTENTION_YET, attention_backend_in_use, choose_attention_backend
from model.variants import ATTENTION_BACKENDS

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
    ("recipe", "available", "allowed"),
    [("delayed", False, True), ("block", True, True), ("block", False, False)],
)
def test_block_scaling_is_refused_where_transformer_engine_lacks_it(
    monkeypatch: pytest.MonkeyPatch, recipe: str, available: bool, allowed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    asked = SimpleNamespace(
        is_fp8_block_scaling_available=lambda return_reason: (available, "CUDA is too old")
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", asked)
    with (
        nullcontext()
        if allowed
        else pytest.raises(te_backend.BackendError, match="CUDA is too old; go home$")
    ):
        te_backend.require_fp8(SimpleNamespace(name="transformer_engine"), recipe, "go home")
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


NAMESPACE = {
    **{name: f"transformer_engine.pytorch.{name}" for name in te_backend.MODULES},
    "RotaryPositionEmbedding": "transformer_engine.pytorch.attention.rope.RotaryPositionEmbedding",
    "apply_rotary_pos_emb": "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb",
    "cross_entropy": "model.fused.cross_entropy.cross_entropy",
    "split_and_rotate": "model.fused.qkv_rope.split_and_rotate",
    "rotate": "model.fused.qkv_rope.rotate",
    "swiglu": "model.fused.swiglu.swiglu",
    "embedding": "model.fused.embedding.embedding",
}


def test_where_there_is_a_gpu_all_names_are_transformer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that say what they are; `backend reference` is the reference there, too."""
    contents: dict[str, dict[str, object]] = {"transformer_engine": {"__version__": "9.8"}}
    for place in NAMESPACE.values():
        module, _, attribute = place.rpartition(".")
        contents.setdefault(module, {})[attribute] = place
    contents["transformer_engine.common.recipe"] = {}
    contents["transformer_engine.pytorch.module.layernorm_mlp"] = {}
    contents["transformer_engine.pytorch.tensor.float8_blockwise_tensor"] = {}
    contents["transformer_engine.pytorch.cpp_extensions"] = {"general_gemm": None}
    contents["transformer_engine_torch"] = {"get_cudnn_version": lambda: 91900}
    contents["model.fused.cross_entropy"]["loss_and_statistics"] = None
    for name, attributes in contents.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    prepared: list[bool] = []
    monkeypatch.setattr(te_backend, "_prefer_torchs_cudnn", lambda: prepared.append(True))
    loader = te_backend._load_transformer_engine.__wrapped__
    monkeypatch.setattr(te_backend, "_load_transformer_engine", loader)
    for asked in ("auto", "transformer_engine"):
        te = te_backend.load(asked)
        assert (te.name, te.version) == ("transformer_engine", "Transformer Engine 9.8")
        assert {name: getattr(te, name) for name in NAMESPACE} == NAMESPACE
        assert te.recipe is sys.modules["transformer_engine.common.recipe"] and te.fused_swiglu == "swiglu"
        assert te.fp8_cross_entropy is not None
    assert prepared == [True, True]
    assert te_backend.cudnn_versions() == (91900, 92000)
    reference = te_backend.load("reference")
    assert reference.name == "reference"
    assert (reference.cross_entropy, reference.rotate, reference.swiglu) == (None, None, None)
    assert reference.fp8_cross_entropy is None


def test_models_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch.quantization", raising=False)
    te_backend.forget_models()  # of what was never imported there is nothing to forget
    resets: list[bool] = []
    manager = SimpleNamespace(reset=lambda: resets.append(True))
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.quantization", SimpleNamespace(FP8GlobalStateManager=manager)
    )
    module = SimpleNamespace(_dummy_wgrads={(4, 8, torch.bfloat16): torch.empty(4, 8)})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", module)
    te_backend.forget_models()
    assert resets == [True]
    assert not module._dummy_wgrads


@pytest.mark.parametrize("package", ["flash-attn-4", "flash-attn-3", "flash-attn", None])
@pytest.mark.parametrize("deterministic", ["", "torch", "environment"])
def test_attention_within_documents_by_package_and_determinism(
    monkeypatch: pytest.MonkeyPatch, package: str | None, deterministic: str
) -> None:
    """Transformer Engine is also told by its own variable, which users set."""
    monkeypatch.setattr(te_backend, "is_installed", lambda name: name == package)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic == "torch")
    nondeterministic = "0" if deterministic == "environment" else "1"
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", nondeterministic)
    flash, fused = (("flash",) if package else ()), (() if deterministic else ("fused",))
    assert te_backend.document_backends() == (*flash, *fused)
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    assert ("fused" in te_backend.document_backends()) == (deterministic != "torch")


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_without_an_fp8_backward_is_the_only_one_to_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Inside a recomputation; what is behind it, also behind an error, is in it as before."""
    region = SimpleNamespace(_IN_ACTIVATION_RECOMPUTE_REGION=before)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", region)
    with te_backend.one_forward(SimpleNamespace(name="reference")):
        assert region._IN_ACTIVATION_RECOMPUTE_REGION is before
    with pytest.raises(KeyError), te_backend.one_forward(SimpleNamespace(name="transformer_engine")):
        assert region._IN_ACTIVATION_RECOMPUTE_REGION is False
        raise KeyError
    assert region._IN_ACTIVATION_RECOMPUTE_REGION is before


def test_an_attention_of_another_name_is_refused_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: value for name, value in os.environ.items() if name.startswith("NVTE")}
    with pytest.raises(te_backend.BackendError, match="'cudnn' is not one of auto, fused, flash, unfused"):
        choose_attention_backend("cudnn")
    assert {name: value for name, value in os.environ.items() if name.startswith("NVTE")} == before


def test_a_gpu_is_described_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA X", total_memory=141 * 2**30 // 2, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92003)
    monkeypatch.setattr(te_backend, "load", lambda name: SimpleNamespace(version="Transformer Engine 9.8"))
    monkeypatch.setattr(te_backend, "cudnn_versions", lambda: (91900, 92003))
    asked: list[list[str]] = []

    def nvidia_smi(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.65.06\n580.65.06\n")

    monkeypatch.setattr(machine.subprocess, "run", nvidia_smi)
    of_machine, versions = machine.describe()
    found = {key: value for key, value in of_machine.items() if key not in ("cpu", "torch_threads")}
    assert found == {
        "gpu": "NVIDIA X",
        "gpus": 8,
        "gpu_memory_gib": 70.5,
        "compute_capability": "9.0",
        "fp32_matmul_precision": torch.get_float32_matmul_precision(),
        "driver": "580.65.06",
    }
    assert asked == [["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]]
    assert [versions[key] for key in ("cuda", "cudnn", "transformer_engine_cudnn", "fp8")] == [
        "13.0", "9.20.3", "9.19.0", "Transformer Engine 9.8",
    ]  # fmt: skip
    line = machine.headline(of_machine, versions)
    assert line == f"NVIDIA X, torch {torch.__version__}, FP8 by Transformer Engine 9.8"

    def missing(*_: object, **__: object) -> None:
        raise te_backend.BackendError("Transformer Engine cannot be imported")

    monkeypatch.setattr(te_backend, "load", missing)

    def no_program(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(machine.subprocess, "run", no_program)
    of_machine, versions = machine.describe()
    assert "driver" not in of_machine and "transformer_engine_cudnn" not in versions
    assert versions["fp8"] == "none: Transformer Engine cannot be imported"


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
def test_flash_attention_4_is_taken_where_it_is_right_and_faster(
    asked: str,
    version: str | None,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second time, when the first choice stands in the environment; not against what the user's says."""
    monkeypatch.setattr(te_backend, "version_of", lambda package: version)
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


@pytest.mark.parametrize("said", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_the_reference_keeps_freed_memory_unless_the_environment_says_how(
    said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda *option: asked.append(option))
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    for name in [n for n in os.environ if n.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    te_backend._load_reference.__wrapped__()
    assert asked == ([] if said else [(-3, 2**30), (-1, 2**30)])
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())  # no glibc
    te_backend._load_reference.__wrapped__()
