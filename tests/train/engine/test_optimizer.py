"""Parameter groups and schedules."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import refused, small_config
from tests.train.engine.test_packed_adamw import FLOAT32, INT8, Trained
from tests.train.runs import run
from train.checkpoint.load import load_checkpoint
from train.config.arguments import ConfigurationError
from train.config.load import build_arguments
from train.engine.optimizer import build_optimizer, learning_rate_at, parameter_groups
from train.engine.process_group import suppress_prints
from train.engine.zero import base_optimizer, preserve_settings, skip_non_finite_steps


def arguments(**changes):
    raw = {
        "model": {"config": "tiny"},
        "data": {"sources": {"a": "a"}},
        "max_steps": 100,
        "learning_rate": 1.0,
        "min_lr_ratio": 0.1,
        **changes,
    }
    return build_arguments(raw)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_non_finite_step_is_skipped(clipping: float) -> None:
    """torch's own, as DeepSpeed calls it at ZeRO 0 in float32; it clips before the step, or not at all. The norm is
    that of before the clipping."""
    model = nn.Linear(4, 2, bias=False)
    engine: Any = SimpleNamespace(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        gradient_clipping=lambda: clipping,
        clip_fp32_gradients=lambda: nn.utils.clip_grad_norm_(model.parameters(), clipping),
    )
    skip_non_finite_steps(engine)
    for value in (3.0, math.inf, math.nan, 2.0):
        model.weight.grad, before = torch.full((2, 4), value), model.weight.detach().clone()
        if clipping:
            engine.clip_fp32_gradients()
        engine.optimizer.step()
        changed, norm = not torch.equal(model.weight, before), float(engine.optimizer._global_grad_norm)
        assert changed == math.isfinite(value) == (not engine.optimizer.overflow)
        assert norm == pytest.approx(value * math.sqrt(8), nan_ok=True)


class Tied(nn.Module):
    """Embedding tied to the output, a layer with a bias, a norm whose name says nothing, a frozen matrix."""

    def __init__(self):
        super().__init__()
        self.config = small_config()
        self.embed = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 6)
        self.layernorm_mlp = nn.Linear(6, 4, bias=False)  # a matrix with "norm" in its name decays
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_parameter_groups():
    model = Tied()
    decay, rest = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decay["params"]} == {
        id(p) for p in (model.embed.weight, model.fc.weight, model.layernorm_mlp.weight)
    }
    assert {id(p) for p in rest["params"]} == {id(model.fc.bias), id(model.scale)}
    assert len(decay["params"]) == 3


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_learning_rate_factors(settings: dict, tmp_path: Path, optim: str) -> None:
    """The first step moves each part of the model as far as its factor says."""
    parts = {"embed_tokens": 10.0, "lm_head": 2.0, "norm": 4.0, "o_proj": 0.5, "down_proj": 0.5}
    scales = {"embedding": 10.0, "lm_head": 2.0, "norms": 4.0, "output_projections": 0.5}
    settings |= {"optim": optim, "precision": {"compute": "fp32"}, "deepspeed": "ds_config_zero0.json"}
    settings |= {"max_steps": 1, "warmup_steps": 0}
    folders = {
        name: run(settings, output_dir=str(tmp_path / name), weight_decay=0.0, **changes)
        for name, changes in {
            "before": {"learning_rate": 1e-30},
            "plain": {},
            "scaled": {"lr_scales": scales},
        }.items()
    }
    before, plain, scaled = (load_file(folder / "hf/model.safetensors") for folder in folders.values())
    for name, old in before.items():
        factor = next((factor for part, factor in parts.items() if part in name), 1.0)
        assert torch.allclose(scaled[name] - old, factor * (plain[name] - old), atol=1e-5), name
    assert not torch.equal(plain[name], old)


@pytest.mark.parametrize("key", ["embedding", "lm_head"])
def test_factor_of_a_tied_matrix_is_refused(settings: dict, tmp_path: Path, key: str) -> None:
    """The learning rate of the embedding would be far too large for lm_head."""
    values = json.loads(Path(settings["model"]["config"]).read_text())
    (tmp_path / "tied.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    settings |= {"model": {"config": str(tmp_path / "tied.json")}}
    with refused(ConfigurationError, key=f"lr_scales.{key}"):
        run(settings, lr_scales={key: 2.0})


def test_optimizer_arguments():
    a = arguments(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.2)
    optimizer = build_optimizer(Tied(), a)
    assert type(optimizer) is torch.optim.AdamW  # ZeRO accepts exactly this class
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1.0, (0.8, 0.9), 1e-6)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


WSD = {"lr_scheduler_type": "warmup_stable_decay"}


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"warmup_steps": 10}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 10_000: 0.1}),
        ({"warmup_steps": 20}, {40: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25))}),
        ({"warmup_steps": 10, "lr_scheduler_type": "linear"}, {9: 1.0, 55: 0.55, 100: 0.1}),
        ({"warmup_steps": 10, "lr_scheduler_type": "constant"}, {9: 1.0, 55: 1.0, 10_000: 1.0}),
        ({**WSD, "decay_steps": 40}, {0: 1.0, 60: 1.0, 70: 0.775, 80: 0.55, 100: 0.1}),
        ({**WSD, "warmup_steps": 60, "decay_steps": 40}, {59: 1.0, 60: 1.0, 80: 0.55}),
        ({"warmup_steps": 100}, {99: 1.0, 100: 1.0}),  # all of the run
    ],
)
def test_learning_rates(changes: dict[str, Any], rates: dict[int, float]) -> None:
    a = arguments(**changes)
    assert {step: learning_rate_at(step, a) for step in rates} == pytest.approx(rates)
    after = [learning_rate_at(step, a) for step in range(a.warmup_steps, 101)]
    assert sorted(after, reverse=True) == after


MUON = {"optim": "muon"}


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        *((FLOAT32, {"deepspeed": f"ds_config_zero{stage}.json"}) for stage in range(4)),
        *((FLOAT32, MUON | {"deepspeed": f"ds_config_zero{stage}.json"}) for stage in (0, 1)),
        (INT8, {}),
    ],
)
@pytest.mark.usefixtures("process_group")
def test_loading_keeps_configured_settings(
    settings: dict, tmp_path: Path, precision: dict[str, str], changes: dict[str, Any]
) -> None:
    """DeepSpeed loads those of the checkpoint, and a kernel that a CPU or a GPU does not have."""
    path = Trained(settings, precision, **changes).steps(1).saved(tmp_path)
    own: dict[str, Any] = {
        "weight_decay": 0.3,
        "adam_beta1": 0.8,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.25,
    }
    own |= {"muon_momentum": 0.5} if "optim" in changes else {}
    engine = Trained(settings, precision, **changes, **own).engine
    groups = base_optimizer(engine).param_groups
    for group in groups:
        group.update(dict.fromkeys({"fused", "foreach"} & group.keys(), True))
    before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    with suppress_prints():
        load_checkpoint(engine, path, Precision(PrecisionConfig(**precision)))
    groups = base_optimizer(engine).param_groups
    assert [{key: group[key] for key in old} for group, old in zip(groups, before, strict=True)] == before
    assert {0.3, 0.0} & {group["weight_decay"] for group in groups} and engine.optimizer.clip_grad == 0.25


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_step_count_device(fused: bool, device: str) -> None:
    """PackedAdamW has no defaults, only groups."""
    weight = nn.Parameter(torch.zeros(1, device="meta"))
    state = {weight: {"step": torch.zeros(1)}}
    optimizer = SimpleNamespace(param_groups=[{"fused": fused}], defaults={}, state=state)
    with preserve_settings(SimpleNamespace(optimizer=optimizer)):
        pass
    assert state[weight]["step"].device.type == device


@pytest.mark.gpu
def test_step_count_moves_from_cpu_to_gpu() -> None:
    """AdamW is fused there, and reads the count where the weights are."""

    def stepped(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer

    host, device = (nn.Parameter(torch.zeros(8, device=name)) for name in ("cpu", "cuda"))
    before = stepped(torch.optim.AdamW([host], lr=1e-2))
    engine = SimpleNamespace(optimizer=torch.optim.AdamW([device], lr=1e-2, fused=True))
    with preserve_settings(engine):
        engine.optimizer.load_state_dict(before.state_dict())
    assert engine.optimizer.param_groups[0]["fused"] is True
    with torch.no_grad():
        device.copy_(host)
    stepped(before), stepped(engine.optimizer)
    assert torch.allclose(device.cpu(), host) and engine.optimizer.state[device]["step"] == 2
