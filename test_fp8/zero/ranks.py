"""Trainings of train/train.py on the same ranks, one after another: a start of its own would take each of them as long
as its steps.

    python train/launch.py --nproc RANKS test_fp8/zero/ranks.py FOLDER

FOLDER/settings.json has a configuration for each training, by name. Of each that ended, FOLDER/NAME.json says
{"error": null}, or what it raised; its figures are in its output_dir. After an error the ranks end, for some may wait
for the others for ever: `train_all` starts them again for the trainings that are left.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

from train.files import write_durably

SETTINGS = "settings.json"
FAILED = 1


def train_all(
    script: Path, folder: Path, ranks: int, settings: dict[str, dict], say: Callable[[str], None]
) -> dict[str, str | None]:
    """Train them by `script` on so many ranks. Name -> what the training raised; None: nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, str | None] = {}
    described = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in described}
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", str(ranks), str(script), str(folder)]
    log = folder / "log.txt"
    while left := {name: values for name, values in settings.items() if name not in found}:
        write_durably(folder / SETTINGS, json.dumps(left))
        say(f"{ranks} rank{'s' * (ranks > 1)}: {len(left)} trainings, see {log}")
        with log.open("a", encoding="utf-8") as file:
            status = subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        for name in left:  # up to the one that failed, behind which none has begun
            said = folder / f"{name}.json"
            if not said.is_file():
                found[name] = f"the ranks ended with status {status}; see {log.name}"
                break
            found[name] = json.loads(said.read_text())["error"]
            if found[name] is not None:
                break
    return found


def main(argv: list[str]) -> int:
    import torch
    import torch.distributed as dist

    from model.fp8 import te_backend
    from train.engine.distributed import init_distributed

    folder = Path(argv[0])
    run_training: Callable[[Any], None] = runpy.run_path(str(ROOT / "train/train.py"))["run_training"]
    from train.config.arguments import TrainingArguments

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, settings in json.loads((folder / SETTINGS).read_text()).items():
        said = folder / f"{name}.json"
        try:
            run_training(TrainingArguments.from_dict(settings).resolve(world))
        except Exception as error:
            traceback.print_exc()
            if not said.exists():  # else another rank's, of which this one is the consequence
                write_durably(said, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            sys.stderr.flush()
            os._exit(FAILED)
        if rank == 0:
            write_durably(said, json.dumps({"error": None}))
        # the scales of all models that are alive are reduced together
        gc.collect()
        te_backend.forget_models()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
