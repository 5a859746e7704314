"""What speeds are made of, beside small sums by hand: bytes between GPUs, FLOPs, what an estimate says of its error."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from model.config import load_sizes
from model.variants import VARIANTS
from tests.train.planning.settings import setting
from train.planning import rates
from train.planning.rates import GPUS, MEASURED_ON, estimate
from train.planning.setting import Setting

H200 = GPUS["h200"]


@pytest.fixture(scope="module")
def usual() -> Setting:
    """As hare_1.1b was measured, but for its micro-batch."""
    return setting(
        model__attention_backend="flash",
        full_determinism=False,
        precision__fp8_head_gradients=False,
        gradient_accumulation_steps=8,
    )


def test_what_ships_is_planned_as_the_tables_have_it() -> None:
    """Each model of which steps with the defaults were measured: docs/hardware.md shows them beside the plan."""
    reports = {path.stem: json.loads(path.read_text()) for path in rates.RESULTS.glob("*_shipped_step.json")}
    assert len(reports) > 2
    wrong = {}
    for name, report in reports.items():
        for row in report["results"]:
            if row["variant"] in VARIANTS and VARIANTS[row["variant"]].te:
                planned, found = estimate(rates._setting(report, row), H200), row["tokens_per_second"]
                if abs(planned.tokens_per_second / found - 1) > planned.within:
                    wrong[name, row["row"]] = planned.tokens_per_second, found
    assert not wrong


# ---------------------------------------------------------------- Muon


@pytest.mark.parametrize(
    ("model", "compute", "longer_ms"),
    [("hare_1.1b", "fp8", 300), ("mistral_106m", "bf16", 61)],  # hare_1.1b_switches_step, evidence
)
def test_muon_takes_what_it_took(model: str, compute: str, longer_ms: float) -> None:
    """Beyond AdamW's step, and shared between the ranks of ZeRO 1 alone."""
    one, eight, no_zero = (
        setting(
            ranks=ranks,
            model__config=model,
            precision__compute=compute,
            deepspeed=f"ds_config_zero{stage}.json",
        )
        for ranks, stage in ((1, 1), (8, 1), (8, 0))
    )

    def longer(s: Setting) -> float:
        muon, adamw = (estimate(replace(s, optim=optim), H200).step_s for optim in ("muon", "adamw"))
        return 1e3 * (muon - adamw)

    assert longer(one) == pytest.approx(longer_ms, rel=0.1)
    assert longer(eight) == pytest.approx(longer(one) / 8, rel=0.1)
    assert longer(no_zero) == pytest.approx(longer(one), rel=0.1)


# ---------------------------------------------------------------- between GPUs


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize(
    ("stage", "accumulation", "recompute", "gradients", "weights"),
    [
        (0, 4, False, 2, 0),  # an all-reduce of gradients passes them twice
        (1, 4, False, 2, 1),  # and the new weights are gathered
        (2, 4, False, 4 * 2, 1),  # an all-reduce for each micro-batch, of which a rank keeps its share
        (3, 4, False, 4, 4 * 2),  # weights are gathered for the forward and for the backward
        (3, 4, True, 4, 4 * 2),  # where the forward runs again, too
    ],
)
def test_what_goes_through_a_link_in_a_step(
    usual: Setting,
    stage: int,
    accumulation: int,
    recompute: bool,
    gradients: int,
    weights: int,
    in_float32: bool,
) -> None:
    """Of 16 ranks each sends 15 sixteenths of a pass. Eight cards of 50 Gbit/s are 50 GB/s of a node. Weights are in 16
    bits, and gradients unless precision.gradient_communication is fp32."""
    s = replace(usual, ranks=16, zero_stage=stage, accumulation=accumulation, recompute=recompute)
    s = replace(s, reduces_in_float32=in_float32)
    bytes_ = (4 if in_float32 else 2) * gradients + 2 * weights
    slow, fast = (estimate(s, H200, network_gbit_s=n).step_s for n in (50, 100))
    sent = bytes_ * s.parameters * 15 / 16
    assert slow - fast == pytest.approx(sent / (0.5 * 50e9) - sent / (0.5 * 100e9))


def test_within_a_node_nvlink_counts_and_beyond_it_the_slowest_link(usual: Setting) -> None:
    def seconds(ranks: int, nvlink: float, network: float) -> float:
        return estimate(replace(usual, ranks=ranks), replace(H200, nvlink_gb_s=nvlink), network).step_s

    sent = 6 * usual.parameters * 7 / 8
    assert seconds(8, 100, 400) - seconds(8, 200, 400) == pytest.approx(sent / 50e9 - sent / 100e9)
    assert seconds(8, 100, 400) == seconds(8, 100, 1)
    assert seconds(16, 200, 400) == seconds(16, 200, 4000) < seconds(16, 100, 400)
    assert (GPUS["h100"].nvlink_gb_s, GPUS["h200"].nvlink_gb_s, GPUS["h800"].nvlink_gb_s) == (450, 450, 200)


def test_a_schedule_is_planned_with_the_network_that_there_is_and_as_sure_as_its_least_sure_stage() -> None:
    keys = {"model__attention_backend": "flash", "full_determinism": False, "gradient_accumulation_steps": 8}
    schedule = [{"until_step": 500, "compute": "bf16"}, {"recipe": "current"}]
    s = setting(per_device_train_batch_size=16, max_steps=1000, precision__schedule=schedule, **keys)
    (_, bf16), (_, fp8) = s.in_each_stage
    assert (estimate(bf16, H200).within, estimate(fp8, H200).within) == (0.03, 0.06)
    assert estimate(s, H200).within == 0.06
    slow, fast = (estimate(replace(s, ranks=16), H200, n).step_s for n in (50, 100))
    sent = 6 * s.parameters * 15 / 16
    assert slow - fast == pytest.approx(sent / 25e9 - sent / 50e9)


# ---------------------------------------------------------------- the work of a micro-batch and of the optimizer


def micro_batch_s(s: Setting, gpu: str = "h200") -> float:
    return rates._micro_batch_s(s, GPUS[gpu])


def test_without_a_cache_each_micro_batch_quantizes_the_weights(usual: Setting) -> None:
    once, more = (micro_batch_s(replace(usual, accumulation=n)) for n in (1, 2))
    assert once - more == pytest.approx(4 * usual.parameters / 4e12)
    bf16 = replace(usual, compute="bf16", fp8_layers=0, fp8_head=False)
    assert micro_batch_s(replace(bf16, accumulation=1)) == micro_batch_s(bf16)


def test_gradients_that_no_gemm_adds_up_are_moved_once_more(usual: Setting) -> None:
    less = micro_batch_s(replace(usual, main_grad_asked=False)) - micro_batch_s(usual)
    assert less == pytest.approx(24 * usual.parameters / 4e12)


def test_attention_is_flash_or_cudnns_in_transformer_engine_alone(usual: Setting) -> None:
    for variant, longer in (("te_layer", 1.023), ("hf", 1.0)):
        s = replace(usual, variant=variant, compute="bf16", fp8_layers=0, fp8_head=False)
        assert micro_batch_s(replace(s, flash=False)) == pytest.approx(longer * micro_batch_s(s))


def test_slower_memory_is_slower_by_less_than_its_share_and_for_the_optimizer_by_all_of_it(
    usual: Setting,
) -> None:
    assert 1 < micro_batch_s(usual, "h100") / micro_batch_s(usual) < (4.8 / 3.35) ** 0.5
    h100, h200 = (rates._optimizer_s(usual, GPUS[gpu]) for gpu in ("h100", "h200"))
    assert h100 / h200 == pytest.approx(4.8 / 3.35)
    assert rates._optimizer_s(replace(usual, ranks=4), H200) == pytest.approx(h200 / 4)
    assert rates._optimizer_s(replace(usual, ranks=4, zero_stage=0), H200) == h200


def test_float32_has_no_tensor_cores_for_layers_nor_head(usual: Setting) -> None:
    """16 times as long, and a little more: what is saved is twice as large."""
    bf16 = replace(usual, compute="bf16", fp8_layers=0, fp8_head=False, micro_batch=64)
    one = SimpleNamespace(**vars(usual.sizes))
    one.num_hidden_layers, one.vocab_size = 1, 1_000_000  # little but lm_head
    for sizes in (usual.sizes, one):
        s = replace(bf16, sizes=sizes)
        assert 15 < micro_batch_s(replace(s, compute="fp32")) / micro_batch_s(s) < 32


def test_a_small_micro_batch_waits_for_its_launches(usual: Setting) -> None:
    """As long whatever its tokens are; of recomputation there are a third more. A graph has one."""
    s = replace(usual, variant="te_linear", micro_batch=1, seq_length=64)
    assert micro_batch_s(s) == micro_batch_s(replace(s, seq_length=32)) < micro_batch_s(usual)
    assert micro_batch_s(replace(s, recompute=True)) == pytest.approx(4 / 3 * micro_batch_s(s))
    assert micro_batch_s(replace(s, cuda_graphs=True)) < 0.5 * micro_batch_s(s)


def test_packed_states_take_what_was_measured_of_them_a_parameter_and_ranks_share_it(usual: Setting) -> None:
    """hare_1.1b_states_step.json: 31, 64 and 100 ms of a step of 1,123 M parameters."""
    for states, ms in (("bf16_remainder", 30.9), ("fp8", 64.2), ("int8", 100.0)):
        for ranks in (1, 4):
            plain = replace(usual, ranks=ranks, zero_stage=1)
            more = estimate(replace(plain, optimizer_states=states), MEASURED_ON).step_s
            more -= estimate(plain, MEASURED_ON).step_s
            assert more == pytest.approx(ms / 1e3 * usual.parameters / 1_123_117_056 / ranks, rel=0.1), states


def test_the_flops_of_newton_schulz() -> None:
    """Of q and o 4 x 4, of k and v 2 x 4, of the MLP's three 4 x 6, in each of 3 layers. A product of m x k by k x n
    has 2 m k n: 15 of m x m by m x m are 30 m^3."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    sizes = SimpleNamespace(num_hidden_layers=3, hidden_size=4, intermediate_size=6, vocab_size=100, **heads)
    square = 15 * 2 * 4 * 4 * 4
    of_kv = 14 * 2 * 2 * 2 * 2 + 4 * 2 * 2 * 2 * 4
    of_mlp = 14 * 2 * 4 * 4 * 4 + 4 * 2 * 4 * 4 * 6
    assert rates._newton_schulz(sizes) == (21, pytest.approx(3 * (2 * square + 2 * of_kv + 3 * of_mlp)))


# ---------------------------------------------------------------- what an estimate says of itself


@pytest.mark.parametrize(
    "other",
    [
        {"recipe": "current"}, {"recompute": True}, {"cuda_graphs": True}, {"fp8_head": True}, {"micro_batch": 8},
        {"main_grad_asked": False}, {"seq_length": 1024}, {"deterministic": True}, {"flash": False},
    ],
)  # fmt: skip
def test_what_was_measured_otherwise_is_scaled(usual: Setting, other: dict[str, Any]) -> None:
    measured = replace(usual, micro_batch=16)
    name = "hare_1.1b_step.json, te_layer_fp8_delayed"
    assert estimate(measured, MEASURED_ON).basis == f"measured {name}"
    found = estimate(replace(measured, **other), MEASURED_ON)
    row = {"recompute": f"{name}_recompute", "fp8_head": f"{name}_fp8_head"}.get(next(iter(other)))
    assert found.basis == (f"measured {row}" if row else f"scaled from {name}")


@pytest.mark.parametrize(
    ("other", "gpu", "within"),
    [
        ({"micro_batch": 16}, "h200", 0.03),
        ({}, "h200", 0.06),
        ({}, "h800", 0.06 + 0.08),
        ({"ranks": 8}, "h200", 0.06 + 0.04),
        ({"ranks": 9}, "h200", 0.06 + 0.04 + 0.15),
        ({"ranks": 8, "zero_stage": 3}, "h200", 0.06 + 0.04 + 0.1),
    ],
)
def test_each_step_away_from_a_measurement_is_less_sure(
    usual: Setting, other: dict[str, Any], gpu: str, within: float
) -> None:
    assert estimate(replace(usual, **other), GPUS[gpu]).within == pytest.approx(within)


def test_a_model_that_was_not_measured_is_as_sure_as_the_others_agree(usual: Setting) -> None:
    unseen = replace(usual, sizes=load_sizes("mistral_7b"))
    found = estimate(unseen, H200)
    assert 0.08 < found.within < 0.2
    # nothing like it was: by all that Transformer Engine ran
    assert estimate(replace(unseen, compiled=True), H200).within >= 3 * 0.08


def test_of_a_model_far_smaller_than_those_measured_less_is_known(usual: Setting) -> None:
    small = estimate(replace(usual, sizes=load_sizes("tiny")), H200)
    assert "no model as small was measured" in small.basis and small.within > 0.5
    assert "as small" not in estimate(replace(usual, sizes=load_sizes("mistral_0.4b")), H200).basis
