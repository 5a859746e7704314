"""train/job.py: what its environment variables say, and what of them it cannot do with."""

from __future__ import annotations

import sys

import pytest

from tests.train.runs import ROOT
from train import job

NAMES = (
    "MAX_RESTARTS NPROC HAS_GPU NNODES NODE_RANK MASTER_ADDR MASTER_PORT SLURM_JOB_ID SLURM_NNODES".split()
)
LAUNCH = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2"]


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_setting_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        if not empty:
            monkeypatch.delenv(name)
    of_job = job.Job([])
    assert (of_job.max_restarts, of_job.slurm_job, of_job.first_node) == (3, "", True)
    assert job.processes_per_node() == 2 and job.launch_command(2) == LAUNCH


def test_a_slurm_job_without_its_nodes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would be looked for at no host."""
    for name in [*NAMES, "SLURM_JOB_NODELIST"]:
        monkeypatch.setenv(name, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}.get(name, ""))
    with pytest.raises(job.JobError, match="SLURM_JOB_NODELIST is not set: which nodes has Slurm job 7"):
        job.launch_command(2)
