"""Recomputed activations change nothing: neither gradients nor FP8 state, bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from model import te_reference as te
from model.te_reference.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.conftest import MISTRAL_LAYER


class Layer(te.TransformerLayer):
    """With random numbers, which have to be replayed, too."""

    def __init__(self):
        options = {**MISTRAL_LAYER, "kv_channels": 16, "hidden_dropout": 0.0, "params_dtype": torch.bfloat16}
        super().__init__(32, 64, 2, **options)

    def forward(self, x, **kwargs):
        return nn.functional.dropout(super().forward(x, **kwargs), 0.1)


def make_layers():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(2))


def once(layer, x, recipe, **kwargs):
    return te.checkpoint(layer, x, use_reentrant=False, **kwargs)


def nested(layer, x, recipe, **kwargs):
    return te.checkpoint(
        lambda y: te.checkpoint(layer, y, use_reentrant=False, **kwargs), x, use_reentrant=False
    )


def own_autocast(layer, x, recipe, **kwargs):
    def function(y):
        with te.autocast(recipe=recipe):
            return layer(y, **kwargs)

    return te.checkpoint(function, x, use_reentrant=False)


def plain(layer, x, recipe, **kwargs):
    return layer(x, **kwargs)


def train(run, recipe):
    """Three steps of two micro-batches; everything that a step computes."""
    layers, freqs = make_layers(), te.RotaryPositionEmbedding(16)(16)
    torch.manual_seed(1)
    results = []
    for _ in range(3):
        x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
        for micro_batch in range(2):
            hidden = x
            with nullcontext() if run is own_autocast else te.autocast(recipe=recipe):
                for layer in layers:
                    hidden = run(
                        layer, hidden, recipe, rotary_pos_emb=freqs, is_first_microbatch=micro_batch == 0
                    )
            hidden.float().square().sum().backward()
        results += [hidden.detach(), x.grad]
        with torch.no_grad():
            for parameter in layers.parameters():
                results.append(parameter.grad)
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
    for module in layers.modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            if recipe.delayed() and direction in getattr(module, "fp8_meta", {}):
                results += [module.fp8_meta[direction].scale, module.fp8_meta[direction].amax_history]
    return results


@pytest.mark.parametrize("run", [once, nested, own_autocast])
def test_gradients_and_state_equal_those_without_recomputation(run):
    recipe = DelayedScaling(amax_history_len=3)
    expected, actual = train(plain, recipe), train(run, recipe)
    assert len(expected) > 40
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()])
def test_recipes_without_state(recipe):
    for a, b in zip(train(once, recipe), train(plain, recipe), strict=True):
        assert torch.equal(a, b)


def test_activations_are_not_kept():
    layer = make_layers()[0]
    x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with te.autocast(recipe=DelayedScaling()):
            out = te.checkpoint(layer, x, use_reentrant=False)
    assert len(kept) == 1 and kept[0].data_ptr() == x.data_ptr()
    out.sum().backward()
    assert x.grad is not None


def test_a_function_that_does_more_the_second_time_is_an_error():
    modules = [te.Linear(32, 32, bias=False) for _ in range(2)]
    calls = []

    def function(x):
        calls.append(1)
        for module in modules[: len(calls)]:
            x = module(x)
        return x

    x = torch.randn(16, 32, requires_grad=True)
    # torch would stop the recomputation where the first module has what its backward needs
    early_stop = torch.utils.checkpoint.set_checkpoint_early_stop(False)
    with early_stop, te.autocast(recipe=DelayedScaling()):
        out = te.checkpoint(function, x, use_reentrant=False)
    with pytest.raises(RuntimeError):
        out.sum().backward()
    with te.autocast(recipe=DelayedScaling()):
        assert modules[0](x).shape == x.shape, "the running state is as before"


def test_unsupported_arguments_are_refused():
    with pytest.raises(ValueError):
        te.checkpoint(lambda x: x, torch.zeros(1))
