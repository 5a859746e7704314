"""Autocast, FP8 state, weight copies, amaxes over ranks; when state moves is in test_te_recorded.py."""

import copy

import pytest
import torch

from model import te_reference as te
from model.te_reference import state
from model.te_reference.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.reliability.launching import run_cases

E4M3_MAX = torch.tensor(448.0)
RECIPES = [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]


def linear(inputs=32, outputs=48, seed=0, **options):
    torch.manual_seed(seed)
    return te.Linear(inputs, outputs, bias=False, params_dtype=torch.float32, **options)


def step(module, x, recipe=None, **arguments):
    with te.autocast(recipe=recipe or DelayedScaling(amax_history_len=4)):
        out = module(x, **arguments)
    out.sum().backward()
    return out


def scales(module, direction="scaling_fwd"):
    return module.fp8_meta[direction].scale


def test_an_exception_in_the_autocast_moves_no_scale():
    module = linear()
    with pytest.raises(ValueError), te.autocast(recipe=DelayedScaling()):
        module(torch.randn(16, 32))
        module(torch.randn(16, 31))
    assert scales(module).tolist() == [1, 1, 1]
    assert not state.running.enabled and state.running.depth == 0


def test_an_autocast_is_entered_once_at_a_time_and_again_later():
    context = te.autocast(recipe=DelayedScaling())
    with context, pytest.raises(RuntimeError):
        context.__enter__()
    with context:
        assert state.running.enabled


def test_autocast_rejects_what_is_no_recipe():
    with pytest.raises(ValueError):
        te.autocast(recipe="delayed")
    for recipe in (Float8CurrentScaling, Float8BlockScaling):
        with pytest.raises(ValueError):
            recipe(backward_override="dequantized")


def test_a_copied_module_has_its_own_state():
    module, x = linear(), torch.randn(16, 32)
    step(module, x)
    twin = copy.deepcopy(module)
    before = scales(module).clone()
    step(twin, 2 * x)
    assert torch.equal(scales(module), before)
    assert scales(twin)[0] == E4M3_MAX / (2 * x).abs().max()


def test_conversion_to_bfloat16_keeps_the_state_in_float32():
    module, x = linear(), torch.randn(16, 32)
    step(module, x)
    module.bfloat16()
    assert scales(module).dtype == torch.float32
    assert step(module, x.bfloat16()).dtype == torch.bfloat16


def test_state_can_be_allocated_before_the_first_forward():
    module = linear()
    module.init_fp8_meta_tensors(DelayedScaling(amax_history_len=4))
    scales(module).copy_(torch.tensor([16.0, 32.0, 1.0]))
    module.init_fp8_meta_tensors(DelayedScaling(amax_history_len=4))
    assert scales(module).tolist() == [16, 32, 1]
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        out = module(torch.full((16, 32), 28.5))
    grid_weight = (module.weight * 32).to(torch.float8_e4m3fn).float() / 32
    torch.testing.assert_close(out, torch.full((16, 32), 28.0) @ grid_weight.T)


def test_a_module_whose_recipe_changes_leaves_those_of_the_old_one():
    """Modules of one recipe move together, by the recipe and the length of the first."""
    before, after = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=6, margin=2)
    stays, changes, x = linear(), linear(seed=1), torch.randn(16, 32)
    for module in (stays, changes):
        step(module, x, before)
    step(changes, x, after)
    for direction, most, amax in (("scaling_fwd", E4M3_MAX, x.abs().max()), ("scaling_bwd", 57344, 1)):
        assert scales(changes, direction)[0] == most / 4 / amax
        assert scales(stays, direction)[0] == most / amax


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_weight_copies_follow_is_first_microbatch(recipe):
    module, x = linear(), torch.randn(16, 32)
    step(module, x, recipe)  # past the first step, whose scales are 1
    kept = step(module, x, recipe, is_first_microbatch=True).detach()
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.equal(step(module, x, recipe, is_first_microbatch=False), kept), "the kept copy is used"
    requantized = step(module, x, recipe)
    torch.testing.assert_close(requantized, 2 * kept, rtol=0.1, atol=0.5)
    assert torch.equal(step(module, x, recipe, is_first_microbatch=False), kept), "None leaves the copy alone"
    assert not torch.equal(step(module, x, recipe, is_first_microbatch=True), kept), "True renews it"


def test_a_kept_weight_copy_is_of_its_recipe():
    module, x = linear(), torch.randn(16, 32)
    step(module, x, DelayedScaling(), is_first_microbatch=True)  # by a scale of 1
    kept = step(module, x, Float8CurrentScaling(), is_first_microbatch=False)
    assert torch.equal(kept, step(module, x, Float8CurrentScaling()))


@pytest.mark.process
def test_amaxes_are_reduced_over_ranks_in_one_call_a_direction(tmp_path):
    (ranks,) = run_cases(tmp_path / "ranks", [(2, "reduce_amaxes", {})])
    for rank, (reduced, own) in enumerate(ranks):
        # one reduction for the forward tensors of both modules, one for the backward
        assert reduced == {"calls": [6, 4], "scales": [448 / 2, 57344 / 2]}
        assert own == {"calls": [], "scales": [448 / (1 + rank), 57344 / (1 + rank)]}
