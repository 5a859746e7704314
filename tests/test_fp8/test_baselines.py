"""test_fp8/model/baselines.py and results.py: the other rows at their best, what attention ran, what is even."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from test_fp8.common.rows import NotHere
from test_fp8.common.same_model import DifferentModel
from test_fp8.model import baselines
from test_fp8.model.baselines import attention_kernels, is_attention_kernel, pinned_sdpa, short_name, use_loss
from test_fp8.model.results import lines, results_of
from test_fp8.model.rows import PRESETS, Setting, settings_of
from test_fp8.model.visit import loss_kind, named_attention
from tests.conftest import random_ids, small_config
from tests.test_fp8.test_bench_model import configured, series, small_model, visit


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(small_config(), 2, 33)
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    return ids[:, :-1], labels


# ---------------------------------------------------------------- loss


def stand_in(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """With Liger's signature and meaning."""
    assert (hidden.dim(), labels.dim()) == (2, 1)
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels)


@pytest.mark.parametrize("loss", ["torch", "compiled", "liger"])
def test_every_loss_is_the_same(
    loss: str, batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # a minute of a C++ compiler
    monkeypatch.setattr(baselines, "_liger", lambda model: stand_in)
    plain, model = small_model("hf"), small_model("hf")
    use_loss(model, loss)
    for one in (plain, model):
        one(batch[0], labels=batch[1]).loss.backward()
    assert torch.equal(model(batch[0]).logits, plain(batch[0]).logits)
    assert model(batch[0], labels=batch[1]).loss == plain(batch[0], labels=batch[1]).loss
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert (model(batch[0], labels=batch[1]).logits is None) is (loss != "torch")
    assert loss_kind(model, loss) == loss


def test_what_liger_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("hf")
    monkeypatch.setattr(baselines, "is_installed", lambda package: package != "liger-kernel")
    with pytest.raises(NotHere, match="liger-kernel is not installed"):
        use_loss(model, "liger")
    monkeypatch.setattr(baselines, "is_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model.lm_head = torch.nn.Sequential(model.lm_head)  # as one that is swapped for torchao's
    with pytest.raises(NotHere, match="this row's lm_head is FP8"):
        use_loss(model, "liger")


# ---------------------------------------------------------------- attention


def test_what_ran_is_what_was_pinned(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU torch has flash and math. Its profiler says nothing on the console."""
    model, ids = small_model("hf"), random_ids(small_config(), 1, 32)
    for name, expected in (("flash", ["flash"]), ("auto", ["flash"])):
        with pinned_sdpa(name, model.config, 32):
            assert attention_kernels(lambda: model(ids, labels=ids).loss.backward())[0] == expected
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernels(lambda: model(ids))[0] == ["math"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("window", [None, 32, 8])
def test_a_pinned_attention_is_proven(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(sliding_window=window)
    with pinned_sdpa("flash", config, 32):
        pass
    right = baselines.F.scaled_dot_product_attention
    wrong = lambda *args, **options: right(*args, **options) * 1.05  # noqa: E731
    monkeypatch.setattr(baselines.F, "scaled_dot_product_attention", wrong)
    monkeypatch.setattr(baselines, "sdpa", with_right(baselines.sdpa, right))
    with pytest.raises(DifferentModel, match="SDPA with flash differs"), pinned_sdpa("flash", config, 32):
        pass


def with_right(reference: Any, right: Any) -> Any:
    """`reference` with torch's own SDPA, whatever stands in its place."""

    def run(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(baselines.F, "scaled_dot_product_attention", right)
            return reference(*arguments)

    return run


def test_an_attention_that_there_is_not_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(baselines.F, "scaled_dot_product_attention", none)
    with (
        pytest.raises(NotHere, match="no attention cudnn .* No available kernel"),
        pinned_sdpa("cudnn", small_config(), 32),
    ):
        pass


def test_a_fault_of_the_proof_itself_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what this machine has not."""

    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    for name in ("head_dim", "window_size", "sdpa", "relative_error"):
        with monkeypatch.context() as patch:
            patch.setattr(baselines, name, broken)
            with (
                pytest.raises(RuntimeError, match="^a mistake$"),
                pinned_sdpa("flash", small_config(), 32),
            ):
                pass


def test_compiled_code_is_not_taken_from_another_pin() -> None:
    """The key of torch's cache on the disk does not have what is pinned."""
    with pinned_sdpa("flash", small_config(), 32):
        assert torch._functorch.config.enable_autograd_cache is False
    assert torch._functorch.config.enable_autograd_cache is True


@pytest.mark.slow
@pytest.mark.usefixtures("scalar_code")
def test_compiled_code_runs_what_is_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU torch has flash and math."""
    monkeypatch.setitem(baselines.BACKENDS, "math", torch.nn.attention.SDPBackend.MATH)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    q = torch.randn(1, 2, 32, 16)
    for name in ("flash", "math"):
        torch._dynamo.reset()
        attend = partial(torch.compile(torch.nn.functional.scaled_dot_product_attention), q, q, q)
        with pinned_sdpa(name, small_config(), 32):
            assert attention_kernels(attend)[0] == [name]


def test_another_attention_than_was_pinned_is_found() -> None:
    one = visit(later=[1.0])
    one.sdpa = ["cudnn"]
    assert named_attention("torch SDPA", one.sdpa, "cudnn") == "torch SDPA, cudnn"
    assert named_attention("torch SDPA", one.sdpa, "auto") == "torch SDPA, cudnn"
    assert named_attention("flash (4.0.0b29)", [], "auto") == "flash (4.0.0b29)"
    with pytest.raises(DifferentModel, match="flash was pinned, and cudnn ran"):
        named_attention("torch SDPA", one.sdpa, "flash")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Traits<64>, true>(params)", "pytorch_flash::flash_fwd_kernel"),
        ("cudnn_generated_native_sdpa_sm90_fprop_wgmma", "cudnn_generated_native_sdpa_sm90_fprop_wgmma"),
        ("kernel_cutlass_flash_attncuteflash_bwd_sm90", "kernel_cutlass_flash_attncuteflash_bwd_sm90"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_3", None),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", None),
    ],
)
def test_kernels_of_attention_are_told_by_their_names(kernel: str, name: str | None) -> None:
    assert (short_name(kernel) if is_attention_kernel(kernel) else None) == name


# ---------------------------------------------------------------- settings


def test_losses_are_tried_with_the_best_attention_alone() -> None:
    one = series("hf_bf16")
    settings = [
        Setting(2, attention, loss) for loss in ("compiled", "liger") for attention in ("cudnn", "flash")
    ]
    one.settings = dict.fromkeys(settings, configured(PRESETS["hf_bf16"]))
    tried = []
    for setting in one.candidates(0, None):
        tried.append(setting)
        one.visits[setting] = [visit(later=[{"cudnn": 8.0, "flash": 9.0}[setting.attention]])]
    assert tried == [*settings[:2], Setting(2, "cudnn", "liger")]

    failing = series("hf_bf16")
    failing.settings = one.settings
    tried = []
    for setting in failing.candidates(0, None):
        tried.append(setting)
        failing.refuse(setting, NotHere("not here"))
    assert tried == settings, "where the first loss is not to be had, the others are"


def test_a_loss_that_takes_less_memory_is_tried_where_the_first_did_not_fit() -> None:
    one = series("hf_bf16")
    settings = [
        Setting(size, attention, loss)
        for loss in ("compiled", "liger")
        for attention in ("cudnn", "flash")
        for size in (8, 16, 32)
    ]
    one.settings = dict.fromkeys(settings, configured(PRESETS["hf_bf16"]))
    tried = []
    for setting in one.candidates(0, None):
        tried.append(setting)
        if setting.micro_batch >= {"compiled": 16, "liger": 32}[setting.loss]:
            one.refuse(setting, torch.OutOfMemoryError("CUDA out of memory."))
        else:
            one.visits[setting] = [visit(later=[{"cudnn": 8.0, "flash": 9.0}[setting.attention]])]
    pairs = [("cudnn", "compiled"), ("flash", "compiled")]
    first = [Setting(size, *pair) for pair in pairs for size in (8, 16)]
    assert tried == [*first, *(Setting(size, "cudnn", "liger") for size in (8, 16, 32))]
    (result,) = results_of([one], [], 1.0)
    recorded = {(t["loss"], t["attention"]) for t in result["tried"]}
    assert recorded == {("compiled", "cudnn"), ("compiled", "flash"), ("liger", "cudnn")}


def test_rows_have_the_settings_that_are_theirs() -> None:
    options = bench_options(sdpa=["cudnn", "flash"], loss=["compiled"], attention=["fused"])
    kinds = {
        name: {(s.attention, s.loss) for s in settings_of(PRESETS[name], options)}
        for name in ("hf_bf16", "torchao_tensorwise", "te_linear_bf16", "megatron_core_bf16")
    }
    theirs = {("cudnn", "compiled"), ("flash", "compiled")}
    assert kinds == {
        "hf_bf16": theirs,
        "torchao_tensorwise": theirs,
        "te_linear_bf16": {("fused", "own")},
        "megatron_core_bf16": {("fused", "own")},
    }


def bench_options(**changes: Any) -> Any:
    from test_fp8.bench_model import OPTIONS

    options = OPTIONS.parse_args([])
    OPTIONS.settle(options)
    for key, value in changes.items():
        setattr(options, key, value)
    return options


# ---------------------------------------------------------------- even


@pytest.mark.parametrize(
    ("ours", "theirs", "even"),
    [
        ([10.0, 10.1, 10.05], [10.05, 10.0, 10.1], True),
        ([10.0, 10.1, 10.05], [10.5, 10.6, 10.55], False),  # both drift, their ratio does not
        ([10.0, 10.0, 10.0], [10.01, 10.01, 10.01], False),  # close, and sure
        ([10.0], [10.0], False),  # one round says nothing
    ],
)
def test_even_is_called_even(ours: list[float], theirs: list[float], even: bool) -> None:
    rows = []
    for name, times in (("te_layer_bf16", ours), ("hf_bf16", theirs)):
        row = series(name)
        row.visits[Setting(2, "auto")] = [visit(later=[ms]) for ms in times]
        for turn, one in enumerate(row.visits[Setting(2, "auto")]):
            one.turn = turn
        rows.append(row)
    results = results_of(rows, [], 1.0)
    assert [r["even_with"] for r in results] == ([["hf_bf16"], ["te_layer_bf16"]] if even else [[], []])
    assert any("te_layer_bf16 and hf_bf16 are even" in line for line in lines(results)) is even
    assert (results[1]["ratio_noise"] is None) is (len(ours) == 1)


def test_rounds_are_paired_by_their_number() -> None:
    """A row that found its best setting in a later round is compared in the rounds that both have."""
    rows = []
    for name, times in (("te_layer_bf16", {0: 20.0, 1: 10.0, 2: 10.0}), ("hf_bf16", {1: 10.1, 2: 10.1})):
        row = series(name)
        for turn, ms in times.items():
            one = visit(later=[ms])
            one.turn = turn
            row.visits.setdefault(Setting(2, "auto"), []).append(one)
        rows.append(row)
    assert results_of(rows, [], 1.0)[1]["ratio_noise"] == pytest.approx(0.0)


def test_the_report_names_kernels_and_loss() -> None:
    row = series("hf_bf16")
    one = visit(later=[1.0])
    one.kernels, one.loss_kind, one.attention = ["sdpa_fprop"], "liger", "torch SDPA, cudnn"
    row.visits[Setting(2, "auto")] = [one]
    (result,) = results_of([row], [], 1.0)
    assert (result["loss_kind"], result["attention_kernels"]) == ("liger", ["sdpa_fprop"])
    text = "\n".join(lines([result]))
    assert "hf_bf16: attention torch SDPA, cudnn; kernels: sdpa_fprop" in text and " liger " in text
