"""The training configuration: what is accepted, what is refused and with which words, and that every key is read."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from model.config import load_config, load_sizes
from train.config.arguments import (
    CONFIG_FOLDER,
    REPOSITORY,
    ConfigurationError,
    TrainingArguments,
    load_arguments,
)
from train.config.command_line import help_text
from train.config.differences import Difference, differences, resume_differences, rule_of
from train.config.display import table
from train.config.schema import FOREIGN, keys_of, read_json

MINIMAL = {"model": {"config": "tiny"}, "data": {"sources": {"a": "data/a"}}, "max_steps": 100}


def arguments(**changes):
    """The minimal configuration with top-level keys, or dotted ones with __ for the dot, changed."""
    raw = json.loads(json.dumps(MINIMAL))
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (raw.setdefault(section, {}) if section else raw)[name] = value
    return TrainingArguments.from_dict(raw)


def refused(**changes):
    with pytest.raises(ConfigurationError) as error:
        arguments(**changes)
    return str(error.value)


def write(folder: Path, content, name="run.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_defaults_follow_the_documented_names():
    a = arguments()
    assert (a.model.variant, a.precision.compute, a.precision.recipe) == ("te_layer", "fp8", "delayed")
    assert (a.learning_rate, a.lr_scheduler_type, a.adam_beta2, a.seed) == (3e-4, "cosine", 0.95, 42)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learnin_rate": 1}, ["learnin_rate: unknown key", "did you mean learning_rate?"]),
        ({"recipe": "delayed"}, ["recipe: unknown key", "precision.recipe"]),
        ({"model__recipe": "delayed"}, ["model.recipe: unknown key", "precision.recipe"]),
        ({"precision__amax_histroy_len": 16}, ["precision.amax_histroy_len", "precision.amax_history_len"]),
        ({"max_steps": True}, ["max_steps: true is given, an integer above 0 is expected"]),
        ({"max_steps": 10.0}, ["max_steps: 10.0 is given, an integer above 0 is expected"]),
        ({"max_steps": "10"}, ['max_steps: "10" is given, an integer above 0 is expected']),
        ({"seed": None}, ["seed: null is given, an integer between 0 and 4294967295 is expected"]),
        (
            {"learning_rate": False},
            ["learning_rate: false is given, a number above 0 and of at most 100 is expected"],
        ),
        ({"model": "tiny"}, ['model: "tiny" is given, an object', "for example --model.config VALUE"]),
        (
            {"data__sources": ["a"]},
            ['data.sources: ["a"] is given', """--data.sources '{"NAME": "data/pretrain"}'"""],
        ),
        ({"deepspeed": 5}, ["for example --deepspeed '{"]),
        ({"precision__bf16_modules": "lm_head"}, ["a list", """--precision.bf16_modules '["lm_head"]'"""]),
        (
            {"learning_rate": 0},
            ["learning_rate: 0 is given, a number above 0 and of at most 100 is expected"],
        ),
        ({"learning_rate": float("nan")}, ["learning_rate: NaN is given, a finite number above 0"]),
        ({"seed": -1}, ["seed: -1", "between 0 and 4294967295"]),
        ({"seed": 2**32}, ["seed: 4294967296", "between 0 and 4294967295"]),
        ({"model__attention_backend": "cudnn"}, ["auto, fused, flash, unfused"]),
        ({"min_lr_ratio": 1.5}, ["min_lr_ratio: 1.5", "between 0 and 1"]),
        ({"adam_beta1": 1.0}, ["adam_beta1: 1.0", "below 1"]),
        ({"warmup_steps": 101}, ["warmup_steps 101, max_steps 100", "longer than the run"]),
        ({"decay_steps": 5}, ["decay_steps 5", "warmup_stable_decay"]),
        ({"muon_momentum": 0.9}, ['optim "adamw", muon_momentum 0.9', "belongs to muon"]),
        ({"lr_scheduler_type": "warmup_stable_decay"}, ["decay_steps null", "warmup_stable_decay"]),
        ({"save_strategy": "epoch"}, ['save_strategy: "epoch" is given, one of steps, no']),
        ({"lr_scheduler_type": "cosin"}, ['"cosin"', "cosine, linear, constant, warmup_stable_decay"]),
        (
            {"data__sources": {}},
            ["data.sources: {} is given", "at least one entry", """'{"NAME": "data/pretrain"}'"""],
        ),
        ({"spike_window": 3}, ["spike_window: 3 is given, an integer between 16 and 1000000"]),
        ({"hang_timeout_s": 1e12}, ["hang_timeout_s: 1000000000000.0 is given, a number between 0 and"]),
        (
            {"hang_timeout_s": float("inf")},
            ["hang_timeout_s: Infinity is given, a finite number between 0 and"],
        ),
        ({"precision__auto": "autotune.json"}, ["precision.auto"]),
        ({"deepspeed": ""}, ['deepspeed: "" is given, a string that is not empty or an object']),
        ({"model__init_from": ""}, ['model.init_from: "" is given, a string that is not empty or null']),
        ({"data__sources": {"a": 5}}, ["data.sources.a: 5 is given, a string is expected"]),
        (
            {"data__weights": "x"},
            ['data.weights: "x" is given, an object whose values are a number or a list'],
        ),
        ({"data__weights": {"a": "x"}}, ['data.weights.a: "x" is given, a number is expected']),
        ({"data__weights": [5]}, ["data.weights[0]: 5 is given, an object is expected"]),
        (
            {"data__weights": [{"weight": {"a": 1}}]},
            ["data.weights[0].weight: unknown key (did you mean weights?)"],
        ),
        ({"run_name": "\udce9"}, ["is not Unicode text"]),
        ({"data__weights": {"b": 1}}, ["data.weights: there is no source 'b'"]),
        ({"data__weights": {"a": 0}}, ["data.weights: the source 'a' has no weight above 0"]),
        ({"model__variant": "hf"}, ["model.variant", "precision.compute", "bf16"]),
        ({"model__variant": "torchao"}, ["recipe delayed", "precision.recipe to tensorwise or rowwise"]),
        ({"precision__recipe": "rowwise"}, ["te_layer has no recipe rowwise", "delayed or current or block"]),
        ({"model__compile": True}, ["model.compile", "hf or torchao"]),
        ({"model__compile": "yes"}, ['model.compile: "yes" is given', "true or false"]),
        ({"per_device_train_batch_size": 1, "max_seq_length": 24}, ["divisible by 16", "max_seq_length 24"]),
        ({"per_device_eval_batch_size": 1, "max_seq_length": 40}, ["per_device_eval_batch_size 1"]),
        ({"precision__compute": "fp4"}, ["precision.compute", "fp4", "fp8"]),
        ({"speed__cuda_graphs": True, "gradient_checkpointing": True}, ["turn gradient_checkpointing or"]),
        ({"precision__recipe": "block", "precision__margin": 1}, ["precision.margin"]),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(changes, words):
    message = refused(**changes)
    for word in words:
        assert word in message


def test_all_problems_come_at_once_without_follow_ups():
    message = refused(
        learnin_rate=1, max_steps="many", save_steps=-1, precision__margin=1.5, model__variant="best"
    )
    assert "5 problems" in message
    for key in ("learnin_rate", "max_steps", "save_steps", "precision.margin", "model.variant"):
        assert key in message
    assert "warmup" not in message  # its check needs max_steps, which has no value


def test_what_a_variant_does_not_have_is_named_with_other_problems():
    message = refused(model__variant="torchao", precision__margin=-1, max_steps=0)
    assert "3 problems" in message and "tensorwise or rowwise" in message and "precision.margin" in message
    message = refused(model__variant="torchao", precision__recipe="mxfp8")
    assert "has a problem" in message and "delayed, current, block, tensorwise, rowwise" in message


def test_required_keys_are_named_when_missing():
    with pytest.raises(ConfigurationError) as error:
        TrainingArguments.from_dict({})
    for key in ("max_steps: required", "model.config: required", "data.sources: required"):
        assert key in str(error.value)


def test_integers_are_accepted_as_numbers_and_compare_equal():
    assert arguments(weight_decay=0, data__weights={"a": 1}) == arguments(
        weight_decay=0.0, data__weights={"a": 1.0}
    )
    assert isinstance(arguments(weight_decay=0).weight_decay, float)


def test_resolve_derives_accumulation_from_tokens_and_back():
    a = arguments(per_device_train_batch_size=4, max_seq_length=64, train_batch_size_tokens=2048)
    assert a.resolve(1).gradient_accumulation_steps == 8
    assert a.resolve(4).gradient_accumulation_steps == 2
    b = arguments(per_device_train_batch_size=4, max_seq_length=64, gradient_accumulation_steps=3).resolve(2)
    assert b.train_batch_size_tokens == 4 * 64 * 2 * 3
    assert arguments().resolve(1).gradient_accumulation_steps == 1
    assert b.per_device_eval_batch_size == 4
    assert b.resolve(2) == b
    assert a.gradient_accumulation_steps is None  # the original is untouched


def test_batches_that_do_not_divide_or_disagree_are_refused():
    a = arguments(per_device_train_batch_size=4, max_seq_length=64, train_batch_size_tokens=2000)
    with pytest.raises(ConfigurationError, match="2000 is not divisible.*1792 or 2048"):
        a.resolve(1)
    with pytest.raises(ConfigurationError, match="not divisible.*nearest that are: 2304"):
        a.resolve(9)
    b = arguments(max_seq_length=64, train_batch_size_tokens=2048, gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="contradicts gradient_accumulation_steps 2.*remove one"):
        b.resolve(1)


def test_resolved_configuration_round_trips_through_a_file(tmp_path):
    a = arguments(precision__recipe="current", data__weights={"a": 2}).resolve(2)
    a.output_dir = "somewhere"
    path = write(tmp_path, a.to_dict())
    assert load_arguments([path]).resolve(2) == a


def test_command_line_overrides(tmp_path):
    path = write(tmp_path, MINIMAL)
    a = load_arguments(
        [
            "--local_rank=1", path, "--learning_rate", "1e-3", "--precision.recipe=current", "--run_name", "7",
            "--data.sources.v1.5", "data/b", "--gradient_checkpointing", "true", "--per_device_eval_batch_size",
            "null", "--deepspeed.zero_optimization.stage", "2", "--local-rank", "3",
            "--resume_from_checkpoint", "never",
        ]
    )  # fmt: skip
    assert (a.learning_rate, a.precision.recipe, a.run_name) == (1e-3, "current", "7")
    assert a.data.sources == {"a": "data/a", "v1.5": "data/b"}
    assert a.gradient_checkpointing is True and a.per_device_eval_batch_size is None
    assert a.deepspeed == {"zero_optimization": {"stage": 2}}
    assert a.resume_from_checkpoint == "never"
    assert a.output_dir == "output/run"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "one CONFIG is expected, 0 are given"),
        (["{config}", "other.json"], "2 are given"),
        (["{config}", "--learning_rate"], "--learning_rate needs a value"),
        (["{config}", "--seed", "--run_name", "x"], "--seed needs a value"),
        (["{config}", "--verbose"], "--verbose: unknown key; --help lists all keys"),
        (["{config}", "--learning_rat", "--seed", "1"], "unknown key (did you mean learning_rate?)"),
        (["--verbose", "{config}"], "--verbose: unknown key"),
        (["{config}", "--data.sources", "a"], '"a" is given, an object'),
        (["{config}", "--data.sources", "{a:b}"], "--data.sources {a:b} is not valid JSON: Expecting prop"),
        (
            ["{config}", "--data.sources", '{"a": "b",}'],
            "is not valid JSON: there is a comma behind the last entry",
        ),
        (["{config}", "--data.weights", "[1,"], "at character 4; for example --data.weights '{"),
        (["{config}", "--deepspeed.optimizer", "{"], "--deepspeed.optimizer { is not valid JSON"),
        (["{config}", "--optimizer", "{"], "optimizer: unknown key"),
        (["{config}", "--max_steps.a", "1"], "max_steps is 100, not an object"),
        (["{config}", "--max_stesp", "1"], "did you mean max_steps?"),
        (["/"], "CONFIG: / is a folder; give a JSON file"),
        (["elsewhere/no_such_config"], "of which a bare name is enough, has train_config_bf16"),
    ],
)
def test_command_line_errors(argv, words, tmp_path):
    path = write(tmp_path, MINIMAL)
    with pytest.raises(ConfigurationError) as error:
        load_arguments([word.replace("{config}", path) for word in argv])
    assert words in str(error.value)


FOREIGN_ARGV = {
    "--lr 1e-4": "learning_rate",
    "--epochs 3": "max_steps",
    "--num_train_epochs=3": "max_steps",
    "--wandb": "report_to",
    "--bf16": "precision.compute",
    "--fp8 true": "precision.compute",
    "--resume": "resume_from_checkpoint",
    "--batch-size 8": "per_device_train_batch_size",
    "--output out": "output_dir",
    "--seq_len 128": "max_seq_length",
}


@pytest.mark.parametrize(("words", "key"), FOREIGN_ARGV.items())
def test_the_name_of_another_program_is_answered_with_ours(words, key, tmp_path):
    path = write(tmp_path, MINIMAL)
    for argv in ([path, *words.split()], [*words.split(), path]):
        with pytest.raises(ConfigurationError) as error:
            load_arguments(argv)
        assert f"(use {key}" in str(error.value)


def test_what_stands_for_a_foreign_name_is_a_key():
    for name, use in FOREIGN.items():
        assert re.match(r"[\w.]+", use)[0] in keys_of(TrainingArguments) and name not in keys_of(
            TrainingArguments
        )
    assert "(use learning_rate)" in refused(lr=1e-4)


def test_a_list_of_names_needs_no_json(tmp_path):
    path = write(tmp_path, MINIMAL)
    words = ["--allow_changes_on_resume", "learning_rate, max_steps", "--precision.bf16_modules=lm_head"]
    a = load_arguments([path, *words, "--report_to", "wandb,tensorboard"])
    assert a.allow_changes_on_resume == ["learning_rate", "max_steps"]
    assert (a.precision.bf16_modules, a.report_to) == (["lm_head"], ["wandb", "tensorboard"])
    for text, value in (("true", True), ('["seed"]', ["seed"]), ("seed", ["seed"])):
        assert load_arguments([path, "--allow_changes_on_resume", text]).allow_changes_on_resume == value
    assert load_arguments([path, "--report_to", "wandb"]).report_to == "wandb"


def test_yaml_is_refused_as_such(tmp_path):
    for name in ("run.yaml", "run.yml"):
        path = write(tmp_path, "max_steps: 3\n", name)
        for argv in ([path], [write(tmp_path, MINIMAL), "--model.config", path]):
            with pytest.raises(ValueError, match=rf"{name}: YAML .* JSON"):
                load_sizes(load_arguments(argv).model.config)


def test_what_is_true_or_false_may_stand_alone(tmp_path):
    path = write(tmp_path, MINIMAL)
    a = load_arguments(
        ["--dry_run", path, "--gradient_checkpointing", "--data.verify", "false", "--save_async"]
    )
    assert (a.dry_run, a.gradient_checkpointing, a.data.verify, a.save_async) == (True, True, False, True)
    for word, value in (("true", True), ("false", False), ("null", None)):
        a = load_arguments(
            ["--model.variant", "hf", "--precision.compute=bf16", "--model.compile", word, path]
        )
        assert a.model.compile is value
    assert load_arguments([path, "--precision.auto"]).precision.auto is True


def test_a_string_may_begin_like_json(tmp_path):
    path = write(tmp_path, MINIMAL)
    a = load_arguments([path, "--run_name", "[new] try", "--data.sources.b", "{b"])
    assert a.run_name == "[new] try" and a.data.sources["b"] == "{b"
    a = load_arguments([path, "--run_name", "1", "--precision.auto", "true", "--report_to", '["wandb"]'])
    assert (a.run_name, a.precision.auto, a.report_to) == ("1", True, ["wandb"])  # by what the key takes


def test_an_output_dir_that_cannot_be_a_folder_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, MINIMAL)
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(), link.symlink_to("nowhere")
    for output_dir, place in ((file, file), (file / "a" / "b", file), (link, link)):
        with pytest.raises(ConfigurationError) as error:
            load_arguments([path, "--output_dir", str(output_dir)])
        assert f'output_dir "{output_dir}": {place} is there and is not a folder' in str(error.value)
    for output_dir in (tmp_path, tmp_path / "new" / "run"):
        assert load_arguments([path, "--output_dir", str(output_dir)]).output_dir == str(output_dir)
    assert not (tmp_path / "new").exists()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").touch()
    with pytest.raises(ConfigurationError, match='output_dir "output/run": output is there'):
        load_arguments([path])  # the default's


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    """Which some editors put first, and texts and prompts may have, too."""
    path = tmp_path / "run.json"
    path.write_text('{"max_steps": 1}', encoding="utf-8-sig")
    assert read_json(path) == {"max_steps": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"max_steps": 1,}', "line 1 column"),
        ('{"max_steps": 1, "max_steps": 2}', "max_steps is given twice"),
        ('{"max_steps": NaN}', "NaN is not JSON"),
        ("[]", "a JSON object is expected, this is a list"),
    ],
)
def test_broken_json_is_located(text, words, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as error:
        load_arguments([path])
    assert words in str(error.value) and path in str(error.value)


def test_bare_names_are_looked_up_here_first_then_in_train_args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_arguments(["train_config_tiny.json"]).max_steps == 250
    assert load_arguments(["train_config_tiny"]).output_dir == "output/train_config_tiny"
    with pytest.raises(ConfigurationError, match='output_dir: "" is given, a string that is not empty'):
        load_arguments(["train_config_tiny", "--output_dir="])
    write(tmp_path, MINIMAL, "train_config_tiny.json")
    assert load_arguments(["train_config_tiny.json"]).max_steps == 100


def test_data_folders_are_found_from_another_working_directory(tmp_path, monkeypatch):
    folders = {"a": "train_args", "b": "nowhere"}
    config = write(tmp_path, {**MINIMAL, "data": {"sources": folders, "eval_sources": folders}})
    monkeypatch.chdir(tmp_path)
    data = load_arguments([config]).data
    assert data.sources == data.eval_sources == {"a": str(REPOSITORY / "train_args"), "b": "nowhere"}
    (tmp_path / "train_args").mkdir()
    data = load_arguments([config]).data
    assert data.sources == data.eval_sources == folders


@pytest.mark.parametrize(
    "path", sorted(CONFIG_FOLDER.glob("train_config_*.json")), ids=lambda path: path.stem
)
def test_shipped_configurations_resolve_on_one_and_two_devices(path):
    a = load_arguments([str(path)])
    assert a.resolve(1).train_batch_size_tokens == a.resolve(2).train_batch_size_tokens
    load_config(a.model.config)
    assert a.report_to == "none"  # wandb is optional
    folders = json.loads(path.read_text())["data"]["sources"].values()
    assert all(folder.startswith("data/") for folder in folders)  # no path of somebody's machine


def test_the_baseline_differs_from_fp8_only_in_precision():
    fp8, bf16 = (load_arguments([f"train_config_{kind}"]).to_dict() for kind in ("fp8", "bf16"))
    keys = {key for key in fp8 if fp8[key] != bf16[key]}
    assert keys == {"precision", "output_dir"}
    assert resume_differences(fp8, bf16) == [Difference("precision.compute", "fp8", "bf16")]


def test_resume_leaves_the_rest_free():
    old = arguments(train_batch_size_tokens=32768).resolve(1).to_dict()
    new = arguments(
        train_batch_size_tokens=32768, logging_steps=1, eval_steps=5, save_steps=5, output_dir="x", report_to="wandb",
        run_name="n", max_eval_samples=8, data__sources={"a": "moved"}, resume_from_checkpoint="never",
        precision__calibration_passes=2,
        save_total_limit=1, gradient_checkpointing=True, save_strategy="no",
    ).resolve(2)  # fmt: skip
    assert resume_differences(old, new.to_dict()) == []
    repeats = {"train_batch_size": "auto", "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    zero = {"zero_optimization": {"stage": 1}}
    plain, repeating = (arguments(deepspeed=d).resolve(1).to_dict() for d in (zero, zero | repeats))
    assert resume_differences(plain, repeating) == []
    assert rule_of("data.weights.a") == rule_of("deepspeed.bf16.enabled") == "allowed"


def test_differences_name_the_key_and_both_values():
    old, new = {"model": {"hidden_size": 8, "a": 1}, "b": 1}, {"model": {"hidden_size": 16, "a": 1}, "b": 1}
    assert list(map(str, differences(old, new))) == ["model.hidden_size: 8 -> 16"]
    assert differences(old, old) == []


def test_resume_may_lengthen_a_run_only_without_decay():
    def changed(**changes):
        return resume_differences(
            arguments(**changes).resolve(1).to_dict(),
            arguments(max_steps=200, **changes).resolve(1).to_dict(),
        )

    assert changed(lr_scheduler_type="constant") == []
    assert changed(lr_scheduler_type="cosine") == [Difference("max_steps", 100, 200)]
    old, new = arguments(), arguments(lr_scheduler_type="constant", max_steps=200)
    for before, now in ((old, new), (new, old)):  # it has decayed, or is going to
        keys = [d.key for d in resume_differences(before.resolve(1).to_dict(), now.resolve(1).to_dict())]
        assert sorted(keys) == ["lr_scheduler_type", "max_steps"]


def test_help_and_table_name_every_key(capsys):
    with pytest.raises(SystemExit) as stop:
        load_arguments(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed.strip() == help_text(TrainingArguments).strip()
    shown = table(arguments(seed=7))
    for key, node in keys_of(TrainingArguments).items():
        assert f"--{key} " in printed and node["description"] in printed
        assert f" {key} " in shown
    assert "--save_steps  (an integer of at least 0; default 0; may change on a resume)" in printed
    lines = {line.split()[-2]: line for line in shown.splitlines() if line.endswith("7")}
    assert lines["seed"].startswith("*")


def test_every_required_key_has_an_example_that_is_accepted():
    """It stands for a value that is missing or bad where the others are checked."""
    required = {
        key: node["examples"][0] for key, node in keys_of(TrainingArguments).items() if "default" not in node
    }
    a = arguments(**{key.replace(".", "__"): value for key, value in required.items()})
    assert a.model.config == "tiny" and len(required) == 3


def test_the_schema_of_the_repository_is_current_and_named_by_the_shipped_configurations(capsys):
    with pytest.raises(SystemExit):
        load_arguments(["--schema"])
    printed = capsys.readouterr().out
    file = CONFIG_FOLDER / "train_config.schema.json"
    assert json.loads(printed) == json.loads(file.read_text()), (
        "run python train/train.py --schema > train_args/train_config.schema.json"
    )
    for path in CONFIG_FOLDER.glob("train_config_*.json"):
        assert json.loads(path.read_text())["$schema"] == file.name
    assert arguments(**{"$schema": "anything"}) == arguments()
    assert "$schema" not in arguments().to_dict()


@pytest.mark.interpreter
def test_arguments_are_checked_without_torch():
    """So that a misspelt key and --help answer at once."""
    code = "import sys, train.config.arguments; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_key_has_a_reader():
    """Some source other than the one that declares them reads each key, as an attribute or as config["key"]."""
    declared = {"train/config/arguments.py"}
    read = set()
    for path in [*REPOSITORY.glob("train/**/*.py"), *REPOSITORY.glob("model/**/*.py")]:
        if str(path.relative_to(REPOSITORY)) in declared:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(node.slice.value)
    unread = {key.split(".")[-1] for key in keys_of(TrainingArguments)} - read
    assert not unread, f"keys that nothing reads: {sorted(unread)}"
