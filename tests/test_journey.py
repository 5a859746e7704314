"""What docs/getting-started.md says, as a user does it: from 9 MB of own text to sentences of own models.

Each step begins with what the one before it left, in a folder of the user's, with the programs' own command lines.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests import programs
from tests.reliability.launching import clean_environment
from tests.scripts.machine import executable
from tests.train.runs import ROOT, metrics
from train.monitor.signals import DO_NOT_RESTART, STOPPED

pytestmark = [pytest.mark.slow, pytest.mark.interpreter, pytest.mark.timeout(1200)]

PART_CHARACTERS = 3_200_000  # of each of three formats
LAYERS, STEPS, EVAL_SAMPLES = 2, 26, 16
# Smaller than what the page has, so that this takes a minute; logged at each step.
OWN = {
    "max_steps": 20,
    "max_seq_length": 128,
    "per_device_train_batch_size": 2,
    "train_batch_size_tokens": 512,
    "max_eval_samples": EVAL_SAMPLES,
    "logging_steps": 1,
    "save_steps": 10,
}
FP8_RAN = f"FP8: {3 * LAYERS} of {3 * LAYERS + 1} GEMM modules ran FP8 (delayed scaling)"


class User:
    """Somebody in a folder of theirs, who types commands."""

    def __init__(self, folder: Path):
        self.folder = folder
        programs.python_at(folder / "forked/bin/python")
        executable(folder / "real/bin/python", f'exec "{sys.executable}" "$@"')

    def options(self, environment: str) -> dict:
        path = self.folder / environment
        settings = clean_environment(VIRTUAL_ENV=str(path), DEMO_PROMPT="Returns the")
        return {"cwd": self.folder, "env": settings, "text": True}

    def python(self, program: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        """`python PROGRAM ARGUMENTS` to its end, which must have this status."""
        command = [sys.executable, str(ROOT / program), *map(str, arguments)]
        done = programs.run(command, capture_output=True, **self.options("forked"))
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def train(self, *arguments: object, status: int = 0) -> str:
        """`run_training.sh my_run.json ARGUMENTS` to its end; what it says."""
        command = [str(ROOT / "run_training.sh"), "my_run.json", *map(str, arguments)]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, **out, **self.options("forked"))
        assert done.returncode == status, done.stdout
        return done.stdout

    def run(self, name: str) -> Path:
        return self.folder / "output" / name


def prose() -> Iterator[str]:
    """Documents: what is read by people in the packages here, of a .py its docstrings; without blank lines."""
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        for path in sorted(Path(root).rglob("*")):
            if path.suffix not in (".md", ".rst", ".txt", ".py"):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if path.suffix == ".py":
                text = "\n".join(re.findall(r'"""(.*?)"""', text, re.DOTALL))
            if len(text) > 200:
                yield re.sub(r"\n\s*\n", "\n", text).strip()


def some(documents: Iterator[str]) -> list[str]:
    taken, characters = [], 0
    while characters < PART_CHARACTERS:
        taken.append(next(documents))
        characters += len(taken[-1])
    return taken


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    """With the model and the run of the page, made smaller, and texts/, which `count` tells the documents of."""
    user = User(tmp_path_factory.mktemp("journey"))
    page = (ROOT / "docs/getting-started.md").read_text()
    model, run = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)[:2])
    model["num_hidden_layers"] = LAYERS
    (user.folder / "my_model.json").write_text(json.dumps(model))
    (user.folder / "my_run.json").write_text(json.dumps(run | OWN))
    texts = user.folder / "texts"
    texts.mkdir()
    documents = prose()
    parts = [some(documents) for _ in range(3)]
    (texts / "a.txt").write_text("\n\n".join(parts[0]), encoding="utf-8")
    with gzip.open(texts / "b.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in parts[1])
    pyarrow.parquet.write_table(pyarrow.table({"text": parts[2]}), texts / "c.parquet")
    (texts / "d.docx").write_text("no text to this program")
    (user.folder / "count").write_text(f"{sum(map(len, parts)):,}")
    return user


@pytest.fixture(scope="module")
def prepared(user: User) -> User:
    """Has data/mine, of all documents in the three formats."""
    texts = ("--input", "texts", "--split_on", "blank_line")
    tokenizer = ("--vocab_size", 2048, "--max_bytes", 2_000_000, "--output", "data/my-tokenizer")
    said = user.python("train/train_tokenizer.py", *texts, *tokenizer)
    assert "vocabulary of 2,048 tokens" in said.stdout + said.stderr
    output = ("--tokenizer", "data/my-tokenizer", "--output", "data/mine")
    done = user.python("train/prepare_data.py", *texts, *output)
    count = (user.folder / "count").read_text()
    assert f"documents: {count} in, {count} out, 0 dropped, 0 removed" in done.stdout
    assert re.search(r"\.docx", done.stdout + done.stderr), done.stdout + done.stderr
    return user


@pytest.fixture(scope="module")
def stopped(prepared: User) -> int:
    """The step after which Ctrl-C in a terminal stopped the FP8 run, which real processes do."""
    process = subprocess.Popen(
        [str(ROOT / "run_training.sh"), "my_run.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **prepared.options("real"),
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 5/"):
            os.killpg(process.pid, signal.SIGINT)
    text = "".join(said)
    assert process.wait() == STOPPED, text
    assert FP8_RAN in text and "Traceback" not in text, text
    found = re.search(r"stopped on request after step (\d+)", text)
    assert found, text
    return int(found[1])


@pytest.fixture(scope="module")
def resumed(prepared: User, stopped: int) -> str:
    """What the run says that goes on after Ctrl-C to its end, with another learning rate and more steps, as the
    refusal tells how."""
    changes = ("--learning_rate", "1e-3", "--max_steps", STEPS)
    refused = prepared.train(*changes, status=DO_NOT_RESTART)
    found = re.search(r"(--allow_changes_on_resume) (\S+)", refused)
    assert found and f"step-{stopped:08d}" in refused, refused
    return prepared.train(*changes, found[1], found[2])


def test_prepare_own_text(prepared: User) -> None:
    manifest = json.loads((prepared.folder / "data/mine/manifest.json").read_text())
    assert manifest["text_bytes"] > 9e6
    done = prepared.python("train/inspect_data.py", "data/mine", "--verify")
    assert re.search(r"^verified .*\b\d+ shards", done.stdout, re.M), done.stdout


def test_ctrl_c_saves(prepared: User, stopped: int) -> None:
    """The fixture has looked at status and words."""
    checkpoint = prepared.run("my_run") / f"checkpoints/step-{stopped:08d}"
    assert (checkpoint / "manifest.json").is_file() and 5 <= stopped < OWN["max_steps"]


def test_resume_with_changed_learning_rate(prepared: User, stopped: int, resumed: str) -> None:
    folder = prepared.run("my_run")
    assert FP8_RAN in resumed, resumed
    assert re.search(rf" at step {stopped}\b.*\b{512 * stopped:,} tokens", resumed), resumed
    lines = metrics(folder)
    steps = [m for m in lines if "loss" in m]
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    assert {(c["key"], c["new"]) for m in lines for c in m.get("changes", [])} == {
        ("learning_rate", 1e-3),
        ("max_steps", STEPS),
    }
    assert 0 < steps[stopped]["learning_rate"] <= 1e-3
    rates = [m["learning_rate"] for m in steps]
    assert rates[OWN["max_steps"]] > 1.2 * rates[-1] and rates[-1] == pytest.approx(1e-4, rel=0.1)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    (demo,) = re.findall(r"^ +generate text: +python (\S+) --model output/my_run ", resumed, re.M)
    assert (prepared.folder / demo).samefile(ROOT / "fp8_inference_demo/fp8_inference.py")
    starts = json.loads((folder / "run.json").read_text())["starts"]
    ends = [(start["step"], start["ended"]["how"], start["ended"]["step"]) for start in starts]
    assert ends == [(0, "stopped", stopped), (stopped, "done", STEPS)]
    log = (folder / "train.log").read_text()
    assert log.count(" step 5/") == 1 and f" step {STEPS}/{STEPS} " in log


def test_evaluation(prepared: User, resumed: str) -> None:
    output = ("--max_samples", EVAL_SAMPLES, "--output", "my_run.json")
    prepared.python("train/evaluate.py", "output/my_run", *output)
    result = json.loads((prepared.folder / "my_run.json").read_text())["sources"]["mine"]
    logged = [m["eval_loss"] for m in metrics(prepared.run("my_run")) if "eval_loss" in m][-1]
    assert result["tokens"] == 128 * EVAL_SAMPLES and result["loss"] == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("kind", ["hf", "hf-fp8"])
def test_export_and_generation(prepared: User, resumed: str, kind: str) -> None:
    checkpoint = f"output/my_run/checkpoints/step-{STEPS:08d}"
    exported = prepared.python("train/export.py", checkpoint, f"my_{kind}", "--format", kind)
    said = exported.stdout + exported.stderr
    assert f"wrote my_{kind}" in said and ("bit for bit" in said) == (kind == "hf-fp8"), said
    config = json.loads((prepared.folder / f"my_{kind}/config.json").read_text())
    assert ("quantization_config" in config) == (kind == "hf-fp8")
    asked = ("--prompt", "Returns the", "--max_new_tokens", 12, "--ignore_eos")
    done = prepared.python("fp8_inference_demo/fp8_inference.py", "--model", f"my_{kind}", *asked)
    assert done.stdout.strip() and "decode 11 tokens" in done.stderr, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* matrix products .*FP8 weights", done.stderr, re.M), done.stderr
