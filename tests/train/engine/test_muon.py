"""Muon: a step of each matrix by itself, on one rank and on two, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.build import build_model
from model.config import load_config, load_sizes, make_config, weight_shapes
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import small_config
from tests.reliability.launching import run_cases
from tests.reliability.optimizer_ranks import muon_against_plain, two_steps
from tests.reliability.test_world_size import Runs
from tests.train.runs import PRECISIONS
from tests.train.test_training import check_resume
from train.config.arguments import LrScales
from train.engine.optimizer import parameter_groups
from train.planning.speed import newton_schulz_flops

# Of a step: float32 against float64, and float16, DeepSpeed's choice where there is one, for a gradient of few tokens,
# whose smallest singular values are rounding. Two matrices that are orthogonalized as one are off by 0.3.
FLOAT32, HALF = 1e-4, 0.08


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of no two matrices in a layer are the sizes alike, but for k and v, gate and up."""
    file = tmp_path_factory.mktemp("config") / "config.json"
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=512)
    small = small_config(**sizes, num_attention_heads=5, head_dim=16)
    small.num_key_value_heads = 1
    file.write_text(json.dumps(small.to_dict()))
    return str(file)


CASES = [
    ("te_layer", 0, "fp32"),
    ("te_layer", 1, "bf16"),
    ("te_layer", 2, "bf16"),
    ("te_layer", 3, "bf16"),
    pytest.param("te_layer", 0, "bf16", marks=pytest.mark.slow),
    pytest.param("te_linear", 2, "bf16", marks=pytest.mark.slow),
    pytest.param("te_linear", 1, "bf16", marks=pytest.mark.slow),
    pytest.param("hf", 1, "bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "stage", "compute"), CASES)
def test_step_equals_plain_muon(
    process_group: None, config: str, variant: str, stage: int, compute: str
) -> None:
    """Momentum, clipping, decay and the scale of each matrix; AdamW for the others."""
    assert max(muon_against_plain(config, variant, stage, compute).values()) < FLOAT32


def test_fused_weights_equal_separate_weights(process_group: None, config: str) -> None:
    (_, fused), (_, apart) = (two_steps(config, v, 0, "fp32", False) for v in ("te_layer", "te_linear"))
    assert fused.keys() == apart.keys() and "model.layers.1.self_attn.v_proj.weight" in fused
    for name, weight in fused.items():
        if ".layers." in name:  # AdamW amplifies rounding errors of gradients near 0 in the embedding
            assert torch.allclose(weight, apart[name], rtol=0, atol=1e-5), name


@pytest.mark.process
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        (1, 2),
        (2, 2),
        (2, 3),
        (3, 2),
        (3, 3),
        pytest.param(0, 2, marks=pytest.mark.slow),
        pytest.param(2, 5, marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one(config: str, tmp_path: Path, stage: int, ranks: int) -> None:
    """Each with samples of its own; with ZeRO, several ranks may store parts of a matrix."""
    case = {"config": config, "variant": "te_layer", "stage": stage, "compute": "bf16"}
    (errors,) = run_cases(tmp_path, [(ranks, "muon_against_plain", case)])
    assert max(max(of_rank.values()) for of_rank in errors) < FLOAT32


@pytest.mark.parametrize(("kind", "norms"), [("mistral", 5), ("qwen3", 9)])
def test_muon_parameters(config: str, kind: str, norms: int) -> None:
    """Embeddings and head are AdamW's, also where they are one; vectors have no decay."""
    for tied in (False, True):
        model_config = make_config(load_config(config).to_dict() | {"model_type": kind})
        model_config.tie_word_embeddings = tied
        model = build_model(model_config, "te_layer", Precision(PrecisionConfig(compute="bf16")), seed=1)
        names = {parameter: name for name, parameter in model.named_parameters()}
        *of_muon, matrices, vectors = parameter_groups(model, 0.1, "muon")
        *_, embedding = parameter_groups(model, 0.1, "muon", LrScales(embedding=10.0))
        assert [names[p] for p in embedding["params"]] == ["model.embed_tokens.weight"]
        assert embedding["lr_scale"] * embedding["weight_decay"] == pytest.approx(0.1)
        found = {names[p].partition("layers.")[2][2:] for group in of_muon for p in group["params"]}
        assert found == {
            "self_attention.layernorm_qkv.weight",
            "self_attention.proj.weight",
            "layernorm_mlp.fc1_weight",
            "layernorm_mlp.fc2_weight",
        }
        assert [names[p] for p in matrices["params"]] == ["model.embed_tokens.weight", "lm_head.weight"][
            : 1 if tied else 2
        ]
        assert len(vectors["params"]) == norms and vectors["weight_decay"] == 0.0
        for group in of_muon:  # the rate of the step times the decay of the group
            assert group["lr_scale"] * group["weight_decay"] == pytest.approx(0.1)


def test_newton_schulz_flops() -> None:
    """Of hare_1.1b, as torch counts them in DeepSpeed's function."""
    from deepspeed.runtime.zero.muon.original_muon import zeropower_via_gram_newtonschulz

    sizes = load_sizes("hare_1.1b")
    with FlopCounterMode(display=False) as counter:
        for name, shape in weight_shapes(sizes).items():
            if ".layers.0." in name and len(shape) == 2:
                zeropower_via_gram_newtonschulz(torch.empty(shape, device="meta"), 5)
    assert newton_schulz_flops(sizes) == pytest.approx(sizes.num_hidden_layers * counter.get_total_flops())


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize(("model_type", "stage"), [("qwen3", 1), ("mistral", 2), ("mistral", 3)])
def test_fp8_run_resumes_bit_exactly(settings: dict, tmp_path: Path, model_type: str, stage: int) -> None:
    values = json.loads(Path(settings["model"]["config"]).read_text())
    (tmp_path / "model.json").write_text(json.dumps(values | {"model_type": model_type}))
    settings |= {"model": {"config": str(tmp_path / "model.json")}}
    settings |= {"optim": "muon", "deepspeed": f"ds_config_zero{stage}.json"}
    check_resume(settings, "te_layer", PRECISIONS["delayed"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "stage"), [("te_linear", 1), ("te_layer", 1), ("te_layer", 2), ("te_layer", 3)]
)
def test_gpu_run_resumes_bit_exactly(settings: dict, config: str, variant: str, stage: int) -> None:
    """A bf16 step equals plain Muon. An FP8 run with CUDA graphs (and main_grad with ZeRO 1) resumes exactly."""
    assert max(muon_against_plain(config, variant, stage, "bf16").values()) < FLOAT32
    deepspeed = f"ds_config_zero{stage}.json"
    settings |= {"optim": "muon", "speed": {"cuda_graphs": stage < 3}, "deepspeed": deepspeed}
    check_resume(settings, variant, PRECISIONS["delayed"])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.process
def test_two_gpus_equal_plain_muon(config: str, tmp_path: Path, stage: int) -> None:
    case = {"config": config, "variant": "te_layer", "stage": stage, "compute": "bf16"}
    (errors,) = run_cases(tmp_path, [(2, "muon_against_plain", case)])
    assert max(max(of_rank.values()) for of_rank in errors) < FLOAT32


@pytest.mark.slow
@pytest.mark.process
def test_resume_with_other_ranks_and_zero_stage(
    settings: dict, data: Path, config: str, tmp_path: Path
) -> None:
    base = {
        "model": {"config": config},
        "data": {"sources": {"text": str(data)}},
        "max_seq_length": 32,
        "per_device_train_batch_size": 1,
        "max_eval_samples": 1,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "lr_scales": {"embedding": 10.0, "output_projections": 0.5},
        "optim": "muon",
    }
    runs = Runs(tmp_path, {**base, "precision": {"compute": "bf16"}})
    runs.whole("two", 2, 2)
    runs.resumed("two_to_one", 1, "two")
    allowed = {"allow_changes_on_resume": ["deepspeed"]}  # ZeRO 0 accumulates gradients in bf16
    runs.resumed("two_to_zero0", 2, "two", deepspeed="ds_config_zero0.json", **allowed)
    runs.resumed("two_to_zero2", 2, "two", deepspeed="ds_config_zero2.json")
    runs.whole("zero2", 2, 2, deepspeed="ds_config_zero2.json")
    runs.resumed("zero2_to_two", 2, "zero2", deepspeed="ds_config_zero1.json")
    runs.resumed("zero2_to_one", 1, "zero2")
    runs.resumed("zero2_to_zero3", 2, "zero2", deepspeed="ds_config_zero3.json")
    runs.whole("zero3", 2, 2, deepspeed="ds_config_zero3.json")
    runs.resumed("zero3_to_one", 1, "zero3")
    runs.whole("zero0", 1, 2, deepspeed="ds_config_zero0.json")
    runs.resumed("zero0_to_two", 2, "zero0", deepspeed="ds_config_zero1.json", **allowed)
    runs.start()
    momenta = [key for key in runs.state("two", "kept") if key.endswith("momentum_buffer")]
    assert len(momenta) == 8
    for resumed in (
        "two_to_one",
        "two_to_zero0",
        "two_to_zero2",
        "zero2_to_two",
        "zero2_to_one",
        "zero2_to_zero3",
        "zero3_to_one",
        "zero0_to_two",
    ):
        runs.check(resumed.partition("_to_")[0], resumed)
