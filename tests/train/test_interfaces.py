"""Names other programs read: keys and files of runs, checkpoints, prepared data and exports, exit statuses.

A failure here means that somebody's script, an older checkpoint or a plot of an older run breaks. Change a list only
together with the documentation, and say in the commit who has to adapt. A new name is added to its list.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from model import decoder
from model.errors import UserError
from tests.fixtures import settings_of
from tests.train.runs import PRECISIONS, metrics, run
from train import train
from train.checkpoint.save import SaveError
from train.config.schema import all_keys
from train.monitor import signals

SAMPLES = {"first_sample", "samples", "windows"}
STEP = {
    *("step", "tokens", "time", "loss", "step_loss", "grad_norm", "learning_rate", "tokens_per_second"),
    *("mfu", "memory_gib", "skipped_steps", "spikes"),
}
FALLBACK = {
    *("step", "module", "from", "to", "gemm", "operand", "statistic", "value", "threshold"),
}
# What marks a line of metrics.jsonl as one of a kind, and the keys below it.
METRICS = {
    "eval_loss": set(),
    "unigram_loss": set(),
    "skipped": SAMPLES | {"ranks"},
    "spikes_found": SAMPLES | {"step", "threshold", "loss", "grad_norm"},
    "rollback": SAMPLES | {"from_step"},
    "changes": {"step", "key", "old", "new"},
    "began_at": {"path", "manifest_sha256"},
    "precision_stage": {"number", "tokens_per_second", "compute", "recipe"},
    "fp8_alarms": {
        *("active", "count", "began", "began.gemm", "began.operand", "began.found"),
        *("over", "over.gemm", "over.operand", "over.since"),
    },
    "fp8_escalations": {"count", "changes", *(f"changes.{key}" for key in FALLBACK)},
}
STATISTICS = {
    f"{operand}.{statistic}"
    for operand in ("input", "weight", "gradient")
    for statistic in ("underflow", "saturated", "range", "error")
}
RUN_JSON = {
    *(
        "step",
        "tokens",
        "time",
        "resumed_from",
        "command",
        "version",
        "commit",
        "config_sha256",
        "hosts",
        "gpus",
    ),
    *(
        "machine",
        "versions",
        "model",
        "data",
        "fp8",
        "attention",
        "startup_checks",
        "initial_gradient_error",
        "plan",
        "escalations",
        "phases",
        "ended",
    ),
    *(
        f"versions.{package}"
        for package in ("python", "torch", "fp8", "deepspeed", "transformers", "torchao")
    ),
    *(f"model.{key}" for key in ("config", "variant", "parameters")),
    *(f"phases.{key}" for key in ("step", "phase", "new_phase", "took_s", "fp8", "startup_checks")),
    *(f"ended.{key}" for key in ("time", "how", "step", "tokens")),
    *(f"escalations.{key}" for key in FALLBACK),
}
RUN_STATE = {
    *(
        "step",
        "consumed_samples",
        "consumed_tokens",
        "world_size",
        "zero_stage",
        "train_config",
        "model_config",
    ),
    *("sources", "sources.text"),
    *("data_fingerprint", "health", "skipped_samples", "evaluation_due", "changes", "began_at", "precision"),
    *("escalations", "precision_changes"),
    *(f"data_fingerprint.{key}" for key in ("split", "seq_length", "seed", "sources")),
    *(f"health.{key}" for key in ("skipped_in_a_row", "spikes", "interval", "data_weights", "fp8_alarms")),
    *("health.loss", "health.grad_norm", "began_at.path", "began_at.manifest_sha256"),
    *(f"changes.{key}" for key in ("step", "key", "old", "new")),
    *(f"escalations.{key}" for key in FALLBACK),
}
RANK_STATE = {"torch_rng", "cuda_rng", "python_rng", "numpy_rng", "fp8"}
CHECKPOINT_FILES = {"manifest.json", "run_state.json", "rank_00000.pt", "mp_rank_00_model_states.pt"}
OPTIMIZER_FILES = {0: set(), 1: {"bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"}}
CHECKPOINT_MANIFEST = {
    "schema",
    "step",
    "changes",
    "files",
    "files.name",
    "files.bytes",
    "files.sha256",
    "sha256",
}
ROLLBACK_NOTE = {"schema", "checkpoint", "skipped_samples", "sha256"}
RUN_FILES = {
    "checkpoints",
    "ds_config.json",
    "hf",
    "metrics.jsonl",
    "run.json",
    "train.log",
    "train_config.json",
}
EXPORT_FILES = {
    *("README.md", "config.json", "exported_from.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
}
EXPORTED_FROM = {"checkpoint", "manifest_sha256"}
DATA_FILES = {
    *("manifest.json", "tokenizer", "train_00000_00000.ds", "train_00000_00000.ds.index"),
    *("eval_00000_00000.ds", "eval_00000_00000.ds.index"),
}
DATA_MANIFEST = {
    *("schema", "dtype", "vocab_size", "bos_id", "eos_id", "tokenizer_sha256", "tokenizer_files", "inputs"),
    *("text_key", "eval_fraction", "documents", "text_bytes", "unigram_loss", "shards", "steps"),
    *(f"documents.{key}" for key in ("in", "out", "dropped", "removed")),
    *(f"shards.{key}" for key in ("name", "split", "tokens", "documents", "bytes", "sha256", "index_sha256")),
    *(f"steps.{key}" for key in ("languages", "language_threshold", "language_model", "quality")),
    *(f"steps.{key}" for key in ("quality_language", "dedup", "seed", "decontaminate", "decontaminate_key")),
    *(f"steps.{key}" for key in ("decontaminate_ngram", "sha256", "tokenizer_check")),
}
# Of the sorted names of all configuration keys, one a line. When a key is added or removed, put in what the failure
# shows, and name the key in the commit.
CONFIGURATION_KEYS = 93, "e9866e7a9381f1b38bffad92cdc2e0f19fcc8d7b992bc46b41a7dc7c1e97a50f"


def keys_of(value: Any, depth: int, prefix: str = "") -> Iterator[str]:
    """The keys of a JSON value as "section.key", down to `depth` levels; a list stands for its items."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, depth, prefix)
    elif isinstance(value, dict) and depth:
        for key, inner in value.items():
            yield prefix + key
            yield from keys_of(inner, depth - 1, f"{prefix}{key}.")


@pytest.fixture(scope="module")
def environment(only_process_group: dict[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """As if this process had been launched as the only rank."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in only_process_group.items():
            patch.setenv(key, value)
        yield patch


@pytest.fixture(scope="module")
def eventful(
    data: Path, small_model: Path, environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run with two phases, evaluations, a skipped step, fallbacks, rollbacks and a spike that it keeps."""
    folder = tmp_path_factory.mktemp("eventful") / "run"
    # step -> factors of the loss, one for each time that the step is computed
    factors = {4: [math.nan], 6: [1e3], 7: [1e6], 19: 4 * [1e3]}
    right = decoder.causal_lm_loss

    def loss_of_step(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        file = folder / "metrics.jsonl"
        done = metrics(folder)[-1]["step"] if file.exists() and file.stat().st_size else 0
        return right(logits, labels) * (factors.get(done + 1) or [1.0]).pop()

    settings = settings_of(data, small_model, folder)
    settings |= {"max_steps": 20, "save_steps": 9, "eval_steps": 10, "gradient_accumulation_steps": 1}
    settings |= {"on_spike": "rollback", "spike_window": 16}
    schedule = [{"until_step": 2, "compute": "bf16", "on_trouble": "warn"}, {}]
    escalates = {"health_steps": 1, "on_trouble": "escalate", "schedule": schedule}
    with environment.context() as patch:
        patch.setattr(decoder, "causal_lm_loss", loss_of_step)
        return run(settings, precision=PRECISIONS["delayed"] | escalates)


@pytest.fixture(scope="module")
def branch(
    trained: Path,
    data: Path,
    small_model: Path,
    environment: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run that began at the checkpoint of another one, with another learning rate."""
    settings = settings_of(data, small_model, tmp_path_factory.mktemp("branch") / "run")
    settings |= {"learning_rate": 1e-3, "allow_changes_on_resume": True, "max_steps": 4}
    return run(settings, resume_from_checkpoint=str(trained / "checkpoints/step-00000003"))


def content(file: Path) -> Any:
    return json.loads(file.read_text())


def test_metrics_keys(eventful: Path, branch: Path) -> None:
    lines, found, statistics = metrics(eventful) + metrics(branch), dict[str, set[str]](), set[str]()
    assert {frozenset(line) for line in metrics(eventful) if line["step"] == 1} == {frozenset(STEP)}
    for line in lines:
        for gemm in line.pop("fp8_health", {}).values():
            statistics |= {key for key in keys_of(gemm, 2) if "." in key}
        marks = line.keys() - STEP
        assert marks or STEP <= line.keys(), line
        for mark in marks:
            below = set(keys_of(line[mark], 2))
            found.setdefault(mark, set()).update(
                key for key in below if not key.startswith(("windows.", "found."))
            )
    assert found == METRICS
    assert statistics - {"input.kurtosis"} == STATISTICS


def test_run_json_keys(eventful: Path, branch: Path) -> None:
    starts = [content(folder / "run.json") for folder in (eventful, branch)]
    assert {key for start in starts for key in start} == {"starts"}
    free = ("hosts.", "machine.", "attention.")  # by machine
    found = {key for start in starts for key in keys_of(start["starts"], 2) if not key.startswith(free)}
    assert found == RUN_JSON


def test_checkpoint_keys_and_files(eventful: Path, branch: Path, trained: Path, settings: dict) -> None:
    folders = [eventful / "checkpoints/step-00000020", branch / "checkpoints/step-00000004"]
    free = ("train_config.", "model_config.", "precision.")  # configuration
    states = [content(folder / "run_state.json") for folder in folders]
    assert {key for state in states for key in keys_of(state, 2) if not key.startswith(free)} == RUN_STATE
    assert set(keys_of(content(folders[0] / "manifest.json"), 2)) == CHECKPOINT_MANIFEST
    assert set(keys_of(content(eventful / "checkpoints/rollback.json"), 1)) == ROLLBACK_NOTE
    assert torch.load(folders[0] / "rank_00000.pt", weights_only=True).keys() == RANK_STATE
    settings |= {"max_steps": 1, "warmup_steps": 0, "deepspeed": "ds_config_zero0.json"}
    stages = {1: trained / "checkpoints/step-00000006", 0: run(settings) / "checkpoints/step-00000001"}
    for stage, folder in stages.items():
        assert {path.name for path in folder.iterdir()} == CHECKPOINT_FILES | OPTIMIZER_FILES[stage]


def test_run_and_export_files(trained: Path) -> None:
    assert {path.name for path in trained.iterdir()} == RUN_FILES  # fixtures draw no loss.png
    assert {path.name for path in (trained / "hf").iterdir()} == EXPORT_FILES
    assert content(trained / "hf/exported_from.json").keys() == EXPORTED_FROM


def test_prepared_data_keys_and_files(data: Path) -> None:
    assert {path.name for path in data.iterdir()} == DATA_FILES
    found = set(keys_of(content(data / "manifest.json"), 2))
    assert found == DATA_MANIFEST


def test_configuration_keys() -> None:
    names = sorted(all_keys())
    assert (len(names), hashlib.sha256("\n".join(names).encode()).hexdigest()) == CONFIGURATION_KEYS, names


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("of the user"), 2),
        (UserError("of the user"), 2),
        (OSError("of the system"), 1),
        (OSError(5, "I/O"), 1),
        (OSError(30, "Read-only file system"), 2),
        (SaveError("of a save"), 2),
        (SaveError("of a save", is_transient=True), 1),
        (RuntimeError("of the program"), 1),
        (signals.Interrupted(), 130),
        (signals.Interrupted(signals.STOPPED), 75),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int) -> None:
    """The status tells the launcher whether to restart. Errors that the user has to fix would occur again.

    The errors occur while the arguments are read. tests/reliability has 0 and 75 of whole programs.
    """
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "load_arguments", Mock(side_effect=error))
    assert train.main([]) == status
