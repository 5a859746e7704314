"""Autocast, delayed-scaling state over steps, weight copies, and the reduction of amaxes over ranks."""

import copy
import gc

import pytest
import torch

from model import te_reference as te
from model.te_reference import state
from model.te_reference.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
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


def test_delayed_scales_move_after_the_forward_and_after_the_backward():
    module, x = linear(), torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        out = module(x)
        assert scales(module).tolist() == [1, 1, 1], "the step itself uses the scales of earlier steps"
        history = module.fp8_meta["scaling_fwd"].amax_history
        assert history.shape == (4, 3)
        assert history[0].tolist() == [x.abs().max().item(), module.weight.abs().max().item(), 0]
    assert scales(module)[0] == E4M3_MAX / x.abs().max()
    assert scales(module)[1] == E4M3_MAX / module.weight.abs().max()
    assert scales(module)[2] == 1
    assert history[0].tolist() == [0, 0, 0] and history[3, 0] == x.abs().max()
    assert scales(module, "scaling_bwd").tolist() == [1, 1]
    out.backward(torch.full_like(out, 2.0))
    assert scales(module, "scaling_bwd").tolist() == [57344 / 2, 1]
    assert module.fp8_meta["num_gemms"] == 1 and module.fp8_meta["recipe"].delayed()


def test_e4m3_format_bounds_gradients_by_448():
    module = linear()
    step(module, torch.randn(16, 32), DelayedScaling(fp8_format=Format.E4M3))
    assert scales(module, "scaling_bwd").tolist() == [448, 1]


def test_the_second_step_uses_the_scales_of_the_first():
    module, x = linear(), torch.randn(16, 32)
    first, second = step(module, x), step(module, x)
    quantized = te.Linear(32, 48, bias=False)
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        quantized.weight.copy_(module.weight)
        current = quantized(x)
    assert torch.equal(second, current), "with the same data, last step's amax is this step's"
    assert not torch.equal(first, second)


def test_a_forward_without_gradients_moves_no_scale_but_leaves_its_amax():
    module, x = linear(), torch.randn(16, 32)
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        module(3 * x)
    assert scales(module).tolist() == [1, 1, 1]
    step(module, x)
    assert scales(module)[0] == E4M3_MAX / (3 * x).abs().max()


def test_an_exception_in_the_autocast_moves_no_scale():
    module = linear()
    with pytest.raises(ValueError, match="last dimension"), te.autocast(recipe=DelayedScaling()):
        module(torch.randn(16, 32))
        module(torch.randn(16, 31))
    assert scales(module).tolist() == [1, 1, 1]
    assert not state.running.enabled and state.running.depth == 0


def test_autocasts_nest():
    outer, inner, after = linear(), linear(), linear()
    x = torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling()):
        outer(x)
        with te.autocast(enabled=False):
            high_precision = inner(x)
        assert scales(outer).tolist() == [1, 1, 1], "only the outermost exit moves scales"
        after(x)
    assert ["scaling_fwd" in m.fp8_meta for m in (outer, inner, after)] == [True, False, True]
    assert torch.equal(high_precision, torch.nn.functional.linear(x, inner.weight))
    assert scales(outer)[0] == scales(after)[0] == E4M3_MAX / x.abs().max()
    assert torch.equal(outer(x), torch.nn.functional.linear(x, outer.weight)), "no autocast, no FP8"


def test_an_inner_recipe_replaces_the_outer_one():
    module = linear()
    with te.autocast(recipe=DelayedScaling()):
        with te.autocast(recipe=Float8CurrentScaling()):
            module(torch.randn(16, 32))
        assert state.running.recipe.delayed()
    assert isinstance(module.fp8_meta["recipe"], Float8CurrentScaling)


def test_an_autocast_is_entered_once_at_a_time_and_again_later():
    context = te.autocast(recipe=DelayedScaling())
    with context, pytest.raises(RuntimeError, match="already entered"):
        context.__enter__()
    with context:
        assert state.running.enabled


def test_autocast_rejects_what_is_no_recipe():
    with pytest.raises(ValueError, match="CPU reference"):
        te.autocast(recipe="delayed")
    for recipe in (Float8CurrentScaling, Float8BlockScaling):
        with pytest.raises(ValueError, match="backward_override='dequantized': the CPU reference has None"):
            recipe(backward_override="dequantized")


def test_all_modules_move_in_one_step_and_dead_ones_are_forgotten():
    kept, dropped, x = linear(), linear(seed=1), torch.randn(16, 32)
    recipe = DelayedScaling(amax_history_len=7)
    with te.autocast(recipe=recipe):
        (kept(x) + dropped(x)).sum().backward()
    key = (True, repr(recipe))
    assert len(state._registry[key]) == 2
    del dropped
    gc.collect()
    assert list(state._registry[key]) == [kept.fp8_meta["scaling_fwd"]]


def test_the_backward_scales_of_all_modules_move_at_the_end_of_the_backward():
    modules = [linear(32, 32, seed) for seed in range(3)]
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        x = torch.randn(16, 32, requires_grad=True)
        for module in modules:
            x = module(x)
            x.retain_grad()
    x.sum().backward()
    for module in modules:
        assert scales(module, "scaling_bwd")[0] != 1
        assert module.fp8_meta["scaling_bwd"].amax_history[0].tolist() == [0, 0]


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


def test_the_history_length_can_change():
    module, x = linear(), torch.randn(16, 32)
    for length in (4, 6, 2):
        step(module, x, DelayedScaling(amax_history_len=length))
        assert module.fp8_meta["scaling_fwd"].amax_history.shape == (length, 3)
    assert scales(module)[0] == E4M3_MAX / x.abs().max()


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


def test_a_kept_weight_copy_records_no_amax():
    module, x = linear(), torch.randn(16, 32)
    step(module, x, is_first_microbatch=True)
    history = module.fp8_meta["scaling_fwd"].amax_history
    assert history[:, 1].count_nonzero() == 1
    step(module, x, is_first_microbatch=False)
    assert history[:, 1].count_nonzero() == 1 and history[:, 0].count_nonzero() == 2


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
