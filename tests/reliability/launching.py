"""Start ranks for tests, either with train/launch.py or as forks of one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests import programs
from tests.conftest import small_config
from tests.train.runs import ROOT


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without the variables that describe a rank.

    more: additional environment variables.
    """
    described = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in described}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return environment | {"OMP_NUM_THREADS": "1", "PATH": path} | more


HASTY = f"""
import sys
sys.path[0] = {str(ROOT)!r}
from train import launch
launch.FAILED_GRACE_S = 0.2
sys.exit(launch.main(sys.argv[1:]))
"""


def launch(
    ranks: int, script: str, *arguments: str, hasty: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `ranks` ranks and wait until all ranks have exited.

    stdout also contains standard error. hasty: terminate the other ranks immediately after one has failed.
    """
    launcher = ["-c", HASTY] if hasty else [str(ROOT / "train/launch.py")]
    command = [sys.executable, *launcher, "--nproc", str(ranks), str(ROOT / script)]
    return programs.run(
        [*command, *arguments],
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )


def write_small_config(folder: Path, **changes: object) -> str:
    """Write the configuration of a small model (`small_config`) to a folder, and return the path of the file."""
    (folder / "config.json").write_text(json.dumps(small_config(**changes).to_dict()))
    return str(folder / "config.json")


def training_case(
    ranks: int,
    settings: dict[str, Any],
    output_dir: Path,
    spoiled: dict[str, str] | None = None,
    **faults: Any,
) -> tuple[int, str, dict]:
    """Return a case for `run_cases` that trains a run. spoiled, faults: see `number_ranks.whole_run`."""
    settings = {**settings, "output_dir": str(output_dir)}
    return ranks, "whole_run", {"settings": settings, "spoiled": spoiled or {}, **faults}


def run_cases(folder: Path, cases: list[tuple[int, str, dict]]) -> list[list[dict]]:
    """Run test cases with ranks.py. Return the results of each case, one per rank.

    A case is a tuple (ranks, function, arguments).
    """
    folder.mkdir(exist_ok=True)
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    script = "tests/reliability/ranks.py"
    if torch.cuda.is_available():
        for number, (ranks, _) in enumerate(itertools.groupby(cases, lambda case: case[0])):
            launched = launch(ranks, script, str(folder), str(file), str(number))
            assert launched.returncode == 0, launched.stdout[-6000:]
    else:
        done = programs.run(
            [sys.executable, str(ROOT / script), str(folder), str(file)],
            capture_output=True,
            text=True,
            env=clean_environment(),
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [
        [json.loads((folder / f"{index}-{rank}.json").read_text()) for rank in range(case[0])]
        for index, case in enumerate(cases)
    ]
