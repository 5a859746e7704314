"""The training configuration: what is accepted, what is refused with which key and code, and that every key is read."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from model.config import load_config, load_sizes
from model.errors import UserError
from tests.conftest import numbers, refused
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


def problems_of(**changes) -> list[str]:
    """Return the key of each problem."""
    with refused(ConfigurationError) as error:
        arguments(**changes)
    return error.value.keys


def write(folder: Path, content, name="run.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_defaults_follow_the_documented_names():
    a = arguments()
    assert (a.model.variant, a.precision.compute, a.precision.recipe) == ("te_layer", "fp8", "delayed")
    assert (a.learning_rate, a.lr_scheduler_type, a.adam_beta2, a.seed) == (3e-4, "cosine", 0.95, 42)


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        # a key that is unknown, and the one that is suggested
        ({"learnin_rate": 1}, "learnin_rate", "learning_rate"),
        ({"recipe": "delayed"}, "recipe", "precision.recipe"),
        ({"model__recipe": "delayed"}, "model.recipe", "precision.recipe"),
        ({"precision__amax_histroy_len": 16}, "precision.amax_histroy_len", "precision.amax_history_len"),
        ({"lr": 1e-4}, "lr", "learning_rate"),
        # a value that is not allowed, and what is
        ({"max_steps": True}, "max_steps", "true"),
        ({"max_steps": 10.0}, "max_steps", "10.0"),
        ({"max_steps": "10"}, "max_steps", '"10"'),
        ({"max_steps": "hundert für"}, "max_steps", '"hundert für"'),
        ({"seed": None}, "seed", "null 0 4294967295"),
        ({"seed": -1}, "seed", "-1 0 4294967295"),
        ({"seed": 2**32}, "seed", "4294967296 4294967295"),
        ({"learning_rate": False}, "learning_rate", "false 100"),
        ({"learning_rate": 0}, "learning_rate", "0 100"),
        ({"learning_rate": float("nan")}, "learning_rate", "NaN"),
        ({"hang_timeout_s": 1e12}, "hang_timeout_s", "1000000000000.0"),
        ({"hang_timeout_s": float("inf")}, "hang_timeout_s", "Infinity"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio", "1.5 0 1"),
        ({"adam_beta1": 1.0}, "adam_beta1", "1.0"),
        ({"spike_window": 3}, "spike_window", "3 16 1000000"),
        ({"model": "tiny"}, "model", '"tiny" --model.config'),
        ({"data__sources": ["a"]}, "data.sources", """["a"] --data.sources '{"NAME": "data/pretrain"}'"""),
        ({"data__sources": {}}, "data.sources", """{} '{"NAME": "data/pretrain"}'"""),
        ({"data__sources": {"a": 5}}, "data.sources.a", "5"),
        ({"deepspeed": 5}, "deepspeed", "5 --deepspeed"),
        ({"deepspeed": ""}, "deepspeed", '""'),
        (
            {"precision__bf16_modules": "lm_head"},
            "precision.bf16_modules",
            """--precision.bf16_modules '["lm_head"]'""",
        ),
        ({"precision__auto": "autotune.json"}, "precision.auto", '"autotune.json"'),
        ({"precision__compute": "fp4"}, "precision.compute", "fp4 fp8"),
        ({"model__init_from": ""}, "model.init_from", '""'),
        ({"model__attention_backend": "cudnn"}, "model.attention_backend", "auto, fused, flash, unfused"),
        ({"model__compile": "yes"}, "model.compile", '"yes"'),
        ({"save_strategy": "epoch"}, "save_strategy", '"epoch" steps, no'),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type", '"cosin" cosine, linear, constant,'),
        ({"data__weights": "x"}, "data.weights", '"x"'),
        ({"data__weights": {"a": "x"}}, "data.weights.a", '"x"'),
        ({"data__weights": [5]}, "data.weights[0]", "5"),
        ({"data__weights": [{"weight": {"a": 1}}]}, "data.weights[0].weight", "weights"),
        ({"data__weights": {"b": 1}}, "data.weights", "'b'"),
        ({"data__weights": {"a": 0}}, "data.weights", "'a'"),
        # values that do not go together
        ({"warmup_steps": 101}, "warmup_steps", "101 max_steps 100"),
        ({"decay_steps": 5}, "lr_scheduler_type", "decay_steps 5 warmup_stable_decay"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_type",
            "decay_steps null warmup_stable_decay",
        ),
        ({"muon_momentum": 0.9}, "optim", '"adamw" muon_momentum 0.9'),
        ({"model__variant": "hf"}, "model.variant", "precision.compute bf16"),
        ({"model__variant": "torchao"}, "model.variant", "precision.recipe tensorwise rowwise"),
        ({"precision__recipe": "rowwise"}, "model.variant", "te_layer rowwise delayed current block"),
        ({"model__compile": True}, "model.compile", "hf torchao"),
        (
            {"per_device_train_batch_size": 1, "max_seq_length": 24},
            "per_device_train_batch_size",
            "1 max_seq_length 24 16",
        ),
        (
            {"per_device_eval_batch_size": 1, "max_seq_length": 40},
            "per_device_eval_batch_size",
            "1 max_seq_length 40 16",
        ),
        ({"speed__cuda_graphs": True, "gradient_checkpointing": True}, "speed.cuda_graphs", "true"),
        ({"precision__recipe": "block", "precision__margin": 1}, "precision.margin", "block"),
    ],
)
def test_an_error_names_the_key_the_value_and_what_is_allowed(changes, key, values):
    with refused(ConfigurationError, key=key) as error:
        arguments(**changes)
    for value in values.split():
        assert value in str(error.value)


def test_a_string_that_is_not_unicode_is_refused():
    with refused(ConfigurationError, code="not_unicode"):
        arguments(run_name="\udce9")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (  # the check of warmup_steps needs max_steps, which has no value
            {
                "learnin_rate": 1,
                "max_steps": "many",
                "save_steps": -1,
                "precision__margin": 1.5,
                "model__variant": "best",
            },
            {"learnin_rate", "max_steps", "save_steps", "precision.margin", "model.variant"},
        ),
        (
            {"model__variant": "torchao", "precision__margin": -1, "max_steps": 0},
            {"model.variant", "precision.margin", "max_steps"},
        ),
        ({"model__variant": "torchao", "precision__recipe": "mxfp8"}, {"precision.recipe"}),
    ],
)
def test_all_problems_come_at_once_without_follow_ups(changes, keys):
    found = problems_of(**changes)
    assert set(found) == keys and len(found) == len(keys)


def test_required_keys_are_named_when_missing():
    with refused(ConfigurationError) as error:
        TrainingArguments.from_dict({})
    assert {"max_steps", "model.config", "data.sources"} == set(error.value.keys)


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


@pytest.mark.parametrize(
    ("changes", "ranks", "code", "values"),
    [
        (
            {"per_device_train_batch_size": 4, "train_batch_size_tokens": 2000},
            1,
            "batch_not_divisible",
            [1792, 2048],
        ),
        (
            {"per_device_train_batch_size": 4, "train_batch_size_tokens": 2000},
            9,
            "batch_not_divisible",
            [2304],
        ),
        (
            {"train_batch_size_tokens": 2048, "gradient_accumulation_steps": 2},
            1,
            "batch_contradiction",
            [2048, 2],
        ),
    ],
)
def test_batches_that_do_not_divide_or_disagree_are_refused(changes, ranks, code, values):
    a = arguments(max_seq_length=64, **changes)
    with refused(ConfigurationError, code=code, key="train_batch_size_tokens") as error:
        a.resolve(ranks)
    assert set(values) <= set(numbers(error.value))


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
    ("argv", "code", "key", "named"),
    [
        ([], "config_count", None, ""),
        (["{config}", "other.json"], "config_count", None, "other.json"),
        (["{config}", "--learning_rate"], "no_value", "learning_rate", ""),
        (["{config}", "--seed", "--run_name", "x"], "no_value", "seed", ""),
        (["{config}", "--verbose"], "unknown_key", "verbose", "--help"),
        (["{config}", "--learning_rat", "--seed", "1"], "unknown_key", "learning_rat", "learning_rate"),
        (["--verbose", "{config}"], "config_count", "verbose", ""),
        (["{config}", "--data.sources", "a"], "configuration", "data.sources", '"a"'),
        (["{config}", "--data.sources", "{a:b}"], "invalid_json", "data.sources", "{a:b}"),
        (["{config}", "--data.sources", '{"a": "b",}'], "invalid_json", "data.sources", "at character 11"),
        (["{config}", "--data.weights", "[1,"], "invalid_json", "data.weights", "--data.weights '{"),
        (["{config}", "--deepspeed.optimizer", "{"], "invalid_json", "deepspeed.optimizer", "{"),
        (["{config}", "--optimizer", "{"], "configuration", "optimizer", "optim"),
        (["{config}", "--max_steps.a", "1"], "not_an_object", "max_steps.a", "100"),
        (["{config}", "--max_stesp", "1"], "configuration", "max_stesp", "max_steps"),
        (["{config}", "--output_dir="], "configuration", "output_dir", '""'),
        (["/"], "folder", "/", ""),
        (
            ["elsewhere/no_such_config"],
            "no_such_file",
            "elsewhere/no_such_config",
            "train_config_bf16",
        ),
    ],
)
def test_command_line_errors(argv, code, key, named, tmp_path):
    path = write(tmp_path, MINIMAL)
    with refused(ConfigurationError, code=code, key=key) as error:
        load_arguments([word.replace("{config}", path) for word in argv])
    assert named in str(error.value)


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
        with refused(ConfigurationError) as error:
            load_arguments(argv)
        assert key in str(error.value)


def test_what_stands_for_a_foreign_name_is_a_key():
    for name, use in FOREIGN.items():
        assert re.match(r"[\w.]+", use)[0] in keys_of(TrainingArguments) and name not in keys_of(
            TrainingArguments
        )


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
            with refused(UserError, code="yaml", key=path):
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
        with refused(ConfigurationError, key="output_dir") as error:
            load_arguments([path, "--output_dir", str(output_dir)])
        assert f"{place} " in str(error.value)
    for output_dir in (tmp_path, tmp_path / "new" / "run"):
        assert load_arguments([path, "--output_dir", str(output_dir)]).output_dir == str(output_dir)
    assert not (tmp_path / "new").exists()

    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").touch()
    with refused(ConfigurationError, key="output_dir"):
        load_arguments([path])  # the default's


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    """Which some editors put first, and texts and prompts may have, too."""
    path = tmp_path / "run.json"
    path.write_text('{"max_steps": 1}', encoding="utf-8-sig")
    assert read_json(path) == {"max_steps": 1}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"max_steps": 1,}', "not_json"),
        ('{"max_steps": 1, "max_steps": 2}', "duplicate_key"),
        ('{"max_steps": NaN}', "not_json"),
        ("[]", "not_an_object"),
    ],
)
def test_broken_json_is_located(text, code, tmp_path):
    path = write(tmp_path, text)
    with refused(ConfigurationError, code=code) as error:
        load_arguments([path])
    assert path in str(error.value)


def test_bare_names_are_looked_up_here_first_then_in_train_args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_arguments(["train_config_tiny.json"]).max_steps == 250
    assert load_arguments(["train_config_tiny"]).output_dir == "output/train_config_tiny"
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
    assert differences(old, new) == [Difference("model.hidden_size", 8, 16)]
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
