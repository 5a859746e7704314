"""train/config/load.py: configurations and command lines that are accepted, and the key and code of every error."""

import ast
import json
from pathlib import Path

import pytest

from model.config import load_config
from model.errors import UserError
from tests.conftest import numbers, refused
from train.config.arguments import CONFIG_FOLDER, ConfigurationError, TrainingArguments
from train.config.load import (
    build_arguments,
    help_text,
    load_arguments,
    resolve_arguments,
    schema_text,
)
from train.config.schema import FOREIGN, all_keys
from train.files import REPOSITORY

PACKED = {"precision__optimizer_states": "bf16_remainder"}
MINIMAL = {"model": {"config": "tiny"}, "data": {"sources": {"a": "data/a"}}, "max_steps": 100}


def arguments(**changes) -> TrainingArguments:
    """The minimal configuration with changed keys; a section's key has __ for the dot."""
    raw = json.loads(json.dumps(MINIMAL))
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (raw.setdefault(section, {}) if section else raw)[name] = value
    return build_arguments(raw)


def write(folder: Path, content, name="run.json") -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


@pytest.fixture
def config(tmp_path) -> str:
    return write(tmp_path, MINIMAL)


# ---------------------------------------------------------------- a JSON object


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        # an unknown key, and the one that is suggested
        ({"learnin_rate": 1}, "learnin_rate", "learning_rate"),
        ({"recipe": "delayed"}, "recipe", "precision.recipe"),
        ({"model__recipe": "delayed"}, "model.recipe", "precision.recipe"),
        ({"precision__amax_histroy_len": 16}, "precision.amax_histroy_len", "precision.amax_history_len"),
        ({"lr": 1e-4}, "lr", "learning_rate"),
        ({"data__weights": [{"weight": {"a": 1}}]}, "data.weights[0].weight", "weights"),
        (
            {"precision__schedule": [{"backend": "auto"}]},
            "precision.schedule[0].backend",
            "precision.backend",
        ),
        # a value that is not allowed, and what is
        ({"max_steps": True}, "max_steps", "true 0"),
        ({"max_steps": 10.0}, "max_steps", "10.0"),
        ({"max_steps": "hundert für"}, "max_steps", '"hundert für"'),
        ({"seed": None}, "seed", "null 0 4294967295"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": 2**32}, "seed", "4294967296"),
        ({"learning_rate": 0}, "learning_rate", "0 100"),
        ({"learning_rate": float("nan")}, "learning_rate", "NaN"),
        ({"hang_timeout_s": 1e12}, "hang_timeout_s", "1000000000000.0"),
        ({"hang_timeout_s": float("inf")}, "hang_timeout_s", "Infinity"),
        ({"adam_beta1": 1.0}, "adam_beta1", "1.0"),
        ({"spike_window": 3}, "spike_window", "3 16 1000000"),
        ({"model": "tiny"}, "model", '"tiny" --model.config'),
        ({"data__sources": ["a"]}, "data.sources", """["a"] --data.sources '{"NAME": "data/pretrain"}'"""),
        ({"data__sources": {}}, "data.sources", "{}"),
        ({"data__sources": {"a": 5}}, "data.sources.a", "5"),
        ({"data__weights": "x"}, "data.weights", '"x"'),
        ({"data__weights": {"a": "x"}}, "data.weights.a", '"x"'),
        ({"data__weights": [5]}, "data.weights[0]", "5"),
        ({"deepspeed": 5}, "deepspeed", "5 --deepspeed"),
        ({"deepspeed": ""}, "deepspeed", '""'),
        ({"precision__bf16_modules": "lm_head"}, "precision.bf16_modules", """'["lm_head"]'"""),
        ({"precision__auto": "a/path"}, "precision.auto", '"a/path"'),
        ({"precision__compute": "fp4"}, "precision.compute", "fp4 fp8"),
        ({"model__attention_backend": "cudnn"}, "model.attention_backend", "auto, fused, flash, unfused"),
        ({"allow_changes_on_resume": ["learning_ratte"]}, "allow_changes_on_resume", "learning_rate"),
        ({"allow_changes_on_resume": ["model.variant"]}, "allow_changes_on_resume", "model.init_from"),
        # values that do not go together
        ({"data__weights": {"b": 1}}, "data.weights", "'b'"),
        ({"data__weights": {"a": 0}}, "data.weights", "'a'"),
        ({"warmup_steps": 101}, "warmup_steps", "101 max_steps 100"),
        ({"decay_steps": 5}, "lr_scheduler_type", "5 warmup_stable_decay"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type", "decay_steps null"),
        ({"muon_momentum": 0.9}, "optim", "muon_momentum 0.9"),
        (
            {"lr_scales__embedding": 10, "model__init_from": "F"},
            "lr_scales.embedding",
            "10 model.init_from F",
        ),
        ({"keep_every_steps": 20}, "keep_every_steps", "20 save_steps 0"),
        ({"keep_every_steps": 20, "save_steps": 15}, "keep_every_steps", "20 save_steps 15"),
        ({"on_spike": "rollback", "save_strategy": "no"}, "on_spike", "save_strategy"),
        ({"on_spike": "rollback", "spike_threshold": 0}, "on_spike", "spike_threshold"),
        ({"model__variant": "hf"}, "model.variant", "precision.compute bf16"),
        (
            {"data__document_mask": True, "model__variant": "hf", "precision__compute": "bf16"},
            "data.document_mask",
            "te_layer",
        ),
        ({"model__variant": "torchao"}, "model.variant", "precision.recipe tensorwise rowwise"),
        ({"precision__recipe": "rowwise"}, "model.variant", "te_layer rowwise delayed current block"),
        ({"model__compile": True}, "model.compile", "hf torchao"),
        ({"per_device_train_batch_size": 1, "max_seq_length": 24}, "per_device_train_batch_size", "24 16"),
        ({"per_device_eval_batch_size": 1, "max_seq_length": 40}, "per_device_eval_batch_size", "40 16"),
        ({"speed__cuda_graphs": True, "gradient_checkpointing": True}, "speed.cuda_graphs", "true"),
        (
            {"gradient_checkpointing": "mlp", "precision__recipe": "block"},
            "gradient_checkpointing",
            "delayed",
        ),
        ({"gradient_checkpointing": "mlp", "precision__compute": "bf16"}, "gradient_checkpointing", "fp8"),
        (
            {"gradient_checkpointing": "mlp", "model__variant": "te_linear"},
            "gradient_checkpointing",
            "te_layer",
        ),
        ({"gradient_checkpointing": "all"}, "gradient_checkpointing", "all mlp"),
        ({"precision__recipe": "block", "precision__margin": 1}, "precision.margin", "block"),
        (PACKED | {"precision__compute": "fp32"}, "precision.optimizer_states", "fp32"),
        (PACKED | {"adam_beta2": 0.99}, "precision.optimizer_states", "adam_beta2 0.99"),
        (
            {"precision__compute": "fp32", "precision__gradient_communication": "bf16"},
            "precision.gradient_communication",
            "fp32",
        ),
        ({"precision__optimizer_moments": "fp32"}, "precision.optimizer_moments", "bf16_remainder"),
        ({"precision__recipe": "nvfp4"}, "precision.recipe", "NVFP4"),
    ],
)
def test_error_names_key_value_and_allowed_values(changes, key, values):
    with refused(ConfigurationError, key=key) as error:
        arguments(**changes)
    assert all(value in str(error.value) for value in values.split())


def test_all_problems_are_reported_together():
    wrong = {"learnin_rate": 1, "save_steps": -1, "precision__margin": 1.5, "model__variant": "best"}
    with refused(ConfigurationError) as error:
        arguments(**wrong, max_steps="many", warmup_steps=101)
    assert sorted(error.value.keys) == sorted([*(key.replace("__", ".") for key in wrong), "max_steps"])
    with refused(ConfigurationError) as error:
        build_arguments({})
    assert {"max_steps", "model.config", "data.sources"} == set(error.value.keys)
    with pytest.raises(UnicodeEncodeError):
        arguments(run_name="\udce9")


def test_integers_are_accepted_as_numbers():
    ones, floats = ({"weight_decay": n(0), "data__weights": {"a": n(1)}} for n in (int, float))
    assert arguments(**ones) == arguments(**floats)
    assert isinstance(arguments(**ones).weight_decay, float)


# ---------------------------------------------------------------- resolving


def test_accumulation_and_batch_tokens():
    a = arguments(per_device_train_batch_size=4, max_seq_length=64, train_batch_size_tokens=2048)
    assert [resolve_arguments(a, ranks).gradient_accumulation_steps for ranks in (1, 4)] == [8, 2]
    assert a.gradient_accumulation_steps is None  # the original is unchanged
    b = arguments(per_device_train_batch_size=4, max_seq_length=64, gradient_accumulation_steps=3)
    resolved = resolve_arguments(b, 2)
    assert resolved.train_batch_size_tokens == 4 * 64 * 2 * 3 and resolved.per_device_eval_batch_size == 4
    assert resolve_arguments(resolved, 2) == resolved
    assert resolve_arguments(arguments(), 1).gradient_accumulation_steps == 1


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
def test_inconsistent_batch_sizes_raise(changes, ranks, code, values):
    with refused(ConfigurationError, code=code, key="train_batch_size_tokens") as error:
        resolve_arguments(arguments(max_seq_length=64, **changes), ranks)
    assert set(values) <= set(numbers(error.value))


def test_resolved_configuration_round_trip(tmp_path):
    phases = [{"until_tokens": 1000, "weights": {"a": 2}}, {"weights": {"a": 1}}]
    a = resolve_arguments(arguments(precision__recipe="current", data__weights=phases), 2)
    a.output_dir = "somewhere"
    assert resolve_arguments(load_arguments([write(tmp_path, a.to_dict())]), 2) == a


# ---------------------------------------------------------------- the command line


def changed_zero(name: str, **changes: object) -> dict:
    """Return a shipped DeepSpeed configuration with changes in the section zero_optimization."""
    shipped = json.loads((CONFIG_FOLDER / name).read_text())
    return shipped | {"zero_optimization": shipped["zero_optimization"] | changes}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--learning_rate 1e-3 --local_rank=1 --local-rank 3", {"learning_rate": 1e-3}),
        ("--precision.recipe=current", {"precision.recipe": "current"}),
        ("--data.sources.v1.5 data/b", {"data.sources": {"a": "data/a", "v1.5": "data/b"}}),
        ("--per_device_eval_batch_size null", {"per_device_eval_batch_size": None}),
        (
            "--deepspeed.zero_optimization.overlap_comm false",
            {"deepspeed": changed_zero("ds_config_zero1.json", overlap_comm=False)},
        ),
        (
            "--deepspeed ds_config_zero2 --deepspeed.zero_optimization.overlap_comm true",
            {"deepspeed": changed_zero("ds_config_zero2.json", overlap_comm=True)},
        ),
        # a list of names
        ("--allow_changes_on_resume seed,max_steps", {"allow_changes_on_resume": ["seed", "max_steps"]}),
        ("--allow_changes_on_resume seed", {"allow_changes_on_resume": ["seed"]}),
        ("--allow_changes_on_resume true", {"allow_changes_on_resume": True}),
        ('--allow_changes_on_resume ["seed"]', {"allow_changes_on_resume": ["seed"]}),
        ("--precision.bf16_modules=lm_head", {"precision.bf16_modules": ["lm_head"]}),
        ("--report_to wandb,tensorboard", {"report_to": ["wandb", "tensorboard"]}),
        ("--report_to wandb", {"report_to": "wandb"}),
        # a switch
        (
            "--dry_run --data.verify false --save_async",
            {"dry_run": True, "data.verify": False, "save_async": True},
        ),
        ("--gradient_checkpointing --dry_run", {"gradient_checkpointing": True, "dry_run": True}),
        ("--gradient_checkpointing mlp", {"gradient_checkpointing": "mlp"}),
        ("--gradient_checkpointing false", {"gradient_checkpointing": False}),
        ("--model.variant hf --precision.compute=bf16 --model.compile null", {"model.compile": None}),
        ("--model.variant hf --precision.compute=bf16 --model.compile", {"model.compile": True}),
        # a string that looks like JSON
        ("--run_name [new]", {"run_name": "[new]"}),
        ("--run_name 1 --data.sources.b {b", {"run_name": "1", "data.sources": {"a": "data/a", "b": "{b"}}),
    ],
)
def test_valid_command_lines(config, words, found):
    for argv in ([config, *words.split()], [*words.split(), config])[: 1 if words.endswith("e") else 2]:
        a = load_arguments(argv)
        for key, value in found.items():
            section, _, name = key.rpartition(".")
            got = getattr(getattr(a, section) if section else a, name)
            assert got == value and type(got) is type(value)
        assert a.output_dir == "output/run"


@pytest.mark.parametrize(
    ("argv", "code", "key", "named"),
    [
        ("", "config_count", None, ""),
        ("{config} other.json", "config_count", None, "other.json"),
        ("{config} --learning_rate", "no_value", "learning_rate", ""),
        ("{config} --seed --run_name x", "no_value", "seed", ""),
        ("{config} --verbose", "unknown_key", "verbose", "--help"),
        ("{config} --learning_rat --seed 1", "unknown_key", "learning_rat", "learning_rate"),
        ("--verbose {config}", "unknown_key", "verbose", ""),
        ("{config} --data.sources a", "configuration", "data.sources", '"a"'),
        ("{config} --data.sources {a:b}", "invalid_json", "data.sources", "{a:b}"),
        ('{config} --data.sources {"a":"b",}', "invalid_json", "data.sources", "10"),
        ("{config} --data.weights [1,", "invalid_json", "data.weights", "--data.weights '{"),
        ("{config} --deepspeed.optimizer {", "invalid_json", "deepspeed.optimizer", "{"),
        ("{config} --max_steps.a 1", "not_an_object", "max_steps.a", "100"),
        ("{config} --max_stesp 1", "unknown_key", "max_stesp", "max_steps"),
        ("{config} --output_dir=", "configuration", "output_dir", '""'),
        ("/", "no_such_file", "/", ""),
        ("elsewhere/no_such_config", "no_such_file", "elsewhere/no_such_config", "train_config_bf16"),
        ("train_config_fp9.json", "no_such_file", "train_config_fp9.json", "train_config_fp8.json"),
        # the names of other programs
        ("{config} --lr 1e-4", "unknown_key", "lr", "learning_rate"),
        ("{config} --num_train_epochs=3", "unknown_key", "num_train_epochs", "max_steps"),
        ("{config} --bf16", "unknown_key", "bf16", "precision.compute"),
        ("--batch-size 8 {config}", "unknown_key", "batch-size", "per_device_train_batch_size"),
    ],
)
def test_invalid_command_lines(config, argv, code, key, named):
    with refused(ConfigurationError, code=code, key=key) as error:
        load_arguments(argv.replace("{config}", config).split())
    assert named in str(error.value)


def test_names_of_other_programs_suggest_a_key():
    keys = all_keys()
    assert all(use.partition(";")[0].partition(",")[0].split()[0] in keys for use in FOREIGN.values())
    assert not keys.keys() & FOREIGN.keys()


# ---------------------------------------------------------------- files and folders


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.json", '{"max_steps": 1,}', "not_json"),
        ("a.json", '{"max_steps": 1, "max_steps": 2}', "duplicate_key"),
        ("a.json", '{"max_steps": NaN}', "not_json"),
        ("a.json", "[]", "not_an_object"),
        ("a.yaml", "max_steps: 3\n", "not_json"),
    ],
)
def test_non_object_json_raises(tmp_path, config, name, text, code):
    path = write(tmp_path, text, name)
    with refused(UserError, code=code, key="max_steps" if code == "duplicate_key" else path):
        load_arguments([path])


def test_configuration_file_lookup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_arguments(["train_config_tiny.json"]).max_steps == 250
    assert load_arguments(["train_config_tiny"]).output_dir == "output/train_config_tiny"
    write(tmp_path, "\ufeff" + json.dumps(MINIMAL), "train_config_tiny.json")  # with a byte order mark
    assert load_arguments(["train_config_tiny.json"]).max_steps == 100


def test_data_folder_lookup(tmp_path, monkeypatch):
    sources, sets = {"a": "train_args", "b": "nowhere"}, {"c": "train_args", "d": "nowhere"}
    config = write(tmp_path, {**MINIMAL, "data": {"sources": sources, "eval_sources": sets}})
    monkeypatch.chdir(tmp_path)
    data, found = load_arguments([config]).data, str(REPOSITORY / "train_args")
    assert data.sources == {"a": found, "b": "nowhere"} and data.eval_sources == {"c": found, "d": "nowhere"}
    (tmp_path / "train_args").mkdir()
    data = load_arguments([config]).data
    assert data.sources == sources and data.eval_sources == sets
    config = write(tmp_path, {**MINIMAL, "data": {"sources": sources, "eval_sources": {"a": "nowhere"}}})
    with refused(ConfigurationError, key="data.sources"):  # two losses would be eval_loss/a
        load_arguments([config])


def test_invalid_output_dir_raises(tmp_path, config, monkeypatch):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("nowhere")
    for output_dir, place in ((file, file), (file / "a" / "b", file), (link, link)):
        with refused(ConfigurationError, key="output_dir") as error:
            load_arguments([config, "--output_dir", str(output_dir)])
        assert f"{place} " in str(error.value)
    for output_dir in (tmp_path, tmp_path / "new" / "run"):
        assert load_arguments([config, "--output_dir", str(output_dir)]).output_dir == str(output_dir)
    assert not (tmp_path / "new").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").touch()
    with refused(ConfigurationError, key="output_dir"):
        load_arguments([config])  # the default's


@pytest.mark.parametrize(
    "path", sorted(CONFIG_FOLDER.glob("train_config_*.json")), ids=lambda path: path.stem
)
def test_shipped_configurations_resolve(path):
    a = load_arguments([str(path)])
    one, two = (resolve_arguments(a, ranks) for ranks in (1, 2))
    assert one.train_batch_size_tokens == two.train_batch_size_tokens
    load_config(a.model.config)
    assert a.report_to == "none"  # wandb is optional
    raw = json.loads(path.read_text())
    assert all(folder.startswith("data/") for folder in raw["data"]["sources"].values())
    assert raw["$schema"] == "train_config.schema.json"


# ---------------------------------------------------------------- help, schema, readers


def test_help_and_schema_are_current():
    printed = help_text()
    for key, node in all_keys().items():
        assert f"--{key} " in printed and node["description"] in printed
    file = CONFIG_FOLDER / "train_config.schema.json"
    assert json.loads(schema_text()) == json.loads(file.read_text()), (
        "run python train/train.py --schema > train_args/train_config.schema.json"
    )
    assert arguments(**{"$schema": "anything"}) == arguments()


def test_every_key_is_read():
    """Some source other than its declaration reads each key, as an attribute or as config["key"]."""
    read = set()
    for path in [*REPOSITORY.glob("train/**/*.py"), *REPOSITORY.glob("model/**/*.py")]:
        if path.relative_to(REPOSITORY).as_posix() == "train/config/arguments.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(node.slice.value)
    assert not {key.split(".")[-1] for key in all_keys()} - read
