"""train/engine/process_group.py: what other packages print, and ranks of several nodes that do not arrive."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import numbers
from tests.programs import ROOT
from train.engine import process_group
from train.launch import free_port


@pytest.mark.interpreter
def test_deepspeed_prints_are_suppressed() -> None:
    """train/evaluate.py and train/export.py read checkpoints by this file, and answer on standard output."""
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    command = [sys.executable, "-c", "import train.checkpoint.load, deepspeed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# ---------------------------------------------------------------- ranks of several nodes


def rank(number: int, port: int, ranks: int = 4, **more: str) -> dict[str, str]:
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODES_TIMEOUT_S": "20",
    } | more


def arrive(*environments: dict[str, str]) -> list[Exception | None]:
    """What each raised. The ranks are threads here, which keep the store of rank 0 until all have read from it."""
    stores = []

    def one(environment: dict[str, str]) -> Exception | None:
        try:
            stores.append(process_group.wait_for_ranks(environment))
        except (ValueError, OSError) as error:
            return error
        return None

    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(one, environments))


def test_ranks_arrive_in_any_order() -> None:
    assert arrive(*(rank(number, port) for port in [free_port()] for number in (3, 1, 2, 0))) == [None] * 4


def test_missing_ranks_are_listed() -> None:
    port = free_port()
    for error in arrive(*(rank(number, port, 6, NODES_TIMEOUT_S="3") for number in (0, 2, 5))):
        assert isinstance(error, ConnectionError) and numbers(error)[:4] == [1, 3, 4, 6]


def test_unreachable_rank_0_error() -> None:
    port = free_port()
    (error,) = arrive(rank(2, port, NODES_TIMEOUT_S="1"))
    assert isinstance(error, ConnectionError) and f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in str(error)


def test_no_wait_on_one_node() -> None:
    for environment in {}, {**rank(1, 1), "WORLD_SIZE": "2"}, rank(1, 1, TORCHELASTIC_USE_AGENT_STORE="True"):
        assert process_group.wait_for_ranks(environment) is None
