"""Tests that locks and shared memory left behind by killed ranks do not disturb later runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.reliability.launching import launch
from tests.train.runs import ROOT

START = """from train.engine.process_group import init_distributed
import torch, torch.distributed as dist
init_distributed()
group = dist.group.WORLD._get_backend(torch.device("cpu"))
print(f"it has begun; ranks wait for each other for {group.options._timeout}")"""


@pytest.mark.usefixtures("process_group")  # it builds the op
@pytest.mark.process
def test_killed_build_does_not_block_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed build leaves torch's lock file behind, and torch waits for this lock without a timeout."""
    name = "deepspeed_shm_comm"
    shutil.copytree(cpp_extension._get_build_directory(name, verbose=False), tmp_path / name)
    (tmp_path / name / "lock").touch()
    (tmp_path / "start.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{START}")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    done = launch(1, str(tmp_path / "start.py"))
    assert done.returncode == 0 and "it has begun" in done.stdout


@pytest.mark.skipif(
    torch.cuda.is_available() or not Path("/dev/shm").is_dir(),
    reason="needs a machine without CUDA and with /dev/shm, where DeepSpeed then shares memory",
)
@pytest.mark.usefixtures("process_group")
@pytest.mark.process
def test_killed_rank_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Otherwise, each killed rank would occupy 66 MB of shared memory until the host restarts."""
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


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
@pytest.mark.usefixtures("process_group")
@pytest.mark.process
def test_launcher_removes_shared_memory_of_killed_ranks(tmp_path: Path) -> None:
    """Shared memory left by killed ranks of any job is removed. Shared memory of running ranks is kept."""
    left, held = (
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_host_{os.getpid()}_{rank}")
        for rank in (0, 1)
    )
    left.touch()
    try:
        with held.open("w"):
            (tmp_path / "start.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{START}")
            done = launch(1, str(tmp_path / "start.py"))
            assert done.returncode == 0, done.stdout
            assert not left.exists() and held.exists()
    finally:
        held.unlink()
        left.unlink(missing_ok=True)
