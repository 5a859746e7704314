"""What a run is told at its start, and what it is not refused for; tests/train/test_mistakes.py has what it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from model.config import layer_matrix_parameters, load_sizes, num_parameters, state_memory_gib
from tests.train.mistakes import World, keys
from train.config.arguments import TrainingArguments, load_deepspeed
from train.config.ds_config import resolve_ds_config
from train.planning.memory import checkpoint_bytes
from train.planning.setting import Setting
from train.preflight import check, machine, sizes


def checked(
    world: World, world_size: int = 1, local_ranks: int = 1, devices: list[int] | None = None
) -> list[str]:
    arguments = TrainingArguments.from_dict(world.settings)
    return check.check(arguments, world_size, local_ranks, devices or [])


def test_a_good_configuration_is_not_remarked_on(world: World) -> None:
    assert checked(world) == [] and checked(world, 2, 2, [80 * 2**30] * 2) == []
    assert (
        check.check(TrainingArguments.from_dict(world.settings), 8, 8, None) == []
    )  # no driver that answers


def test_a_disk_that_will_not_hold_the_last_save_is_said(world: World, own_trained: Path) -> None:
    """own_trained has the checkpoints of steps 3 and 6."""
    keys(max_steps=100, allow_changes_on_resume=["max_steps"])(world)
    world.output = own_trained
    keys(output_dir=str(own_trained))(world)
    size = checkpoint_bytes(load_sizes(str(world.model)), 1, "fp8")
    assert size == pytest.approx(files_of(own_trained / "checkpoints/step-00000006"), rel=0.1)
    world.disk(2.1 * size)
    assert (
        checked(world) == []
    )  # two there, which will go, three that are kept, and the one that is being written
    keys(resume_from_checkpoint="never")(world)  # those there are moved aside, and stay; as hf/ does
    (remark,) = checked(world)
    assert "will not hold the last save" in remark and "4 more at a time (save_total_limit 3)" in remark
    keys(save_minutes=0)(world)
    assert checked(world) == []  # only one save
    schedule = [{"until_step": 5}, {"until_step": 9}, {}]
    for section, more in (({"schedule": schedule}, 3), ({"health_steps": 9, "on_trouble": "escalate"}, 4)):
        keys(precision=section)(world)
        assert f"{more} more at a time" in checked(world)[0]  # at each change, which nobody knows of trouble
    keys(precision={})(world)
    world.disk(1.9 * size)
    for save_steps, more in ((40, 3), (50, 2)):  # at 80 the last one is to come
        keys(save_steps=save_steps)(world)
        assert f"{more} more at a time" in checked(world)[0]
    parameters = num_parameters(load_sizes(str(world.model)))
    world.disk(2 * size + parameters)  # hf/ as well, of which there is another beside
    assert f"hf/ {sizes.size_text(2 * parameters)}" in checked(world)[0]
    keys(save_strategy="no")(world)
    world.disk(0)
    assert checked(world) == []


def test_what_another_user_began_is_refused_before_it_trains(
    world: World, own_trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder may be written, and what the first save or the export would write in it may not."""
    keys(output_dir=str(own_trained), max_steps=9, allow_changes_on_resume=["max_steps"])(world)
    assert checked(world) == []
    locked = {own_trained / name for name in ("checkpoints", "hf", "metrics.jsonl")}
    monkeypatch.setattr(os, "access", lambda place, mode: place not in locked or not mode & os.W_OK)
    with pytest.raises(check.PreflightError) as error:
        checked(world)
    assert (
        f"{own_trained}/metrics.jsonl, {own_trained}/checkpoints, {own_trained}/hf cannot be written by this user"
        in str(error.value)
    )
    locked.remove(own_trained / "metrics.jsonl")
    keys(save_strategy="no")(world)
    assert checked(world) == []
    keys(save_strategy="steps", max_steps=6)(world)  # it has all its steps
    assert checked(world) == []


def test_a_resume_with_something_else_is_refused_before_it_starts(world: World, own_trained: Path) -> None:
    """By the checkpoint that it would go on from, which is named. A damaged one is refused where it was asked for."""
    keys(output_dir=str(own_trained), learning_rate=1e-3)(world)
    with pytest.raises(
        check.PreflightError, match="step-00000006 is of a run(?s:.)*learning_rate: 0.005 -> 0.001"
    ) as error:
        checked(world)
    assert "--allow_changes_on_resume learning_rate" in str(error.value)
    keys(resume_from_checkpoint="never")(world)
    assert checked(world) == []
    start = own_trained / "checkpoints/step-00000003"
    keys(resume_from_checkpoint=str(start), output_dir=str(own_trained.parent / "branch"))(world)
    with pytest.raises(check.PreflightError, match="step-00000003 is of a run"):
        checked(world)
    keys(precision__auto=True)(world)
    assert checked(world) == []  # what that chooses is not known yet
    keys(precision__auto=False)(world)
    (start / "run_state.json").write_text("")
    with pytest.raises(check.PreflightError, match="run_state.json has 0 bytes, .* give auto, never"):
        checked(world)
    keys(
        resume_from_checkpoint="auto", output_dir=str(own_trained), allow_changes_on_resume=["learning_rate"]
    )(world)
    assert checked(world) == []


def files_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_is_not_counted_is_not_refused(world: World) -> None:
    """Room that a killed save takes until the next one."""
    size = checkpoint_bytes(load_sizes(str(world.model)), 1, "fp8")
    world.disk(0.9 * size)
    with pytest.raises(check.PreflightError, match="no room for the first save"):
        checked(world)
    left = world.output / "checkpoints/step-00000003"
    left.mkdir(parents=True)
    (left / "rank_00000.pt").write_bytes(bytes(size // 5))
    assert "will not hold the last save" in checked(world)[0]


@pytest.mark.parametrize(
    ("compute", "stage", "bytes_per_parameter"),
    [
        ("bf16", 0, 2 + 12), ("fp8", 1, 2 + 12), ("fp8", 3, 12), ("fp32", 0, 12), ("fp32", 1, 4 + 12), ("fp32", 3, 12),
    ],
)  # fmt: skip
def test_what_a_checkpoint_has_of_each_parameter(compute: str, stage: int, bytes_per_parameter: int) -> None:
    tiny = load_sizes("tiny")
    assert checkpoint_bytes(tiny, stage, compute) == bytes_per_parameter * num_parameters(tiny)
    if compute != "fp32":
        assert checkpoint_bytes(tiny, 1, compute, 6) == (2 + 2 + 6) * num_parameters(tiny)


def test_a_run_that_is_done_needs_no_disk_until_it_has_more_steps(world: World, own_trained: Path) -> None:
    keys(output_dir=str(own_trained))(world)
    world.disk(0)
    assert checked(world) == []
    keys(max_steps=7, allow_changes_on_resume=["max_steps"])(world)
    with pytest.raises(check.PreflightError, match="no room for the first save"):
        checked(world)


def test_checkpoints_beyond_the_limit_are_room_for_the_next_save(world: World, own_trained: Path) -> None:
    """own_trained has those of steps 3 and 6; of a limit of 1 the first one goes before the save."""
    keys(output_dir=str(own_trained), max_steps=9, allow_changes_on_resume=["max_steps"])(world)
    world.disk(0.5 * checkpoint_bytes(load_sizes(str(world.model)), 1, "fp8"))
    for limit, setting in ((2, "auto"), (1, str(own_trained / "checkpoints/step-00000003"))):
        keys(save_total_limit=limit, resume_from_checkpoint=setting)(world)
        with pytest.raises(check.PreflightError, match="no room for the first save") as refused:
            checked(world)
        assert ("lower save_total_limit, by which 2 checkpoints stay" in str(refused.value)) == (limit == 2)
    keys(save_total_limit=1, resume_from_checkpoint="auto")(world)
    assert checked(world) == []


def test_a_run_that_goes_on_needs_no_weights_to_begin_with(world: World, own_trained: Path) -> None:
    keys(output_dir=str(own_trained), model__init_from=str(world.folder / "gone"))(world)
    assert checked(world) == []
    keys(resume_from_checkpoint="never")(world)
    with pytest.raises(check.PreflightError, match="model.init_from: .*gone' is not a folder"):
        checked(world)


@pytest.mark.parametrize(
    ("compute", "stage", "world_size", "least"),
    [
        ("bf16", 0, 1, 16), ("bf16", 0, 8, 4 + 12 / 8), ("fp8", 1, 8, 4 + 12 / 8), ("fp8", 2, 8, 2 + 14 / 8),
        ("fp8", 3, 8, 16 / 8), ("fp32", 0, 1, 16), ("fp32", 1, 8, 8 + 8 / 8),
        ("fp32", 3, 8, 16 / 8),
    ],
)  # fmt: skip
def test_gpu_memory_is_refused_only_below_what_it_takes(
    world: World, compute: str, stage: int, world_size: int, least: float
) -> None:
    parameters = num_parameters(load_sizes(str(world.model)))
    zero = {"zero_optimization": {"stage": stage}}
    keys(precision__compute=compute, deepspeed=zero)(world)
    bytes_least = round(least * parameters)
    assert (
        state_memory_gib(load_sizes(str(world.model)), stage, world_size, compute) * 2**30 >= bytes_least - 1
    )
    with pytest.raises(check.PreflightError, match=f"at ZeRO {stage} on {world_size} rank.* a smaller model"):
        checked(world, world_size, 1, [bytes_least - 1000])
    assert "GPU memory" in checked(world, world_size, 1, [bytes_least + 1000])[0]  # it may just fit
    assert checked(world, world_size, 1, [16 * 2**30]) == []
    # the smallest of the GPUs that have a rank counts
    assert checked(world, 2, 1, [16 * 2**30, 1000]) == []
    with pytest.raises(check.PreflightError, match="GPU memory"):
        checked(world, 2, 2, [16 * 2**30, 1000])


@pytest.mark.parametrize(
    ("changes", "named", "not_named"),
    [
        (
            {},
            ["gradient_checkpointing true,", "optimizer_states (int8 takes least)", "ds_config_zero3.json)"],
            [],
        ),
        (
            {"optim": "muon"},
            ['ds_config_zero3.json, with optim "adamw")'],
            ["ZeRO 1 (", "optimizer_states"],
        ),
        (
            {"optim": "muon", "deepspeed": "ds_config_zero0.json"},
            ["ZeRO 1 (deepspeed: ds_config_zero1.json)", 'with optim "adamw")'],
            ["optimizer_states"],
        ),
        ({"deepspeed": "ds_config_zero3.json"}, ["more ranks or"], ["higher", "optimizer_states"]),
        ({"deepspeed": "ds_config_zero0.json"}, ["least; deepspeed: ds_config_zero1.json)"], []),
        (
            {"precision__optimizer_states": "int8"},
            ["ds_config_zero3.json, with precision.optimizer_states fp32)"],
            ["takes least"],
        ),
        ({"precision__optimizer_states": "bf16_remainder"}, ["optimizer_states (int8 takes least)"], []),
        ({"precision__compute": "fp32"}, ["higher ZeRO stage"], ["optimizer_states"]),
        (
            {"speed__cuda_graphs": True},
            [
                "gradient_checkpointing true with speed.cuda_graphs false",
                "json, with speed.cuda_graphs false)",
            ],
            [],
        ),
        ({"gradient_checkpointing": True}, ["higher ZeRO stage"], ["gradient_checkpointing"]),
        (
            {"model__variant": "hf", "precision__compute": "bf16", "model__compile": True},
            ["ds_config_zero2.json)"],
            ["ds_config_zero3"],
        ),
    ],
)
def test_memory_that_will_not_do_is_said_with_what_the_run_could_have_instead(
    world: World, changes: dict, named: list[str], not_named: list[str]
) -> None:
    """Before the run, and when it runs out: nothing that is set already, nothing that would be refused."""
    keys(**changes)(world)
    arguments = TrainingArguments.from_dict(world.settings)
    setting = Setting.of(
        arguments.resolve(2), resolve_ds_config(arguments, 2), load_sizes(str(world.model)), 2
    )
    parameters_only = sizes.memory_findings(arguments.resolve(2), setting, 1000)[0]
    _, remark = sizes.memory_findings(arguments.resolve(2), setting, 2**26)
    for text in named:
        assert text in remark
    for text in not_named:
        assert not any(text in told.partition("take ")[2] for told in (parameters_only, remark))
    assert [
        name for name in sizes.smaller_states(arguments) if name not in sizes.what_takes_less(arguments)
    ] == []
    assert [name for name in sizes.smaller_states(arguments) if name not in parameters_only] == []


def test_advice_needs_no_file_that_went_and_knows_what_msamp_asked_for(world: World) -> None:
    arguments = TrainingArguments.from_dict(world.settings)
    assert "higher ZeRO stage" in sizes.what_takes_less(replace(arguments, deepspeed="went.json"))
    states = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    asked = replace(arguments, deepspeed=states | {"msamp": {"enabled": True, "opt_level": "O2"}})
    assert (
        "takes least" not in sizes.what_takes_less(asked) and arguments.precision.optimizer_states == "fp32"
    )


def test_a_micro_batch_that_will_not_fit_is_said_with_one_that_does(world: World) -> None:
    keys(per_device_train_batch_size=2**17, precision__compute="bf16")(world)
    (remark,) = checked(world, devices=[4 * 2**30])
    assert "expected to take" in remark and "activations" in remark
    largest = int(remark.partition("a per_device_train_batch_size of at most ")[2].partition(",")[0])
    keys(per_device_train_batch_size=largest)(world)
    assert checked(world, devices=[4 * 2**30]) == []
    keys(per_device_train_batch_size=largest + 1)(world)
    assert len(checked(world, devices=[4 * 2**30])) == 1


def test_a_large_model_trains_on_a_cpu_where_that_is_asked_for(world: World) -> None:
    large = load_sizes("hare_1.1b")
    assert num_parameters(large) > check.CPU_PARAMETERS > num_parameters(load_sizes(str(world.model)))
    for backend, told in (("auto", 1), ("reference", 0)):
        keys(precision__backend=backend)(world)
        arguments = TrainingArguments.from_dict(world.settings)
        for sizes_of in (large, load_sizes("mistral_0.4b")):
            assert len(check.device_problems(arguments, sizes_of, 2, 0)) == told
        assert check.device_problems(arguments, load_sizes(str(world.model)), 2, 0) == []


@pytest.mark.parametrize(
    ("changes", "checkpoint", "export"),
    [
        ({}, 14.0, 2),
        ({"precision__optimizer_states": "bf16_remainder"}, 2 + 2 + 6.0, 2),
        ({"precision__compute": "fp32"}, 16.0, 4),
        ({"precision__compute": "fp32", "deepspeed": "ds_config_zero0.json"}, 12.0, 4),
    ],
)
def test_what_a_run_writes_is_by_its_types(
    world: World, changes: dict, checkpoint: float, export: int
) -> None:
    """Bytes of a parameter in a checkpoint and in hf/; Muon keeps one moment of the layers' matrices."""
    keys(**changes)(world)
    arguments, config = TrainingArguments.from_dict(world.settings).resolve(1), load_sizes(str(world.model))
    stage = load_deepspeed(arguments.deepspeed)["zero_optimization"]["stage"]
    need = sizes.disk_need(arguments, config, stage)
    parameters = num_parameters(config)
    assert need.checkpoint == checkpoint * parameters and need.export == export * parameters
    if not changes:
        muon = sizes.disk_need(replace(arguments, optim="muon"), config, stage)
        assert need.checkpoint - muon.checkpoint == 4 * layer_matrix_parameters(config)
    assert need.total == need.checkpoint * need.at_once + need.export


def test_each_set_for_evaluation_is_looked_at(world: World) -> None:
    keys(data__eval_sources={"good": str(world.others), "bad": str(world.folder / "nowhere")})(world)
    with pytest.raises(check.PreflightError, match="nowhere does not exist"):
        checked(world)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA out of memory. Tried to\nmore"), "CUDA out of memory. Tried to"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "DefaultCPUAllocator: can't"),
        (MemoryError(), "no memory left"),
        (RuntimeError("shapes do not fit"), ""),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, line: str) -> None:
    assert machine.out_of_memory(error).startswith(line) and bool(machine.out_of_memory(error)) == bool(line)
    assert "\n" not in machine.out_of_memory(error)


def test_moments_in_8_bits_need_torchao(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a configuration for MS-AMP too."""
    deepspeed = load_deepspeed("ds_config_zero1.json") | {"msamp": {"enabled": True, "opt_level": "O2"}}
    keys(precision={"compute": "bf16"}, deepspeed=deepspeed)(world)
    assert checked(world) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        check.PreflightError, match="optimizer_states fp8 needs the package torchao, which is not"
    ):
        checked(world)
