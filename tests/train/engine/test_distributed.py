"""train/engine/distributed.py: what other packages say at a start is left out where nobody can use it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

import pytest

from tests.programs import ROOT
from train.engine import distributed


def test_remarks_that_nobody_needs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformer Engine has FlashAttention-4 and takes it, and recommends its predecessors."""
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(distributed.launchers, "adopt", lambda: None)
    monkeypatch.setattr(distributed.deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(distributed.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        distributed.init_distributed()
        warnings.warn("Argument aux_data (position 17) cannot be converted to a JitArgument", stacklevel=1)
        warnings.warn("Argument of another kind", stacklevel=1)
    assert [str(w.message) for w in warned] == ["Argument of another kind"]
    for package in ("flash-attn v3", "flash-attn", "flash-attn v4"):
        logging.getLogger("DotProductAttention").warning("%s may provide important feature support", package)
    assert caplog.messages == ["flash-attn v4 may provide important feature support"]


@pytest.mark.interpreter
def test_deepspeed_does_not_talk_over_an_answer() -> None:
    """train/evaluate.py and train/export.py read checkpoints by this file, and answer on standard output."""
    environment = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"} | {
        "CUDA_VISIBLE_DEVICES": ""
    }
    command = [sys.executable, "-c", "import train.checkpoint.load, deepspeed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
