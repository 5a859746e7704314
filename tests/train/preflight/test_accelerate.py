"""train/preflight/check.py: what `accelerate launch` sets in the environment of its programs, and which of it is
an error; train_args/accelerate_fp8.yaml is that of train_config_fp8.json, by accelerate itself where it is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT, curve
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.preflight import check
from train.preflight.check import contradictions

YAML = ROOT / "train_args/accelerate_fp8.yaml"
# accelerate 1.15.0, launch --config_file train_args/accelerate_fp8.yaml
LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "1",
    "ACCELERATE_FP8_FORMAT": "E4M3",
    "ACCELERATE_FP8_INTERVAL": "1",
    "ACCELERATE_FP8_MARGIN": "0",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
    "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
    "ACCELERATE_FP8_PAD_INNER_DIM": "1",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "ACCELERATE_MIXED_PRECISION": "fp8",
}
PREFIX = "ACCELERATE_"


def arguments(*options: str) -> TrainingArguments:
    return resolve_arguments(load_arguments([str(ROOT / "train_args/train_config_fp8.json"), *options]), 8)


def test_shipped_accelerate_file_matches() -> None:
    assert contradictions(arguments(), LAUNCHED) == [] == contradictions(arguments(), {})
    text = YAML.read_text()
    for name in ("BACKEND", "FORMAT", "MARGIN", "INTERVAL", "AMAX_HISTORY_LEN", "AMAX_COMPUTE_ALGO"):
        key = "fp8_format" if name == "FORMAT" else name.lower()
        assert f"\n  {key}: {LAUNCHED[f'{PREFIX}FP8_{name}']}\n" in text, name
    assert "\nmixed_precision: fp8\n" in text and "\ndistributed_type: MULTI_GPU\n" in text


@pytest.mark.parametrize(
    ("theirs", "options", "key"),
    [
        ({"MIXED_PRECISION": "bf16"}, "", "precision.compute"),
        ({"MIXED_PRECISION": "no"}, "", "precision.compute"),
        ({}, "--precision.compute bf16", "precision.compute"),
        ({"FP8_BACKEND": "MSAMP"}, "", "model.variant"),
        ({"FP8_BACKEND": "ao"}, "", "model.variant"),
        ({"FP8_FORMAT": "HYBRID"}, "", "precision.fp8_format"),
        ({"FP8_MARGIN": "2"}, "", "precision.margin"),
        ({"FP8_AMAX_HISTORY_LEN": "1024"}, "", "precision.amax_history_len"),
        ({"FP8_AMAX_COMPUTE_ALGO": "most_recent"}, "", "precision.amax_compute_algo"),
        ({"FP8_INTERVAL": "4"}, "", "precision.recipe"),
        ({"FP8_OVERRIDE_WGRAD": "True"}, "", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
        ({"FP8_USE_MXFP8_BLOCK_SCALING": "true"}, "", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"),
        ({"GRADIENT_ACCUMULATION_STEPS": "2"}, "", "gradient_accumulation_steps"),
        ({"GRADIENT_CLIPPING": "0.5"}, "", "max_grad_norm"),
        ({"DYNAMO_BACKEND": "INDUCTOR"}, "", "model.compile"),
        ({"USE_DEEPSPEED": "true"}, "", "ACCELERATE_USE_DEEPSPEED"),
        ({"USE_FSDP": "true"}, "", "ACCELERATE_USE_FSDP"),
        ({"USE_MEGATRON_LM": "true"}, "", "ACCELERATE_USE_MEGATRON_LM"),
        ({"USE_PARALLELISM_CONFIG": "true"}, "", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    ],
)
def test_contradicting_setting_raises(theirs: dict[str, str], options: str, key: str) -> None:
    environment = LAUNCHED | {PREFIX + name: value for name, value in theirs.items()}
    (found,) = contradictions(arguments(*options.split()), environment)
    assert found.key == key  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ({"GRADIENT_ACCUMULATION_STEPS": "4", "GRADIENT_CLIPPING": "1"}, ""),
        ({"GRADIENT_ACCUMULATION_STEPS": "auto", "GRADIENT_CLIPPING": "none"}, ""),
        ({"FP8_BACKEND": "te", "FP8_AMAX_COMPUTE_ALGO": "most_recent"}, "--precision.recipe current"),
        (
            {"FP8_BACKEND": "AO", "FP8_FORMAT": "HYBRID"},
            "--model.variant torchao --precision.recipe tensorwise",
        ),
        ({"MIXED_PRECISION": "no"}, "--precision.compute fp32"),
        ({"MIXED_PRECISION": "bf16", "FP8_MARGIN": "3"}, "--precision.compute bf16"),
    ],
)
def test_equal_settings_are_accepted(told: dict[str, str], options: str) -> None:
    environment = LAUNCHED | {PREFIX + name: value for name, value in told.items()}
    assert contradictions(arguments(*options.split()), environment) == []


def test_contradictions_refuse_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (LAUNCHED | {"ACCELERATE_FP8_MARGIN": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(check.PreflightError):
        check.check(load_arguments([str(ROOT / "train_args/train_config_fp8.json")]), 8, 8, None)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    find_spec("accelerate") is None,
    reason="needs accelerate (requirements-serving.txt), which starts the ranks",
)
def test_accelerate_starts_a_run(settings: dict, tmp_path: Path) -> None:
    """Two ranks on the CPU, by the shipped file."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings | {"max_steps": 2, "save_strategy": "no"}))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(YAML),
        "--num_processes",
        "2",
    ]
    command += [str(ROOT / "train/train.py"), str(config)]

    def launched(*options: str) -> subprocess.CompletedProcess[str]:
        given = clean_environment(TMPDIR=str(tmp_path))  # torchrun, which it is, leaves files there
        return subprocess.run([*command, *options], env=given, capture_output=True, text=True)

    done = launched()
    assert done.returncode == 0, done.stderr
    assert [m[0] for m in curve(Path(settings["output_dir"]))] == [1, 2]
    refused = launched("--precision.margin", "1")
    assert refused.returncode != 0 and "precision.margin" in refused.stderr
