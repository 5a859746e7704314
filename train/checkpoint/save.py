"""Saving, while training goes on: what must not change is copied to the host, and a thread of each rank writes it.

    main thread   begin: copies of all that is saved ............ finish: what came of it
    save thread        room -> files, flushed and hashed -> all ranks have written -> manifest -> old ones go

The ranks agree between these stages over a process group of their own. A save that fails, on whatever rank, fails on
all of them with one message, and leaves what was there before; whoever is killed in one leaves a folder without a
manifest, which is no checkpoint. Without `background` the main thread does the same work itself, of the tensors
themselves instead of copies.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from model.fp8.precision import Precision
from model.fp8.state import fp8_state
from train.checkpoint.files import (
    RUN_STATE,
    RunState,
    describe_file,
    name_of,
    rank_file,
    size_text,
    write_manifest,
)
from train.checkpoint.save_errors import Ranks, SaveError, nothing_written
from train.checkpoint.save_files import discard_old, make_room, undo, write_tensors
from train.checkpoint.staging import HostBuffer, Snapshot
from train.files import write_durably
from train.guard.watchdog import SAVE_THREAD

# What a save needs is known but for a little: the state of the run as text, blocks that are not full.
DISK_MARGIN = 1.05


@dataclass
class Saved:
    """A checkpoint that was committed: seconds from `begin` to its commit, and how many of them training waited."""

    path: Path
    seconds: float
    waited_s: float


class Saver:
    """saver = Saver(engine, root of the checkpoints, ...); saver.begin(state, True); training; saver.finish().

    Every rank builds it and calls its methods at the same points. One save is under way at a time. `keep`: the number
    of newest checkpoints that stay after a commit, 0 for all.

    Once it has saved in the background, it holds as much host memory as a rank writes, kept from save to save.
    """

    def __init__(
        self,
        engine: Any,
        root: Path,
        precision: Precision,
        keep: int,
        log: Callable[[str], None],
    ):
        self.engine, self.root, self.precision, self.keep = engine, root, precision, keep
        self.log = log
        self.ranks = Ranks()
        self._buffers: dict[str, HostBuffer] = {}  # by the name of the file
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """There is a save of which `finish` has not told yet; the same on every rank."""
        return self._job is not None

    @property
    def busy(self) -> bool:
        """This rank still works on it: `finish` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: RunState, background: bool) -> None:
        """Save `state` and what the engine holds now. In the background: returns when it is copied; else when it is
        written, without a copy."""
        assert not self.pending, "the outcome of the last save comes first"
        start = time.perf_counter()
        job = Job(self.root / name_of(state.step), state.step, self.ranks, self.keep, start)

        def take(name: str, value: Any) -> None:
            job.files[name] = self._copy(name, value) if background else Snapshot(value, None)

        held = self._held_bytes()
        with nothing_written(self.engine, take) as taking:
            self.engine.save_checkpoint(str(self.root), tag=job.path.name, save_latest=False)
            own = rank_file(self.ranks.rank)
            taking.attempt(lambda: take(own, rank_state(self.engine.module, self.precision)))
        job.errors = taking.errors
        if self.ranks.rank == 0:
            job.run_state = json.dumps(asdict(state), indent=1)
        self._job = job
        if background:
            if self._held_bytes() != held:
                size = size_text(self._held_bytes())
                self.log(
                    f"saves in the background keep {size} of host memory on rank 0, as much as it writes"
                )
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies are there
            # no daemon: a process that ends by itself first ends its save
            self._thread = threading.Thread(target=job.run, name=SAVE_THREAD)
            self._thread.start()
        else:
            job.run()
        job.waited_s = time.perf_counter() - start

    def finish(self) -> Saved | None:
        """Wait for the save under way; None if there is none.

        Raises SaveError, on all ranks: one of them could not write, or there is not the room. What it wrote is
        removed, and no other checkpoint.
        """
        job, start = self._job, time.perf_counter()
        if job is None:
            return None
        if self._thread is not None:
            self._thread.join()
        self._job = self._thread = None
        if job.failure is not None:
            raise job.failure
        return Saved(job.path, job.seconds, job.waited_s + time.perf_counter() - start)

    def _held_bytes(self) -> int:
        return sum(buffer.size for buffer in self._buffers.values())

    def _copy(self, name: str, value: Any) -> Snapshot:
        """What goes into the file `name`. Raises MemoryError: the host has no room for a copy."""
        buffer = self._buffers.setdefault(name, HostBuffer(self.log))
        try:
            return Snapshot(value, buffer)
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"no host memory for a copy of what goes into {name}: {error}; with save_async false none is needed, "
                "and training waits for its saves"
            ) from error


class Job:
    """What is left to do of a save when all that it writes is copied: no step of training is in the way of it."""

    def __init__(self, path: Path, step: int, ranks: Ranks, keep: int, start: float):
        self.path, self.step, self.ranks, self.keep, self.start = path, step, ranks, keep, start
        self.files: dict[str, Snapshot] = {}
        self.run_state: str | None = None  # rank 0
        self.errors: list[Exception] = []  # of the copies
        self.needed = 0  # bytes of all ranks' files
        self.failure: BaseException | None = None
        self.seconds = self.waited_s = 0.0

    def run(self) -> None:
        """Write, agree, commit. Raises nothing: `failure` has it."""
        try:
            self._save()
        except BaseException as error:  # for `finish` to raise, in the main thread
            self.failure = error
        self.files = {}
        self.seconds = time.perf_counter() - self.start

    def _save(self) -> None:
        ranks, first = self.ranks, self.ranks.rank == 0
        try:
            self.needed = int(DISK_MARGIN * sum(ranks.together(self._bytes)))
            ranks.together(lambda: make_room(self.path, self.needed) if first else None)
            entries = [entry for each in ranks.together(self._write) for entry in each]
            ranks.together(lambda: write_manifest(self.path, self.step, entries) if first else None)
        except SaveError as error:
            message = ranks.every(undo(self.path, self.needed, error) if first else "")[0]
            raise SaveError(message) from error
        if first:
            discard_old(self.path, self.keep)

    def _bytes(self) -> int:
        if self.errors:
            raise self.errors[0]
        return sum(file.bytes for file in self.files.values()) + len(self.run_state or "")

    def _write(self) -> list[dict[str, Any]]:
        """Write this rank's files; their entries in the manifest."""
        self.path.mkdir(exist_ok=True)  # on network file systems rank 0's may not be seen yet
        entries = [write_tensors(self.path / name, file.value()) for name, file in self.files.items()]
        if self.run_state is not None:
            write_durably(self.path / RUN_STATE, self.run_state)
            entries.append(describe_file(self.path / RUN_STATE, self.path))
        return entries


def rank_state(module: nn.Module, precision: Precision) -> dict[str, Any]:
    """What each rank saves besides DeepSpeed's: random generators, FP8 scales and histories."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python_rng": random.getstate(),
        "numpy_rng": [v.tolist() if isinstance(v, np.ndarray) else v for v in numpy_state],
        "fp8": {key: tensor.detach().cpu() for key, tensor in fp8_state(module, precision).items()},
    }
