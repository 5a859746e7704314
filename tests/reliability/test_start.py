"""A run that is killed while it starts does not keep the next one from starting."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests import programs
from tests.reliability.launching import clean_environment, launch
from tests.train.runs import ROOT

OP = "deepspeed_shm_comm"
START = """from train.engine.distributed import init_distributed
import torch, torch.distributed as dist
init_distributed()
group = dist.group.WORLD._get_backend(torch.device("cpu"))
print(f"it has begun; ranks wait for each other for {group.options._timeout}")"""


def start(folder: Path, ranks: int) -> subprocess.Popen[str]:
    """A run that joins its process group, and ends; what torch builds for it is in `folder`/ops."""
    (folder / "start.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{START}")
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", str(ranks), str(folder / "start.py")]
    environment = clean_environment(TORCH_EXTENSIONS_DIR=str(folder / "ops"))
    return programs.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("process_group")  # for which the op was built
@pytest.mark.process
def test_a_lock_file_of_a_dead_builder_is_no_obstacle(tmp_path: Path) -> None:
    """Torch's builder leaves it when it is killed, and waits for ever for one that it finds."""
    built = Path(cpp_extension._get_build_directory(OP, verbose=False))
    shutil.copytree(built, tmp_path / "ops" / OP)
    lock = tmp_path / "ops" / OP / "lock"
    lock.touch()
    with start(tmp_path, ranks=1) as process:
        said = process.communicate(timeout=250)[0]
    # and nothing of the op, which is there
    assert said.splitlines() == [
        f"removed {lock}, which a killed build had left",
        "it has begun; ranks wait for each other for 1 day, 0:00:00",
    ]
    assert not lock.exists()


@pytest.mark.skipif(
    torch.cuda.is_available() or not Path("/dev/shm").is_dir(),
    reason="needs a machine without CUDA and with /dev/shm, where DeepSpeed then shares memory",
)
@pytest.mark.usefixtures("process_group")
@pytest.mark.process
def test_a_killed_rank_leaves_no_shared_memory(tmp_path: Path) -> None:
    """66 MB of each rank, until the machine is restarted."""
    (tmp_path / "start.py").write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n{START}\n"
        "import torch.distributed as dist; from pathlib import Path\n"
        "dist.barrier()\n"
        "port = os.environ['MASTER_PORT']\n"
        "print(port, len(list(Path('/dev/shm').glob(f'deepspeed*_{port}_?'))), flush=True)\n"
        "dist.barrier()\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else time.sleep(1e6)\n"
    )
    done = launch(2, str(tmp_path / "start.py"), hasty=True)
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert re.search(r"rank 1 .*SIGKILL", done.stdout), done.stdout
    port, count = re.findall(r"^(\d+) (\d)$", done.stdout, re.MULTILINE)[0]
    assert count == "2", "DeepSpeed names or places its buffers differently"
    assert list(Path("/dev/shm").glob(f"deepspeed*_{port}_?")) == []


@pytest.mark.process
def test_what_all_ranks_find_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom train import train\n"
        "sys.exit(train.fail('error: the same on each', 2))\n"
    )
    done = launch(3, str(tmp_path / "start.py"))
    assert done.returncode == 2 and done.stdout.count("the same on each") == 1 and "rank 0" in done.stdout


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
@pytest.mark.usefixtures("process_group")
@pytest.mark.process
def test_a_start_removes_what_killed_ranks_left(tmp_path: Path) -> None:
    """Whoever started them; what a living rank of another job has stays."""
    left, held = (
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_host_{os.getpid()}_{rank}")
        for rank in (0, 1)
    )
    left.touch()
    try:
        with held.open("w"):
            (tmp_path / "start.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{START}")
            command = [sys.executable, str(tmp_path / "start.py")]
            done = programs.run(command, env=clean_environment(), capture_output=True, text=True)
            assert "it has begun" in done.stdout, done.stderr
            assert not left.exists() and held.exists()
    finally:
        held.unlink()
        left.unlink(missing_ok=True)


@pytest.mark.reliability
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("builds_s", [0.0, 1.0, 5.0])
@pytest.mark.interpreter
def test_a_start_after_one_that_was_killed_while_it_built(tmp_path: Path, builds_s: float) -> None:
    lock = tmp_path / "ops" / OP / "lock"
    with start(tmp_path, ranks=1) as process:
        while not lock.exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(builds_s)
        os.kill(process.pid, signal.SIGKILL)  # and with it its rank
    assert lock.exists(), "it was killed too late"
    with start(tmp_path, ranks=2) as process:
        said = process.communicate(timeout=800)[0]
    assert said.count(f"removed {lock}") == 1 and said.count("it has begun") == 2, said
    assert not lock.exists()
