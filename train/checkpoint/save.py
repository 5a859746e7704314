"""Saving, while training goes on: what must not change is copied to the host, and a thread of each rank writes it.

    main thread   begin: copies of all that is saved ............ finish: what came of it
    save thread        room -> files, flushed and hashed -> all ranks have written -> manifest -> old ones go

The ranks agree between these stages over a process group of their own. A save that fails, on whatever rank, fails on
all of them with one message, and leaves what was there before. Without `background` the main thread does the same work,
of the tensors themselves instead of copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from model.fp8.precision import Precision
from model.fp8.state import fp8_state
from train.checkpoint.files import (
    RUN_STATE,
    CheckpointError,
    RunState,
    describe_file,
    discard_old,
    discard_surplus,
    make_room,
    name_of,
    rank_file,
    undo_save,
    write_manifest,
)
from train.checkpoint.staging import HostBuffer, Snapshot
from train.engine.distributed import GROUP_TIMEOUT
from train.engine.zero import capture_checkpoint
from train.files import may_pass, write_durably

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # from which on hashing beside writing is worth a change of threads
# What a save needs is known but for a little: the state of the run as text, blocks that are not full.
DISK_MARGIN = 1.05


class SaveError(CheckpointError):
    """A save that failed, the same on every rank. What was committed before it is as it was. may_pass: by a fault that
    may be over at another start, on each rank that had one."""

    code = "save"

    def __init__(self, message: str, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


class Ranks:
    """The ranks that save, which agree over a gloo group of their own: the others are in use meanwhile."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if self.world > 1 else None

    def all_gather(self, value: T) -> list[T]:
        """The `value` of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank; it has no collectives in it.

        Raises SaveError on all ranks: it failed on one; the message says on which and why.
        """
        result, problem, passes = None, None, True
        try:
            result = action()
        except Exception as error:  # whatever it is: the others would wait for this rank
            problem = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            passes = may_pass(error)
        found = self.all_gather((result, problem, passes))
        if any(problem for _, problem, _ in found):
            message = "; ".join(f"rank {r}: {p}" for r, (_, p, _) in enumerate(found) if p)
            raise SaveError(message, all(passes for _, _, passes in found))
        return [result for result, _, _ in found]  # type: ignore[misc]  # None only where action gave that


class Saver:
    """saver = Saver(engine, root of the checkpoints, ...); saver.begin(state, True); training; saver.finish().

    Every rank calls the same at the same points. `keep`: how many of the newest checkpoints stay, 0 for all.
    """

    def __init__(self, engine: Any, root: Path, precision: Precision, keep: int):
        self.engine, self.root, self.precision, self.keep = engine, root, precision, keep
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
        job = Job(self.root / name_of(state.step), self.ranks, self.keep, start)

        def take(name: str, value: Any) -> None:
            job.files[name] = self._copy(name, value) if background else Snapshot(value, None)

        job.error = capture_checkpoint(self.engine, job.path, take)
        if job.error is None:
            try:
                take(rank_file(self.ranks.rank), rank_state(self.engine.module, self.precision))
            except Exception as error:  # told when the ranks agree
                job.error = error
        if self.ranks.rank == 0:
            job.run_state, job.changes = json.dumps(asdict(state), indent=1), state.changes
            job.unscheduled = state.unscheduled
        self._job = job
        if background:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies are there
            # no daemon: a process that ends by itself first ends its save
            self._thread = threading.Thread(target=job.run, name="save")
            self._thread.start()
        else:
            job.run()
        job.waited_s = time.perf_counter() - start

    def finish(self) -> Job | None:
        """Wait for the save under way, which is committed then; None if there is none.

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
        job.waited_s += time.perf_counter() - start
        return job

    def _copy(self, name: str, value: Any) -> Snapshot:
        """What goes into the file `name`. Raises MemoryError: the host has no room for a copy."""
        buffer = self._buffers.setdefault(name, HostBuffer())
        try:
            return Snapshot(value, buffer)
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"no host memory for a copy of what goes into {name}: {error}; with save_async false none is needed, "
                "and training waits for its saves"
            ) from error


@dataclass
class Job:
    """What is left to do of a save when all that it writes is copied: no step of training is in the way of it."""

    path: Path
    ranks: Ranks
    keep: int
    start: float
    files: dict[str, Snapshot] = field(default_factory=dict)
    run_state: str | None = None  # rank 0
    changes: list[dict[str, Any]] = field(default_factory=list)  # of the run state
    unscheduled: set[int] = field(default_factory=set)  # of the run state
    error: Exception | None = None  # of the copies
    needed: int = 0  # bytes of all ranks' files
    failure: BaseException | None = None
    seconds: float = 0.0  # from `begin` to the commit
    waited_s: float = 0.0  # how many of them training did

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
            self.needed = int(DISK_MARGIN * sum(ranks.run(self._bytes)))
            if first:
                discard_surplus(self.path, self.keep, self.unscheduled)
            ranks.run(lambda: make_room(self.path, self.needed) if first else None)
            entries = [entry for each in ranks.run(self._write) for entry in each]
            ranks.run(lambda: write_manifest(self.path, entries, self.changes) if first else None)
        except SaveError as error:
            message = ranks.all_gather(undo_save(self.path, self.needed, error) if first else "")[0]
            raise SaveError(message, error.may_pass) from error
        if first:
            discard_old(self.path, self.keep, self.unscheduled)

    def _bytes(self) -> int:
        if self.error is not None:
            raise self.error
        return sum(file.bytes for file in self.files.values()) + len(self.run_state or "")

    def _write(self) -> list[dict[str, Any]]:
        """Write this rank's files; their entries in the manifest."""
        self.path.mkdir(exist_ok=True)  # on network file systems rank 0's may not be seen yet
        entries = [write_tensors(self.path / name, file.value()) for name, file in self.files.items()]
        if self.run_state is not None:
            write_durably(self.path / RUN_STATE, self.run_state)
            entries.append(describe_file(self.path / RUN_STATE))
        return entries


# ---------------------------------------------------------------- the files


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


class _Hashed:
    """A file for torch.save, with the sha256 of what was written. An error is kept, for torch does not see one in what
    `write` returns, and an exception would pass through C code that knows none."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor):
        self.file, self.pool = file, pool
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data)
        if self.error is None:
            try:
                if data.nbytes < LARGE_BYTES:
                    self.sha256.update(data)
                    self.file.write(data)
                else:
                    # both release the interpreter's lock; `data` is void when torch has its answer
                    hashed = self.pool.submit(self.sha256.update, data)
                    try:
                        self.file.write(data)
                    finally:
                        hashed.result()
            except Exception as error:
                self.error = error
            self.bytes += data.nbytes
        return data.nbytes

    def flush(self) -> None:
        pass


def write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """torch.save to `path`, flushed to the disk; returns its entry in the manifest.

    Raises OSError with the file's name, whatever failed.
    """
    try:
        with open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
            hashed = _Hashed(file, pool)
            torch.save(value, hashed)  # type: ignore[arg-type]  # it writes, and needs nothing else
            if hashed.error is not None:
                raise hashed.error
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        raise OSError(f"{path} could not be written: {error}") from error
    return {"name": path.name, "bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}
