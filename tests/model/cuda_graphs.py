"""CUDA graphs without a GPU: what is captured is a tape of tensor operations, and a replay runs them again on the same
memory. As on a GPU no Python runs in a replay, and what was a constant in the capture stays one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.operations: list[tuple] = []

    @torch.no_grad()
    def replay(self) -> None:
        for function, arguments, options, before in self.operations:
            now = function(*arguments, **options)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    """torch.cuda.Stream; a class, for others name it in their types."""

    def wait_stream(self, other: Stream) -> None: ...


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tape.operations.append((func, args, kwargs or {}, result))
        return result


def use_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tapes in the place of CUDA graphs; there are no streams."""
    stand_ins = {
        "CUDAGraph": Tape,
        "graph": lambda tape, pool=None, capture_error_mode="global": _Recording(tape),
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
