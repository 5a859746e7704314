"""Start ranks for tests, either with train/launch.py or as forks of one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.build import build_model
from model.config import load_config
from model.fp8.precision import Precision
from tests import programs
from tests.conftest import small_config
from tests.train.runs import ROOT
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.config.load import build_arguments, resolve_arguments
from train.engine.step import MicroStep, build_engine


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without the variables that describe a rank.

    more: additional environment variables.
    """
    described = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in described}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return environment | {"OMP_NUM_THREADS": "1", "PATH": path} | more


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def build_micro_step(
    config: str, fallbacks: dict[str, str] | None = None, variant: str = "te_layer", **keys: Any
) -> tuple[MicroStep, TrainingArguments]:
    """Return a micro-step with an engine of its own, on the ranks of this process group.

    keys: of the configuration.
    """
    raw = {
        "model": {"config": config, "variant": variant},
        "data": {"sources": {"none": "none"}},
        "max_steps": 100,
        "max_seq_length": 16,
        "per_device_train_batch_size": 2,
    }
    args = resolve_arguments(build_arguments(raw | keys), dist.get_world_size())
    model_config, precision = load_config(config), Precision(args.precision, fallbacks=fallbacks)
    recompute = args.gradient_checkpointing
    model = build_model(
        model_config, variant, precision, seed=1, gradient_checkpointing=recompute, speed=args.speed
    )
    ds_config = resolve_ds_config(args, model_config, dist.get_world_size())
    return MicroStep(build_engine(model, args, ds_config), precision, args), args


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
