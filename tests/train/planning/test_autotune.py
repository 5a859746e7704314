"""precision.auto in training: what is asked for, what is reused, and that the run is the one written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.autotune import measure
from model.autotune.choice import Choice, Record
from model.autotune.measure import autotune
from model.autotune.task import Task
from model.config import GIB, layer_matrix_parameters, load_config, num_parameters
from model.fp8.recipes import PrecisionConfig
from tests.scripted_timer import Script
from train import train
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import differences, resume_differences
from train.config.ds_config import resolve_ds_config
from train.planning import autotune as glue
from train.record.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    config = load_config("tiny")
    config.vocab_size, config.num_hidden_layers, config.intermediate_size = 512, 2, 256
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return {
        "model": {"config": str(tmp_path / "config.json"), "variant": "te_linear"},
        "data": {"sources": {"text": str(tmp_path / "text")}},
        "precision": {"auto": True, "amax_history_len": 4},
        "output_dir": str(tmp_path / "run"),
        "max_steps": 4,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "max_eval_samples": 2,
    }


def arguments(settings: dict[str, Any], **changes: Any) -> TrainingArguments:
    return TrainingArguments.from_dict({**settings, **changes}).resolve(1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets a CPU count as a GPU on which bf16 is the fastest. Grows by an entry a measurement."""
    calls: list[int] = []

    def measure(task: Task, say: Callable[[str], None]) -> Record:
        calls.append(1)
        choice = Choice("bf16", False, "auto")
        return Record(**task.made_for(), choice=choice, why=["because"], seconds=1.0, measured=[])

    monkeypatch.setattr(PrecisionConfig, "emulated", property(lambda self: False))
    monkeypatch.setattr(glue, "autotune", measure)
    return calls


def resolve(args: TrainingArguments) -> tuple[TrainingArguments, Record | None, str]:
    lines: list[str] = []
    resolved, record = glue.resolve_auto(args, 1, lines.append)
    return resolved, record, "\n".join(lines)


def save(record: Record, output_dir: Path) -> None:
    """As a run does."""
    RunFolder(output_dir).autotune.write_text(record.to_json())


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ({"auto": True, "compute": "bf16"}, ["precision.auto", "compute fp8", "compute bf16"]),
        ({"auto": True, "recipe": "rowwise"}, ["precision.auto", "delayed or current or block", "rowwise"]),
        ({"auto": ""}, ["precision.auto", "a string that is not empty"]),
        ({"auto": 1}, ["precision.auto: 1 is given, true or false or a string that is not empty"]),
    ],
)
def test_what_auto_cannot_be_combined_with(settings: dict, precision: dict, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        arguments(settings, precision=precision)
    for word in words:
        assert word in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_the_configuration_stays(settings: dict) -> None:
    resolved, record, log = resolve(arguments(settings))
    assert record is None and "there is no GPU to measure on" in log
    by_hand = {key: value for key, value in settings["precision"].items() if key != "auto"}
    assert resolved == arguments(settings, precision=by_hand)


def test_off_is_off(settings: dict, measured: list[int]) -> None:
    args = arguments(settings, precision={})
    assert resolve(args) == (args, None, "") and not measured


def test_the_choice_becomes_the_configuration_and_is_reused(settings: dict, measured: list[int]) -> None:
    args = arguments(settings)
    resolved, record, _ = resolve(args)
    assert record is not None and record.choice == Choice("bf16", False, "auto")
    assert resolved.precision.compute == "bf16" and resolved.precision.auto is False
    output_dir = Path(settings["output_dir"])
    assert not output_dir.exists()
    output_dir.mkdir()
    save(record, output_dir)
    again, same, log = resolve(args)
    assert again == resolved and same == record and "not measured again" in log and len(measured) == 1
    assert not resume_differences(resolved.to_dict(), again.to_dict())

    # what is written is a configuration like any other, without a measurement
    from_file = TrainingArguments.from_dict(resolved.to_dict()).resolve(1)
    assert resolve(from_file) == (from_file, None, "")

    # by its path, elsewhere
    by_path = {**settings["precision"], "auto": str(output_dir / "autotune.json")}
    other = arguments(settings, precision=by_path, output_dir=str(output_dir / "other"))
    assert resolve(other)[0].precision == resolved.precision and len(measured) == 1


@pytest.mark.parametrize(
    ("stage", "main_grad", "graphs", "accumulation", "states", "beside"),
    [
        (0, False, True, 2, "fp32", 2 + 12),
        (1, True, True, 2, "fp32", 12 / 4),
        (1, True, True, 2, "bf16_remainder", 6 / 4),
        (2, False, True, 2, "fp32", (4 + 12) / 4),
        (3, False, False, 1, "fp32", (2 + 4 + 12) / 4 - 2),
    ],
)
def test_what_is_measured_is_what_the_zero_stage_runs(
    settings: dict, stage: int, main_grad: bool, graphs: bool, accumulation: int, states: str, beside: float
) -> None:
    """beside: bytes a parameter on 4 ranks that the measurement does not hold itself, as it does the whole weights and,
    with main_grad, float32 gradients."""
    args = arguments(settings, deepspeed=f"ds_config_zero{stage}.json")
    task = glue.task_of(args, resolve_ds_config(args, 1), 1)
    assert (task.main_grad, task.graphs_allowed, task.accumulation) == (main_grad, graphs, accumulation)
    changes = {"deepspeed": f"ds_config_zero{stage}.json", "precision": {"optimizer_states": states}}
    args = TrainingArguments.from_dict({**settings, **changes}).resolve(4)
    task = glue.task_of(args, resolve_ds_config(args, 4), 4)
    assert task.other_memory_gib == pytest.approx(beside * num_parameters(task.config) / GIB)
    if (stage, states) == (1, "fp32"):  # Muon has one moment of the layers' matrices
        muon = glue.task_of(replace(args, optim="muon"), resolve_ds_config(args, 4), 4)
        less = 4 * layer_matrix_parameters(task.config) / 4 / GIB
        assert task.other_memory_gib - muon.other_memory_gib == pytest.approx(less)


@pytest.mark.parametrize("changes", [{}, {"reduce_amax": False}, {"recipe": "block"}])
def test_graphs_may_be_chosen_on_several_gpus(settings: dict, changes: dict) -> None:
    """Around delayed scaling's reduction over ranks, too: tests/reliability/test_gpu_numbers.py runs them."""
    wanted = {**settings, "precision": {"auto": True, **changes}}
    for ranks in (1, 2):
        args = TrainingArguments.from_dict(wanted).resolve(ranks)
        assert glue.task_of(args, resolve_ds_config(args, ranks), ranks).graph_modes() == (False, True)
    # what the user turned on stays on
    args = TrainingArguments.from_dict({**wanted, "speed": {"cuda_graphs": True}}).resolve(2)
    assert glue.task_of(args, resolve_ds_config(args, 2), 2).graph_modes() == (True,)


def test_a_choice_for_other_ranks_stage_or_memory_is_not_reused(settings: dict, measured: list[int]) -> None:
    """Ranks and stage say how much memory the optimizer leaves, by which a choice is made."""
    _, record, _ = resolve(arguments(settings))
    assert record is not None
    Path(settings["output_dir"]).mkdir()
    save(record, Path(settings["output_dir"]))

    def log_of(ranks: int, **changes: Any) -> str:
        lines: list[str] = []
        glue.resolve_auto(
            TrainingArguments.from_dict({**settings, **changes}).resolve(ranks), ranks, lines.append
        )
        return "\n".join(lines)

    assert "not measured again" in log_of(1) and len(measured) == 1
    assert "ranks: 1 -> 2" in log_of(2) and len(measured) == 2
    assert "ZeRO stage: 1 -> 2" in log_of(1, deepspeed="ds_config_zero2.json") and len(measured) == 3
    record.circumstances["memory that the optimizer takes, GiB"] = 40.0
    save(record, Path(settings["output_dir"]))
    assert "memory that the optimizer takes, GiB: 40.0 -> 0.0" in log_of(1) and len(measured) == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"variant": "te_layer"}}, "asked.model.variant"),
        ({"model": {"attention_backend": "flash"}}, "asked.model.attention_backend"),
        ({"data": {"document_mask": True}}, "asked.data.document_mask"),
        ({"precision": {"fp8_format": "hybrid"}}, "asked.precision.fp8_format"),
        ({"speed": {"fused_cross_entropy": False}}, "asked.speed.fused_cross_entropy"),
        ({"max_seq_length": 128}, "circumstances.max_seq_length"),
        ({"per_device_train_batch_size": 4}, "circumstances.per_device_train_batch_size"),
        ({"gradient_checkpointing": True}, "circumstances.gradient_checkpointing circumstances.CUDA graphs allowed"),
        ({"gradient_accumulation_steps": 1}, "circumstances.more than one micro-batch a step"),
        (
            {"speed": {"main_grad": False}},
            "asked.speed.main_grad circumstances.weight gradients added in float32 by the GEMMs",
        ),
    ],
)  # fmt: skip
def test_a_choice_is_of_all_that_decides_it(settings: dict, changes: dict, named: str) -> None:
    """More micro-batches than one are alike."""

    def made_for(**changes: Any) -> dict[str, Any]:
        values = {k: {**settings.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}
        args = arguments(settings, **values)
        return glue.task_of(args, resolve_ds_config(args, 1), 1).made_for()

    before = made_for()
    assert made_for() == before == made_for(gradient_accumulation_steps=8)
    assert " ".join(d.key for d in differences(before, made_for(**changes))) == named


@pytest.mark.parametrize("part", ["torch", "fp8"])
def test_a_choice_is_of_its_kernels(settings: dict, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic ones are others; and so are those of other versions."""
    args = arguments(settings)
    task = glue.task_of(args, resolve_ds_config(args, 1), 1)
    before = task.made_for()
    torch.use_deterministic_algorithms(True)
    (changed,) = differences(before, task.made_for())
    assert str(changed) == "circumstances.deterministic kernels: false -> true"
    torch.use_deterministic_algorithms(False)
    assert before["versions"].keys() >= {"torch", "fp8", "cuda", "cudnn"}
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0")
    monkeypatch.setattr(task.resolved("bf16").te, "version", "another")
    found = {d.key for d in differences(before, task.made_for())}
    assert f"versions.{part}" in found and not [key for key in found if not key.startswith("versions.")]


def test_graphs_that_a_configuration_excludes_are_not_measured(settings: dict) -> None:
    args = arguments(settings, gradient_checkpointing=True)
    task = glue.task_of(args, resolve_ds_config(args, 1), 1)
    assert task.gradient_checkpointing and task.graph_modes() == (False,)


def test_a_run_that_chose_graphs_goes_on_with_recomputation(settings: dict, measured: list[int]) -> None:
    record = resolve(arguments(settings))[1]
    assert record is not None
    record.choice.cuda_graphs, record.choice.attention_backend = True, "fused"
    output_dir = Path(settings["output_dir"])
    (output_dir / "checkpoints/step-00000002").mkdir(parents=True)
    (output_dir / "checkpoints/step-00000002/manifest.json").write_text("{}")
    save(record, output_dir)
    chosen = resolve(arguments(settings))[0]
    assert chosen.speed.cuda_graphs and chosen.model.attention_backend == "fused"
    resumed, _, log = resolve(arguments(settings, gradient_checkpointing=True))
    assert not resumed.speed.cuda_graphs and resumed.precision.compute == "bf16"
    assert "not measured again" in log and len(measured) == 1


def test_other_circumstances_are_measured_anew_unless_a_run_goes_on(
    settings: dict, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = Path(settings["output_dir"])
    output_dir.mkdir()
    resolved, record, _ = resolve(arguments(settings))
    assert record is not None
    save(record, output_dir)
    changed = arguments(settings, gradient_checkpointing=True)
    _, _, log = resolve(changed)
    assert len(measured) == 2 and "gradient_checkpointing: false -> true" in log

    step = output_dir / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    going_on, _, log = resolve(changed)
    assert going_on.precision == resolved.precision and len(measured) == 2
    assert "not measured again" in log and "gradient_checkpointing: false -> true" in log
    # from another folder, by the checkpoint's path
    branch = arguments(settings, output_dir=str(output_dir / "branch"), resume_from_checkpoint=str(step))
    assert resolve(branch)[0].precision == resolved.precision and len(measured) == 2
    # nor by what a step does not compute with: looks at FP8, and what is done about alarms
    looks = {**settings["precision"], "health_steps": 7, "on_trouble": "escalate", "calibration_passes": 1}
    assert resolve(arguments(settings, precision=looks))[0].precision.compute == "bf16" and len(measured) == 2
    # other wishes are another choice; the checkpoint is compared with that later
    wishes = {**settings["precision"], "bf16_modules": ["lm_head", "*.o_proj"]}
    resolve(arguments(settings, precision=wishes))
    assert len(measured) == 3
    resolve(arguments(settings, resume_from_checkpoint="never", gradient_checkpointing=True))
    assert len(measured) == 4
    record.versions["torch"] = "2.0"
    save(record, output_dir)
    for setting, count in (("auto", 4), ("never", 5)):
        log = resolve(arguments(settings, resume_from_checkpoint=setting))[2]
        assert 'torch: "2.0" -> ' in log and len(measured) == count


def test_a_choice_for_something_else_is_refused(settings: dict, measured: list[int], tmp_path: Path) -> None:
    _, record, _ = resolve(arguments(settings))
    assert record is not None
    path = tmp_path / "choice.json"
    by_path = {**settings["precision"], "auto": str(path)}
    with pytest.raises(ConfigurationError, match=r"choice\.json cannot be read.*to true to measure anew"):
        resolve(arguments(settings, precision=by_path))
    path.write_text(record.to_json())
    for changes, words in (
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size: 2 -> 4"),
        ({"model": {**settings["model"], "variant": "te_layer"}}, '"te_linear" -> "te_layer"'),
        ({"model": {**settings["model"], "config": "tiny"}}, "model.vocab_size: 512 -> "),
    ):
        with pytest.raises(ConfigurationError) as error:
            resolve(arguments(settings, precision=by_path, **changes))
        assert words in str(error.value) and "measure anew" in str(error.value)
    record.circumstances["GPU"] = "NVIDIA H200"
    path.write_text(record.to_json())
    with pytest.raises(ConfigurationError, match='GPU: "NVIDIA H200" -> '):
        resolve(arguments(settings, precision=by_path))


def test_who_names_a_choice_means_its_circumstances_but_not_its_versions(
    settings: dict, measured: list[int], tmp_path: Path
) -> None:
    _, record, _ = resolve(arguments(settings))
    assert record is not None
    path, output_dir = tmp_path / "choice.json", Path(settings["output_dir"])
    by_path = arguments(settings, precision={**settings["precision"], "auto": str(path)})
    record.versions["torch"] = "2.0"
    path.write_text(record.to_json())
    assert 'changed: torch: "2.0" -> ' in resolve(by_path)[2]
    record.circumstances["GPU"] = "NVIDIA H200"
    path.write_text(record.to_json())
    step = output_dir / "checkpoints/step-00000002"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    save(record, output_dir)
    assert resolve(arguments(settings))[1] == record and len(measured) == 1  # the run's own, as it goes on
    with pytest.raises(ConfigurationError, match='GPU: "NVIDIA H200" -> '):
        resolve(by_path)


def test_a_choice_of_a_version_without_a_key_holds_for_what_that_version_ran(
    settings: dict, measured: list[int]
) -> None:
    output_dir, key = Path(settings["output_dir"]), "fp8_head_gradients"
    output_dir.mkdir()
    before = arguments(settings, precision={**settings["precision"], key: False})
    _, record, _ = resolve(before)
    assert record is not None
    del record.asked["precision"][key]
    save(record, output_dir)
    assert "not measured again" in resolve(before)[2] and len(measured) == 1
    assert f"precision.{key}: false -> true" in resolve(arguments(settings))[2] and len(measured) == 2


@pytest.mark.parametrize(("recipe", "holds"), [("current", True), ("delayed", False)])
def test_a_choice_holds_where_a_version_has_another_default_that_nothing_reads(
    settings: dict, measured: list[int], recipe: str, holds: bool
) -> None:
    settings["precision"] = {"auto": True, "recipe": recipe}
    Path(settings["output_dir"]).mkdir()
    _, record, _ = resolve(arguments(settings))
    assert record is not None
    record.asked["precision"]["amax_history_len"] = 1024
    save(record, Path(settings["output_dir"]))
    assert ("not measured again" in resolve(arguments(settings))[2]) is holds and len(measured) == 2 - holds


def run(settings: dict[str, Any], **changes: Any) -> list[tuple]:
    """Train; returns what must be equal, bit for bit, of two runs with the same numbers."""
    args = arguments(settings, **changes)
    train.run_training(args)
    lines = (Path(str(args.output_dir)) / "metrics.jsonl").read_text().splitlines()
    return [(m["step"], m["loss"], m["grad_norm"], m.get("eval_loss")) for m in map(json.loads, lines)]


def check_runs(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """A run with auto, the same resumed, and the same with the choice written by hand; returns the choice."""
    first = run(settings)
    output_dir = Path(settings["output_dir"])
    written = json.loads((output_dir / "train_config.json").read_text())
    choice = json.loads((output_dir / "autotune.json").read_text())["choice"]
    assert written["precision"]["auto"] is False
    assert written["precision"]["compute"] == choice["compute"]
    assert written["model"]["attention_backend"] == choice["attention_backend"]

    # as if it had been stopped in its third step
    (output_dir / "checkpoints/step-00000004/manifest.json").unlink()
    capsys.readouterr()
    assert run(settings) == first
    assert "not measured again" in capsys.readouterr().out

    by_hand = {**written, "output_dir": str(output_dir) + "-by-hand"}
    assert run(by_hand) == first
    assert not (Path(by_hand["output_dir"]) / "autotune.json").exists()
    return choice


@pytest.fixture
def prepared(settings: dict, corpus: Path, prepare: Callable[..., int]) -> dict[str, Any]:
    """The settings, with data."""
    folder = Path(settings["data"]["sources"]["text"])
    assert prepare(folder, corpus, eval_fraction=0.2) == 0
    return settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
def test_a_run_with_auto_is_the_run_written_by_hand(
    prepared: dict, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real measurement but for its times, by which bf16 is the faster."""
    script = Script(2 * 330.0, 300.0, 2 * 330.0)
    monkeypatch.setattr(PrecisionConfig, "emulated", property(lambda self: False))
    monkeypatch.setattr(glue, "autotune", lambda task, say: autotune(task, say, timer=script))
    assert check_runs(prepared, capsys)["compute"] == "bf16"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_a_run_with_auto_is_the_run_written_by_hand_on_a_gpu(
    prepared: dict, variant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WINDOW_MS", 20.0)
    prepared["model"]["variant"] = variant
    choice = check_runs(prepared, capsys)
    assert choice["attention_backend"] in ("fused", "flash")
