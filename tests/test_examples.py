"""Tests that start each file of examples/ on a CPU with small inputs, in a folder with links to the repository's files.

For the Slurm scripts, bash replaces sbatch, and the stand-in for srun of test_launchers.py starts the nodes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests import programs
from tests.fixtures import corpus_texts, settings_of
from tests.reliability.launching import clean_environment
from tests.reliability.test_launchers import TASKS, TWO_NODES
from tests.scripts.machine import executable
from tests.train.runs import ROOT, metrics

LINKED = "examples model pyproject.toml requirements.txt run_training.sh scripts train train_args".split()
FEW = "--max_steps 2 --warmup_steps 0 --max_seq_length 32 --per_device_train_batch_size 2 --train_batch_size_tokens 128"
FEW += " --max_eval_samples 2 --save_strategy no"

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    programs.python_at(folder / "venv/bin/python")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_example(clone: Path, *command: str | Path, **more: str) -> None:
    environment = clean_environment(VIRTUAL_ENV=str(clone / "venv"), NPROC="1", DEMO="0", **more)
    environment["PATH"] = f"{clone}/venv/bin:{environment['PATH']}"
    output = clone / "output.txt"
    with output.open("w") as out:
        done = programs.run(
            [*map(str, command)], env=environment, cwd=clone, stdout=out, stderr=out, timeout=300
        )
    assert done.returncode == 0, output.read_text()[-6000:]


@pytest.mark.parametrize(("name", "ranks"), [("one_node", 1), ("two_nodes", 2)])
def test_slurm_scripts(
    clone: Path, data: Path, small_model: Path, name: str, ranks: int, only_process_group: dict
) -> None:
    text = (ROOT / f"examples/{name}.sbatch").read_text()
    header = " ".join(re.findall(r"^#SBATCH (.*)", text, re.M))
    options = dict(re.findall(r"--([\w-]+)=(\S+)", header))
    assert int(options["nodes"]) == ranks and options["ntasks-per-node"] == "1" and "--requeue" in header
    spooled = clone / "slurm_script"  # Slurm starts a copy in the folder where sbatch was called
    spooled.write_text(text)
    executable(clone / "venv/bin/srun", TASKS.format(described=TWO_NODES))
    settings = settings_of(data, small_model, Path("run")) | {"max_steps": 2, "save_strategy": "no"}
    (clone / "my_run.json").write_text(json.dumps(settings))
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": options["nodes"]}
    run_example(clone, "bash", spooled, "my_run.json", **job, STARTS=str(clone / "starts.txt"))
    (start,) = json.loads((clone / "run/run.json").read_text())["starts"]
    assert metrics(clone / "run")[-1]["step"] == 2
    assert sum(len(ranks) for ranks in start["hosts"].values()) == ranks


def test_continue_hf_model(clone: Path, trained: Path, corpus: Path) -> None:
    command = ["examples/continue_hf_model.sh", trained / "hf", corpus, *FEW.split()]
    for _ in range(2):  # the second time, everything is complete
        run_example(clone, *command)
    assert metrics(clone / "output/continue_hf_model")[-1]["step"] == 2
    manifest = json.loads((clone / "data/continued/manifest.json").read_text())
    assert manifest["vocab_size"] == 512 and manifest["documents"]["in"] == 300


def test_datatrove_mixture(clone: Path, tmp_path: Path, small_model: Path) -> None:
    for name, count in (("web", 120), ("code", 90)):
        (tmp_path / name).mkdir()
        texts = [*corpus_texts(count), "too short"]
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name / "texts.parquet")
    folders = [tmp_path / "web", tmp_path / "code"]
    run_example(
        clone,
        *("examples/datatrove_mixture.sh", *folders, *FEW.split(), "--model.config", small_model),
        VOCAB_SIZE="400",
    )
    manifests = [
        json.loads((clone / f"data/mixture/{name}/manifest.json").read_text()) for name in ("web", "code")
    ]
    assert [manifest["documents"]["in"] for manifest in manifests] == [120, 90]
    assert metrics(clone / "output/datatrove_mixture")[-1]["step"] == 2
