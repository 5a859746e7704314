"""train/engine/distributed.py: what other packages say at a start is left out where nobody can use it."""

from __future__ import annotations

import logging
import warnings

import pytest

from train.engine import distributed


def test_remarks_that_nobody_needs_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformer Engine has FlashAttention-4 and takes it, and recommends its predecessors."""
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(distributed.launchers, "adopt", lambda: None)
    monkeypatch.setattr(distributed.deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(distributed.distributed_c10d, "_set_pg_timeout", lambda _: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        distributed.init_distributed()
        warnings.warn("Argument aux_data (position 17) cannot be converted to a JitArgument", stacklevel=1)
        warnings.warn("Argument of another kind", stacklevel=1)
    assert [str(w.message) for w in warned] == ["Argument of another kind"]
    for package in ("flash-attn v3", "flash-attn", "flash-attn v4"):
        logging.getLogger("DotProductAttention").warning("%s may provide important feature support", package)
    assert caplog.messages == ["flash-attn v4 may provide important feature support"]
