"""precision.schedule: a change of the precision within a run is a stop and a resume with others, bit for bit."""

import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from model.fp8.precision import PrecisionError
from model.startup_check import StartupCheckError
from tests.reliability.launching import clean_environment, launch
from tests.train.runs import PRECISIONS, ROOT, curve, gradients_without_fp8, metrics, run
from train import setup
from train.checkpoint import save
from train.checkpoint.files import committed, read_state
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.load import build_arguments, resolve_arguments
from train.config.schedule import escalates, order_problems, precisions_of, stage_at, stage_shares
from train.engine.zero import masters
from train.evaluation.models import plan_model
from train.record.history import read_history
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

START = "checkpoints/step-00000003"


def tensors(folder: Path, step: int) -> list[Any]:
    """All numbers in a checkpoint's files with weights, optimizer, FP8 state and random generators."""
    files = sorted((folder / f"checkpoints/step-{step:08d}").glob("*.pt"))
    found = tree_leaves([torch.load(file, weights_only=False) for file in files])
    found = [leaf.flatten().tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
    return [leaf for leaf in found if isinstance(leaf, int | float | list)]


def test_a_change_is_a_stop_and_a_resume(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a startup check and a speed of its own, and a checkpoint to resume from. What is measured beside the plan,
    which is of the first phase, is measured in that."""
    prediction = SimpleNamespace(to_json=dict, compare=lambda peak_gib, speed: "compared")
    monkeypatch.setattr(setup, "predict", lambda *_: prediction)
    first, second = PRECISIONS["bf16"], PRECISIONS["delayed"]
    settings |= {"max_steps": 5, "logging_steps": 2}
    scheduled = {"precision": {"schedule": [{"until_step": 3, **first}, second]}}
    whole = run(settings, **scheduled)
    phases = {m["step"]: m["precision_stage"] for m in metrics(whole) if "precision_stage" in m}
    assert {s: (v["number"], v["compute"]) for s, v in phases.items()} == {3: (1, "bf16"), 5: (2, "fp8")}
    (start,) = read_starts(RunFolder(whole))
    assert start["plan"]["measured"]["tokens_per_second"] == phases[3]["tokens_per_second"] > 0
    (noted,) = start["stages"]
    assert start["fp8"] == "bf16" and noted["step"] == 3 and noted["fp8"].startswith("6/7 delayed")
    assert noted["new_stage"] and noted["took_s"] > 0 and noted["proof"]
    assert read_history(whole).fp8() == f"bf16; then {noted['fp8']}"
    assert plan_model(whole / START, None).precision.compute == "bf16"
    assert read_state(whole / "checkpoints/step-00000005").precision["amax_history_len"] == 4

    two = tmp_path / "two"
    changed = {"precision": second, "allow_changes_on_resume": True}
    run(settings, **changed, output_dir=str(two), resume_from_checkpoint=str(whole / START))
    again = tmp_path / "again"
    run(settings, **scheduled, output_dir=str(again), resume_from_checkpoint=str(whole / START))
    for folder in (two, again):
        assert curve(folder) == curve(whole)[2:] and tensors(folder, 5) == tensors(whole, 5)


def test_a_change_is_watched(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a start and steps are: ranks that hang would be waited for, for the day that they wait for each other."""
    watched, build_engine = list[int](), setup.build_engine_and_resume

    def watched_build_engine(*of_run: Any) -> Any:
        watched.append(sum(thread.name == "watchdog" for thread in threading.enumerate()))
        return build_engine(*of_run)

    monkeypatch.setattr(setup, "build_engine_and_resume", watched_build_engine)
    schedule = [{"until_step": 1, **PRECISIONS["bf16"]}, PRECISIONS["current"]]
    run(settings, max_steps=2, precision={"schedule": schedule})
    assert watched == [1, 1] and "watchdog" not in [thread.name for thread in threading.enumerate()]


PAIRS = [("delayed", "current"), ("current", "block"), ("block", "delayed"), ("delayed", "bf16")]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_recipe_is_begun_and_left_as_by_a_resume(
    settings: dict, tmp_path: Path, first: str, second: str
) -> None:
    schedule = [{"until_share": 0.5, **PRECISIONS[first]}, PRECISIONS[second]]
    whole = run(settings, precision={"schedule": schedule})
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    run(settings, output_dir=one, precision=PRECISIONS[first], save_steps=3)
    changed = {"output_dir": two, "precision": PRECISIONS[second], "allow_changes_on_resume": True}
    run(settings, **changed, resume_from_checkpoint=f"{one}/{START}")
    assert curve(whole) == curve(Path(one))[:3] + curve(Path(two))
    assert tensors(whole, 6) == tensors(Path(two), 6)


THREE = [{"until_tokens": 512, "compute": "bf16"}, {"until_step": 4}, {"recipe": "current"}]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "steps"), [(0, [4]), (1, range(1, 6)), (2, [2]), (3, [2, 3])])
def test_a_run_goes_on_from_any_step_of_its_schedule(
    settings: dict, tmp_path: Path, stage: int, steps: Iterable[int]
) -> None:
    """The changes are those after steps 2 and 4."""
    settings |= {"precision": {"schedule": THREE}, "deepspeed": f"ds_config_zero{stage}.json"}
    whole = run(settings, save_steps=1, save_total_limit=10)
    for step in steps:
        branch = {"output_dir": str(tmp_path / f"from-{step}"), "save_steps": 2}
        start = str(whole / f"checkpoints/step-{step:08d}")
        folder = run(settings, **branch, resume_from_checkpoint=start)
        assert curve(folder) == curve(whole)[step:] and tensors(folder, 6) == tensors(whole, 6)


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_change_together_and_go_on_as_a_start_does(settings: dict, tmp_path: Path) -> None:
    schedule = [{"until_step": 3, "compute": "bf16"}, {}]
    settings |= {"precision": {"schedule": schedule}, "deepspeed": "ds_config_zero1.json"}
    folders = [tmp_path / "whole", tmp_path / "again"]
    start = ["never", str(folders[0] / START)]
    for folder, resume_from in zip(folders, start, strict=True):
        of_folder = {"output_dir": str(folder), "resume_from_checkpoint": resume_from}
        (tmp_path / "config.json").write_text(json.dumps(settings | of_folder))
        done = launch(2, "train/train.py", str(tmp_path / "config.json"))
        assert done.returncode == 0, done.stdout[-3000:]
    whole, again = folders
    assert curve(again) == curve(whole)[3:] and tensors(again, 6) == tensors(whole, 6)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_a_stage_held_is_gone_in_the_next_and_its_proof_is_a_refusal(
    settings: dict, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    """Model, masters and moments would not fit twice; and FP8 that would not run ends a run that was in bf16."""
    held: list[weakref.ref] = []
    check_startup, build_engine = setup.check_startup, setup.build_engine_and_resume

    def proves(*of_run: Any) -> list[str]:
        assert not [each for each in held if each() is not None]
        return check_startup(*of_run)

    def built(*of_run: Any) -> tuple:
        engine, micro_step = build_engine(*of_run)
        held[:] = map(
            weakref.ref, (engine, *engine.module.parameters(), *(m.tensor for m in masters(engine)))
        )
        if len(of_run[1].precision.config.bf16_modules) == 2:
            gradients_without_fp8(monkeypatch)
        return engine, micro_step

    monkeypatch.setattr(setup, "check_startup", proves)
    monkeypatch.setattr(setup, "build_engine_and_resume", built)
    one, two = {"until_step": 1}, {"until_step": 2, "compute": "bf16", "bf16_modules": ["lm_head", "*.0"]}
    with pytest.raises(StartupCheckError, match="the backward of 6 FP8 modules ran 9 FP8 GEMMs, not 18"):
        run(
            settings,
            max_steps=3,
            precision={"schedule": [one, two, {}]},
            deepspeed=f"ds_config_zero{zero}.json",
        )
    assert [m["step"] for m in metrics(Path(settings["output_dir"]))] == [1, 2]


def test_saves_of_changes_make_room_first(settings: dict, tmp_path: Path) -> None:
    """Of two that are kept those of save_steps stay, however many stages there are; also after a resume."""
    stages = [{"until_step": step, "compute": ("fp8", "bf16")[step // 2 % 2]} for step in (1, 3, 4)]
    settings |= {"save_steps": 2, "save_total_limit": 2, "precision": {"recipe": "current"}}
    settings["precision"]["schedule"] = [*stages, {"until_step": 5}, {"compute": "bf16"}]
    whole = run(settings)
    assert [path.name[-1] for path in committed(whole / "checkpoints")] == ["4", "6"]
    start = str(whole / "checkpoints/step-00000004")
    again = run(settings, output_dir=str(tmp_path / "again"), resume_from_checkpoint=start)
    for folder in (whole, again):
        state = read_state(folder / "checkpoints/step-00000006")
        assert state.precision_changes == [1, 3, 4, 5] and state.unscheduled == {1, 3, 5}


def test_a_later_stage_that_cannot_run_ends_the_run_before_its_first_step(settings: dict) -> None:
    schedule = [{"until_step": 3, "compute": "bf16"}, {"bf16_modules": ["no.such"]}]
    with pytest.raises(
        PrecisionError, match=r"stage 2 of 2 .*: precision\.bf16_modules: 'no\.such' matches no"
    ):
        run(settings, precision={"schedule": schedule})
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_save_that_fails_at_a_change_ends_the_run(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing that the next stage could begin from; the save before it is as it was."""
    write = save.write_tensors

    def full(path: Path, value: Any) -> Any:
        if path.parent.name == "step-00000003":
            raise OSError(f"{path} could not be written: No space left on device")
        return write(path, value)

    monkeypatch.setattr(save, "write_tensors", full)
    settings |= {"on_save_failure": "continue", "save_steps": 2}
    with pytest.raises(save.SaveError, match="No space left on device"):
        run(settings, precision={"schedule": [{"until_step": 3, "compute": "bf16"}, {}]})
    folder = RunFolder(settings["output_dir"])
    assert [path.name for path in committed(folder.checkpoints)] == ["step-00000002"]
    assert read_starts(folder)[0]["ended"]["how"] == "failed"


def arguments(settings: dict, schedule: Any, **changes: Any) -> TrainingArguments:
    precision = {"schedule": schedule, **changes.pop("precision", {})}
    return resolve_arguments(build_arguments({**settings, "precision": precision, **changes}), 1)


def test_a_stage_is_a_function_of_steps_and_tokens(settings: dict) -> None:
    """A step has 256 tokens; after a resume with more of them what counts is those of the run."""
    args = arguments(settings, [{"until_tokens": 500}, {"until_share": 0.7}, {"recipe": "current"}])
    assert [stage_at(args, n, 256 * n) for n in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert stage_at(args, 1, 500) == 1 and stage_at(args, 1, 499) == 0
    assert stage_at(build_arguments(settings), 3, 700) == 0


@pytest.mark.parametrize(("steps", "of_stages"), [(6, [2, 2, 2]), (3, [2, 0, 1]), (1, [1, 0, 0])])
def test_a_plan_knows_how_much_of_a_run_each_stage_is(
    settings: dict, steps: int, of_stages: list[int]
) -> None:
    """Also of fewer steps than it comes to its last stage in."""
    args = arguments(settings, [{"until_tokens": 500}, {"until_share": 0.7}, {"recipe": "current"}])
    assert stage_shares(args, steps) == pytest.approx([count / steps for count in of_stages])


def test_modules_go_up_in_stages_with_fp8_alone(settings: dict) -> None:
    section = {"health_steps": 1}
    bf16 = {"until_step": 2, "compute": "bf16"}
    for stages, may in (
        ([bf16 | {"on_trouble": "escalate"}, {}], False),
        ([bf16, {"on_trouble": "escalate"}], True),
    ):
        assert escalates(arguments(settings, stages, precision=section).precision) == may


def test_a_stage_has_what_it_names_and_else_what_the_section_has(settings: dict) -> None:
    """A knob of the section that another recipe does not read is no mistake in its stage."""
    section = {"margin": 2, "health_steps": 5, "fast_accumulation_wgrad": True}
    schedule = [{"until_step": 2, "margin": 0}, {"until_step": 4, "recipe": "block", "amax_epsilon": 1.0}]
    args = arguments(settings, [*schedule, {}], precision=section)
    found = precisions_of(args.precision)
    assert [(p.recipe, p.margin, p.amax_epsilon) for p in found] == [
        ("delayed", 0, 0.0),
        ("block", 0, 1.0),
        ("delayed", 2, 0.0),
    ]
    assert [p.fast_accumulation_wgrad for p in found] == [True, False, True]
    assert all(p.health_steps == 5 and p.schedule is None for p in found)


@pytest.mark.parametrize(
    ("schedule", "at", "problem"),
    [
        (
            [{"until_share": 0.5}, {"until_tokens": 700}, {}],
            (0, 0),
            "until_tokens 700 is step 3, and the stage begins",
        ),
        ([{"until_tokens": 10**9}, {}], (0, 0), "is step 3906250, and the run has max_steps 6"),
        # the first two steps had half as many tokens: five of today's are left to it
        ([{"until_tokens": 1300}, {}], (2, 256), "until_tokens 1300 is step 7, and the run has max_steps 6"),
        ([{"until_tokens": 1280}, {}], (2, 512), None),
        # over, whenever it would end today
        ([{"until_tokens": 1600}, {}], (4, 2048), None),
        ([{"until_tokens": 700}, {"until_step": 3}, {}], (4, 1024), None),
        (
            [{"until_step": 1}, {"until_tokens": 700}, {"until_step": 4}, {}],
            (1, 64),
            "until_step 4 is step 4, and",
        ),
    ],
)
def test_where_a_stage_ends_by_tokens_is_known_with_the_checkpoint(
    settings: dict, schedule: Any, at: tuple[int, int], problem: str | None
) -> None:
    args = arguments(settings, schedule)  # of a run that may have come to anywhere
    found = order_problems(args, *at)
    assert [problem in line for line in found] == [True] if problem else found == []


def test_a_run_that_begins_with_stages_that_it_does_not_come_to_is_refused(settings: dict) -> None:
    settings["precision"] = {"schedule": [{"until_tokens": 10**9}, {}]}
    with pytest.raises(ConfigurationError, match="is step 3906250, and the run has max_steps 6"):
        run(settings)


BAD = [
    (
        [{"until_step": 2}, {"until_step": 2, "recipe": "current"}, {}],
        {},
        "[1] (stage 2 of 3): until_step 2 is step 2",
    ),
    ([{"until_step": 6}, {}], {}, "[0] (stage 1 of 2): until_step 6 is step 6, and the run has max_steps 6"),
    ([{"until_share": 0.01}, {}], {}, "until_share 0.01 is step 0, and the stage begins after step 0"),
    (
        [{"compute": "bf16"}, {}],
        {},
        "[0] (stage 1 of 2): it has no end; give one of until_step, until_tokens",
    ),
    ([{"until_step": 2, "until_share": 0.5}, {}], {}, "it has until_step and until_share; give one of"),
    (
        [{"until_step": 2}, {"until_step": 4}],
        {},
        "the last stage runs to the end of the run; remove its until_step",
    ),
    (
        [{"until_step": 2, "recipe": "block", "margin": 1}, {}],
        {},
        "(stage 1 of 2): precision.margin: only the recipe",
    ),
    (
        [{"until_step": 2, "recipe": "rowwise"}, {}],
        {},
        "(stage 1 of 2): model.variant te_layer has no recipe rowwise",
    ),
    (
        [{"until_step": 2, "compute": "fp32"}, {}],
        {},
        "compute is fp32 and fp8; only fp8 and bf16 keep weights",
    ),
    (
        [{"until_step": 2}, {}],
        {"save_strategy": "no"},
        "goes on from a checkpoint; set save_strategy to steps",
    ),
    ([{"until_step": 2}, {}], {"precision": {"auto": True}}, "auto chooses one precision for the whole run"),
    (
        [{"until_step": 2}, {}],
        {"max_seq_length": 33},
        "FP8 needs batch size x sequence length divisible by 16",
    ),
    (
        [{"until_step": 2, "recipee": "block"}, {}],
        {},
        "schedule[0].recipee: unknown key (did you mean recipe?)",
    ),
    (
        [{"until_step": 2, "backend": "auto"}, {}],
        {},
        "schedule[0].backend: it cannot differ from item to item; set it for the whole run, as precision.backend",
    ),
    ([{"until_step": 2, "margin": -1}, {}], {}, "schedule[0].margin: -1 is given, an integer of at least 0"),
    ([{"until_share": 1.0}, {}], {}, "schedule[0].until_share: 1.0 is given, a number above 0 and below 1"),
    ([], {}, "[] is given, a list of at least one entry of which each is an object or null is expected"),
]


@pytest.mark.parametrize(("schedule", "changes", "message"), BAD)
def test_a_bad_schedule_is_one_error_that_says_what_to_do(
    settings: dict, schedule: Any, changes: dict, message: str
) -> None:
    changes = {**changes, "precision": {"compute": "bf16"}} if "max_seq_length" in changes else changes
    schedule = [{**schedule[0], "compute": "fp8"}, {}] if "max_seq_length" in changes else schedule
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        arguments(settings, schedule, **changes)


EDITED_MEANWHILE = """
import sys
from train import train
from train.trainer import Trainer

take = Trainer.take_step

class Edited:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("train", "model"):
            raise ImportError(f"{name} has another text than what runs")

def step(self):
    if self.state.step == 0:
        sys.meta_path.insert(0, Edited())
    return take(self)

Trainer.take_step = step
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.interpreter
def test_sources_that_are_edited_while_it_runs_do_not_end_a_run(settings: dict, tmp_path: Path) -> None:
    """Whatever comes after the first step: an evaluation, another precision, the export."""
    settings |= {"max_steps": 3, "eval_steps": 1}
    settings["precision"] = {"schedule": [{"until_step": 2}, {"compute": "bf16"}]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    program = [sys.executable, "-c", EDITED_MEANWHILE, str(tmp_path / "config.json")]
    done = subprocess.run(program, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (Path(settings["output_dir"]) / "hf/model.safetensors").is_file()
