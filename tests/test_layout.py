"""Import directions of docs/architecture.md, checked against the sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from scripts.check_requirements import parse
from tests.imports import ROOT, TOP, arrows, imported_files, imported_modules, reached, room_of, sources

TRANSFORMER_ENGINE = {
    f"model/{name}.py" for name in ("fp8/te_backend", "fp8/te_patches", "checks/quantize_hooks")
}
ONLY_IN = {
    "transformer_engine": TRANSFORMER_ENGINE,
    "transformer_engine_torch": TRANSFORMER_ENGINE,
    "torchao": {"model/fp8/torchao_fp8.py"},
    "wandb": {"train/record/trackers.py"},
    "deepspeed": {"train/engine", "train/checkpoint"},
    "sentencepiece": {"train/prepare", "train/data/encoder.py"},
    "datasets": {"train/prepare/corpus.py"},
    "fasttext": {"train/prepare"},
    "datatrove": {"train/prepare", "train/prepare_data.py"},
}
# Attributes that DeepSpeed does not promise, and who may name them: `import deepspeed` is not where the coupling is.
PRIVATE = re.compile(
    r"\b(fp32_groups\w*|bf16_groups|fp16_groups|\w*partitioned_\w*groups\w*|single_partition_of_\w+"
    r"|round_robin_bit16\w*|_hp_\w+|checkpoint_engine|checkpoint_event_\w+|_copy_recovery_script|_global_grad_norm"
    r"|clip_fp32_gradients|param_names|ds_(?:shape|numel|tensor|id)|grad_acc_dtype|update_lp_params"
    r"|_unflatten_partitioned_parameters|_grad_acc_hooks|loss_scale_config|loss_scaler)\b|\.overflow\b"
)
KNOW_DEEPSPEED = {"train/engine/zero.py", "train/engine/weight_gather.py", "train/checkpoint/reshard.py"}
# Of the folder train/: each line may import the lines above it, and of its own line only the room itself.
LAYERS = [
    ["train/files.py", "train/rank_env.py"],
    ["train/data", "train/record"],
    ["train/config", "train/prepare"],
    ["train/engine"],
    ["train/monitor"],
    ["train/checkpoint", "train/command.py"],
    ["train/planning", "train/export.py"],
    ["train/preflight", "train/evaluation", "train/plan.py"],
    [
        "train/launch.py",
        "train/evaluate.py",
        "train/inspect_checkpoint.py",
        "train/inspect_data.py",
        "train/plot.py",
        "train/prepare_data.py",
        "train/train_tokenizer.py",
        "train/import_megatron.py",
    ],
    ["train/phase.py"],
    ["train/trainer.py"],
    ["train/run.py"],
    ["train/train.py"],
]
# What training and benchmarks never import: a GPU node does without the packages of preparation.
PREPARATION = {
    "train/prepare",
    "train/prepare_data.py",
    "train/train_tokenizer.py",
    "train/import_megatron.py",
    "train/evaluation",
}


# Functions that open the configuration files and the data of a run.
OPENING = {
    "model.config.load_config",
    "model.config.load_sizes",
    "model.config.read_json_file",
    "train.data.format.read_manifest",
    "train.data.source.open_held_out",
    "train.data.source.open_sources",
    "train.data.stream.open_stream",
}


@pytest.mark.parametrize("package", ONLY_IN)
def test_optional_packages_are_imported_in_one_place(package: str) -> None:
    users = [p for p in sources() if package in {name.split(".")[0] for name in imported_modules(p)}]
    assert users, f"nothing imports {package}; is this rule still about something?"
    allowed = ONLY_IN[package]
    assert not [p for p in users if p.as_posix() not in allowed and p.parent.as_posix() not in allowed]


def test_deepspeed_private_names_are_in_three_files() -> None:
    named = {p.as_posix() for p in sources() if PRIVATE.search((ROOT / p).read_text(encoding="utf-8"))}
    assert named == KNOW_DEEPSPEED


def test_train_packages_import_in_one_direction() -> None:
    graph, below = arrows(), set()
    assert {room for room in graph if room.startswith("train/")} == {room for line in LAYERS for room in line}
    for line in LAYERS:
        for room in line:
            wrong = {o for o in graph[room] if o.startswith("train/")} - below
            assert not wrong, f"{room} may import {sorted(below)}, not {sorted(wrong)}"
        below |= set(line)
    assert not PREPARATION & reached(graph, "train/train.py")


def test_a_run_opens_its_files_in_one_module() -> None:
    """The check before the ranks start opens them, too, because it reports the problems of all files together."""
    graph = {str(p): {str(f) for f in imported_files(p)} for p in sources()}
    run = {"train/train.py"} | reached(graph, "train/train.py")
    users = {file for file in run if file.startswith("train/") and imported_modules(Path(file)) & OPENING}
    library = {file for file in users if file.startswith("train/data/")}
    assert users - library == {"train/config/load.py", "train/preflight/check.py"}


def test_model_and_demo_do_not_import_train() -> None:
    for room in arrows():
        if room.startswith(("model", "fp8_inference_demo")):
            assert not [o for o in reached(arrows(), room) if o.startswith(("train", "test_fp8"))], room


# Of model/, what model/fp8 and what lies in it may import besides each other.
BASE = [f"model/{name}.py" for name in "__init__ errors keys variants config documents hf_folder".split()]


def test_model_files_import_in_one_direction() -> None:
    graph = {str(p): {str(f) for f in imported_files(p)} for p in sources() if p.parts[0] == "model"}
    assert not [file for file in graph if file in reached(graph, file)], "a circle"
    for file, imported in graph.items():
        if file.startswith(("model/fp8/", "model/fused/", "model/te_reference/")) or file in BASE:
            wrong = [other for other in imported if other.count("/") == 1 and other not in BASE]
            assert not wrong, f"{file} may import {BASE}"


def test_architecture_page_names_at_most_three_files() -> None:
    """Each answer of docs/architecture.md."""
    answers = (
        (ROOT / "docs/architecture.md")
        .read_text(encoding="utf-8")
        .partition("## Where is")[2]
        .splitlines()[4:]
    )
    assert len(answers) >= 14
    for answer in answers:
        named = set(re.findall(r"`([\w/]+\.(?:py|sh|md|json))", answer))
        assert len(named) <= 3, answer
        assert not [name for name in named if not (ROOT / name).is_file()], answer


# Packages that the machine chooses or that come with another one, and other people's that a benchmark looks for.
NOT_LISTED = {"torch", "triton", "nvidia", "megatron", "pythainlp", "vllm"}
NAMES = {
    "yaml": "pyyaml",
    "fasttext": "fasttext-numpy2-wheel",
    "transformer_engine_torch": "transformer_engine",
}


def test_requirements_list_all_imports() -> None:
    listed = {
        kind: {
            requirement["name"].replace("-", "_")
            for requirement in parse((ROOT / f"requirements{kind}.txt").read_text(encoding="utf-8"))
        }
        for kind in ("", "-gpu", "-prep", "-serving", "-dev")
    }
    own = {path.stem for path in ROOT.iterdir()} | {"check_requirements", "__future__"}
    missing = set()
    for top in (*TOP, "examples", "scripts", "tests"):
        for file in sorted((ROOT / top).rglob("*.py")):
            path = file.relative_to(ROOT)
            kinds = ["", "-gpu"]
            if top in ("examples", "scripts", "tests"):
                kinds += ["-prep", "-dev"]
            elif room_of(path) in PREPARATION:
                kinds += ["-prep"]
            if path == Path("train/evaluation/tasks.py"):
                kinds += ["-serving"]
            allowed = {name for kind in kinds for name in listed[kind]}
            names = {name.split(".")[0] for name in imported_modules(path)} - own - NOT_LISTED
            names -= set(sys.stdlib_module_names)
            missing |= {
                (str(path), name) for name in names if NAMES.get(name, name).replace("-", "_") not in allowed
            }
    assert not missing
