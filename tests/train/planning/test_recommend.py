"""What is recommended: the fastest that fits, as it is configured where that is as fast, and which optimizer states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.config import load_sizes
from tests.train.planning.settings import setting
from train.planning import recommend as room
from train.planning.memory import largest_micro_batch, memory_of
from train.planning.rates import GPUS, estimate
from train.planning.recommend import FLOAT32_STATES, Planned, at, least_gib, recommend, states_of
from train.planning.setting import Setting


def test_what_is_recommended_fits_and_is_not_slower() -> None:
    s = setting(ranks=8, gradient_accumulation_steps=8)
    for gpu in GPUS.values():
        best = recommend(s, gpu, 8, s.step_tokens, 400)
        assert best and best.fits and best.setting.step_tokens == s.step_tokens
        assert best.estimate.tokens_per_second >= 0.99 * estimate(s, gpu).tokens_per_second
    best = recommend(s, GPUS["h200"], 8, s.step_tokens, 400)
    assert best is not None
    smaller = replace(GPUS["h200"], memory_gib=best.needed_gib - 0.1)
    best = recommend(s, smaller, 8, s.step_tokens, 400)
    assert best is not None and best.fits  # with what NCCL takes beside the tensors
    large = replace(s, sizes=load_sizes("mistral_7b"))
    best = recommend(large, GPUS["h100"], 2, s.step_tokens, 400)
    assert best and best.setting.zero_stage == 3 and best.fits
    compiled = setting(model__variant="hf", model__compile=True, precision__compute="bf16")
    less = replace(GPUS["h100"], memory_gib=70.0)
    assert recommend(replace(compiled, sizes=large.sizes, compiled=False), less, 2, s.step_tokens, 400)
    alone = recommend(replace(compiled, sizes=large.sizes), less, 2, s.step_tokens, 400)
    assert alone is None  # torch.compile goes with no ZeRO 3


@pytest.mark.parametrize(("compute", "unit"), [("fp8", 2), ("bf16", 1)])
def test_micro_batches_are_those_that_fp8_takes(compute: str, unit: int) -> None:
    """Of samples of 2,056 tokens an even number."""
    keys = {"max_seq_length": 2056, "precision__compute": compute, "gradient_accumulation_steps": 1}
    s = setting(per_device_train_batch_size=18, **keys)
    assert s.micro_batch_unit == unit
    best = recommend(s, GPUS["h200"], 2, s.step_tokens, 400)  # nine samples a rank
    assert (best is None) == (compute == "fp8")
    best = recommend(s, GPUS["h200"], 3, s.step_tokens, 400)
    assert best is not None and best.setting.micro_batch % unit == 0
    most = largest_micro_batch(s, GPUS["h200"].memory_gib)
    assert most % unit == 0 and most > 18
    assert largest_micro_batch(s, memory_of(replace(s, micro_batch=1)).needed_gib(1)) == (
        0 if unit == 2 else 1
    )


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "ranks", "chosen"),
    [(3, 1, 1, (3, 1)), (1, 6, 8, (6, 1)), (6, 1, 16, (6, 1)), (24, 2, 1, (24, 2))],
)
def test_a_recommendation_keeps_the_step_and_is_as_configured_where_that_is_as_fast(
    micro_batch: int, accumulation: int, ranks: int, chosen: tuple[int, int]
) -> None:
    s = replace(setting(), micro_batch=micro_batch, accumulation=accumulation, ranks=ranks)
    best = recommend(s, GPUS["h200"], ranks, s.step_tokens, 400)
    assert best and best.setting.step_tokens == s.step_tokens
    assert (best.setting.micro_batch, best.setting.accumulation) == chosen
    assert best.estimate.tokens_per_second >= estimate(s, GPUS["h200"]).tokens_per_second


def test_micro_batches_are_recommended_up_to_a_size_that_was_thought_of() -> None:
    s = replace(setting(), seq_length=32, micro_batch=1, accumulation=1024)
    best = recommend(s, GPUS["h200"], 1, s.step_tokens, 400)
    assert best and best.setting.micro_batch == 128


def test_what_is_configured_is_recommended_though_no_such_micro_batch_is_tried() -> None:
    s = replace(setting(), seq_length=32, micro_batch=387, accumulation=1)
    best = recommend(s, GPUS["h200"], 1, s.step_tokens, 400)
    assert best and best.setting == s


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_another_stage_deepspeeds_sizes_are_those_that_are_shipped_for_it(stage: int) -> None:
    """Of the same one those that are configured. A graph is none at ZeRO 3, nor where layers are computed again."""
    s = replace(setting(ranks=8), reduce_bucket=7, overlap_comm=True, cuda_graphs=True)
    for recompute in (False, True):
        other = at(s, 8, 1, stage, recompute, s.step_tokens)
        buckets = {1: (7, True), 2: (500_000_000, False), 3: (50_000_000, True)}
        assert (other.reduce_bucket, other.overlap_comm) == buckets[stage]
        assert other.cuda_graphs is (stage < 3 and not recompute)
        assert other.float32_gradients
    for tokens, accumulation in ((2.4, 2), (2.6, 3), (0.2, 1)):
        assert at(s, 8, 4, 1, False, round(tokens * 4 * 2048 * 8)).accumulation == accumulation


def test_the_network_of_a_recommendation_is_the_given_one() -> None:
    s = setting(ranks=16, gradient_accumulation_steps=8)
    for network in (1, 400):
        for ranks in (16, 32):
            found = recommend(s, GPUS["h100"], ranks, s.step_tokens, network)
            assert found and found.estimate == estimate(found.setting, GPUS["h100"], network)


def test_a_recommendation_of_another_stage_keeps_the_switch_of_main_grad() -> None:
    two = {"ranks": 8, "deepspeed": "ds_config_zero2.json"}
    for switch in (False, True):
        s = setting(speed__main_grad=switch, **two)
        assert not s.main_grad and at(s, 8, 1, 1, False, s.step_tokens).main_grad is switch


# ---------------------------------------------------------------- optimizer states


def recommended(s: Setting, gpu: str, ranks: int | None = None) -> Planned:
    found = recommend(s, GPUS[gpu], ranks or s.ranks, s.step_tokens, 400)
    assert found is not None and found.fits
    return found


def large(ranks: int, **keys: object) -> Setting:
    return setting(ranks=ranks, model__config="mistral_7b", gradient_accumulation_steps=64, **keys)


def test_float32_states_stay_where_packed_ones_bring_little() -> None:
    found = recommended(setting(ranks=8, gradient_accumulation_steps=8), "h100")
    assert found.setting.optimizer_states == "fp32"
    gib = [found.setting.parameters * n / 8 / 2**30 for n in (12, 6, 2 + 2 * (1 + 4 / 256))]
    assert found.states == (
        f"fp32, {gib[0]:.1f} GiB a GPU at ZeRO 1 (bf16_remainder {gib[1]:.1f}, int8 {gib[2]:.1f}): no others that "
        "fit would be 10 % faster"
    )
    assert memory_of(found.setting).parts["optimizer"] == pytest.approx(gib[0])


def test_packed_ones_are_taken_where_nothing_else_fits() -> None:
    """The least packed that do."""
    s, gpu = large(1), GPUS["h200"]
    expected = {"fp32": 139.8, "bf16_remainder": 114.0, "int8": 100.0}
    for states, memory_gib in expected.items():
        found = recommend(s, replace(gpu, memory_gib=memory_gib), 1, s.step_tokens, 400)
        assert found is not None and found.fits
        if states == "fp32":
            assert " % faster than the best with fp32 (ZeRO 3, recomputation, micro-batch " in found.states
            continue
        assert (found.setting.optimizer_states, found.setting.zero_stage) == (states, 1)
        without = "fp32 and bf16_remainder" if states == "int8" else "fp32"
        assert found.states.endswith(f": with {without} nothing fits")
        moments = " with bf16 moments" * (states == "bf16_remainder")
        assert f"optimizer_states {states}{moments}, ZeRO 1 on 1 GPU" in found.setting.described()
    assert recommend(s, replace(gpu, memory_gib=99.0), 1, s.step_tokens, 400) is None


def test_or_where_they_are_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    s = large(2, max_seq_length=4096)
    packed = max(
        (
            Planned.of(at(s, 2, n, 1, False, s.step_tokens, ("int8", "int8")), GPUS["h200"], 400)
            for n in (1, 2, 4)
        ),
        key=lambda planned: planned.estimate.tokens_per_second * planned.fits,
    )
    usual = recommended(s, "h200")
    faster = packed.estimate.tokens_per_second / usual.estimate.tokens_per_second - 1
    assert usual.setting.optimizer_states == "fp32" and 0.02 < faster < room.CLEARLY_FASTER
    monkeypatch.setattr(room, "CLEARLY_FASTER", faster - 0.01)
    found = recommended(s, "h200")
    assert found.setting == packed.setting
    assert f"{100 * faster:.0f} % faster than the best with fp32 (ZeRO 1, micro-batch 2)" in found.states


def test_what_is_configured_packed_stays_where_it_is_as_fast_and_goes_with_another_stage() -> None:
    packed = {"per_device_train_batch_size": 16, "precision__optimizer_states": "int8"}
    s = setting(ranks=8, gradient_accumulation_steps=16, **packed)
    assert recommended(s, "h100").setting == s and "int8, 0.5 GiB a GPU" in recommended(s, "h100").states
    assert recommended(s, "h100").states.endswith(": as configured")
    other = recommended(large(8, **packed), "h100").setting
    assert other.zero_stage == 3 and other.optimizer_states == "fp32"


def test_zero_2_is_not_recommended_where_it_moves_no_fewer_bytes() -> None:
    """One micro-batch a step: an all-reduce of its gradients, as at ZeRO 1."""
    assert recommended(setting(ranks=64, per_device_train_batch_size=1), "h200").setting.zero_stage == 1


@pytest.mark.parametrize(
    ("keys", "states"),
    [
        ({}, [FLOAT32_STATES, ("bf16_remainder", "bf16"), ("int8", "int8")]),
        ({"deepspeed": "ds_config_zero3.json"}, [FLOAT32_STATES, ("bf16_remainder", "bf16"), ("int8", "int8")]),
        ({"adam_beta2": 0.98}, [FLOAT32_STATES, ("bf16_remainder", "bf16"), ("int8", "int8")]),
        ({"adam_beta2": 0.999}, [FLOAT32_STATES, ("bf16_remainder", "fp32"), ("int8", "int8")]),
        ({"optim": "muon"}, [FLOAT32_STATES]),
        ({"precision__compute": "fp32"}, [FLOAT32_STATES]),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, [FLOAT32_STATES]),
    ],
)  # fmt: skip
def test_only_states_that_a_run_would_take_are_recommended(keys: dict, states: list[tuple[str, str]]) -> None:
    """Those of AdamW at ZeRO 1 with float32 gradients; moments in bf16 stand still with a high adam_beta2."""
    s = setting(ranks=2, **keys)
    assert states_of(s) == states
    # a reason that speaks of others is given where there are some
    others = "others need AdamW, compute fp8 or bf16, and ZeRO 1 with" in recommended(s, "h200").states
    assert others == (len(states) == 1)


@pytest.mark.parametrize(("states", "moments"), [("fp32", None), ("int8", None), ("bf16_remainder", "bf16")])
def test_the_types_of_moments_are_named_where_there_is_a_key_for_them(
    states: str, moments: str | None
) -> None:
    s = setting(precision__optimizer_states=states)
    assert Planned.of(s, GPUS["h200"], 400).to_json(10**9)["optimizer_moments"] == moments


def test_the_least_memory_may_be_that_of_packed_states() -> None:
    least, how = least_gib(large(1), 2**20)
    assert how == "ZeRO 1, optimizer_states int8, recomputation, micro-batch 1"
    muon, how_muon = least_gib(large(1, optim="muon"), 2**20)
    assert muon > 1.25 * least and how_muon == "ZeRO 1, recomputation, micro-batch 1"
