"""Who may import what (docs: README, "Where things are"). Read from the sources, so that a slip shows at once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p
    for folder in ("model", "train", "fp8_inference_demo", "test_fp8")
    for p in (ROOT / folder).rglob("*.py")
)

ONLY_IN = {
    "transformer_engine": {"model/fp8/te_backend.py"},
    "transformer_engine_torch": {"model/fp8/te_backend.py"},
    "torchao": {"model/fp8/torchao_fp8.py"},
    "wandb": {"train/metrics.py"},
    "deepspeed": {
        "train/engine/distributed.py",
        "train/engine/step.py",
        "train/checkpoint/load.py",
    },
    "sentencepiece": {"train/train_tokenizer.py", "train/prepare/tokenizer.py", "train/data/encoder.py"},
    "datasets": {"train/prepare/corpus.py"},
    "ray": {"train/prepare/executors.py"},
    "dill": {"train/prepare/executors.py"},
    "fasttext": {"train/prepare/filters.py"},
    "datatrove": {"train/prepare_data.py"}
    | {
        f"train/prepare/{name}.py"
        for name in "blocks ngrams dedup executors filters preparation steps tally".split()
    },
}

# Attributes that DeepSpeed does not promise, and who may name them: `import deepspeed` is not where the coupling is.
PRIVATE = re.compile(
    r"\b(fp32_groups\w*|bf16_groups|fp16_groups|\w*partitioned_\w*groups\w*|single_partition_of_\w+"
    r"|round_robin_bit16\w*|_hp_\w+|checkpoint_engine|checkpoint_event_\w+|_copy_recovery_script|_global_grad_norm"
    r"|clip_fp32_gradients|param_names|ds_(?:shape|numel|tensor|id)|grad_acc_dtype|update_lp_params"
    r"|_unflatten_partitioned_parameters|_grad_acc_hooks|loss_scale_config|loss_scaler)\b|\.overflow\b"
)
KNOW_DEEPSPEED = {"train/engine/zero.py", "train/checkpoint/reshard.py"}


def imports(path: Path) -> set[str]:
    """Top-level names that a file imports, also by importlib.import_module("...")."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "find_spec"):
            names |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {name.split(".")[0] for name in names}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", ONLY_IN)
def test_packages_are_imported_only_where_they_belong(package: str) -> None:
    users = {relative(p) for p in SOURCES if package in imports(p)}
    assert users, f"nothing imports {package}; is this rule still about something?"
    assert users <= ONLY_IN[package]


def test_deepspeeds_private_names_stand_in_two_files() -> None:
    assert {relative(p) for p in SOURCES if PRIVATE.search(p.read_text())} == KNOW_DEEPSPEED


def test_training_does_not_know_preparation() -> None:
    """What train.py imports, and what that imports, has nothing of preparation: a GPU node does without it."""
    seen: set[str] = set()
    waiting = ["train/train.py"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("train"):
                parts = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                files = {part.replace(".", "/") + ".py" for part in parts}
                waiting += [file for file in files if (ROOT / file).is_file() and file not in seen]
    assert {"train/loop.py", "train/data/stream.py"} < seen
    assert not [name for name in seen if "prepare" in name or "corpus" in name]


def test_model_and_demo_do_not_know_training() -> None:
    for path in SOURCES:
        if relative(path).startswith(("model/", "fp8_inference_demo/")):
            assert "train" not in imports(path), relative(path)


def test_the_loop_receives_built_objects() -> None:
    """loop.py imports nothing of the model but what it asks about precision, FP8 modules and state."""
    tree = ast.parse((ROOT / "train/loop.py").read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    found = {m for m in modules if m.startswith("model")}
    assert found == {"model.errors", "model.fp8.modules", "model.fp8.precision", "model.fp8.state"}
