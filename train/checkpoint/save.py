"""Save checkpoints while training continues: tensors are copied to the host, and a thread of each rank writes them.

    main thread   begin: copies of all that is saved ............ finish: the outcome
    save thread        room -> files, flushed and hashed -> all ranks have written -> manifest -> old ones go

The ranks agree between these steps over a process group of their own. A save that fails on one rank fails on all of
them with one message, and leaves earlier checkpoints as they were. Without `background` the main thread does the same
work, on the tensors themselves instead of copies.
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
    make_room,
    name_of,
    rank_file,
    undo_save,
    write_manifest,
)
from train.checkpoint.staging import HostBuffer, Snapshot
from train.engine.distributed import GROUP_TIMEOUT
from train.engine.zero import capture_checkpoint
from train.files import may_pass, size_text, write_durably

T = TypeVar("T")

LARGE_BYTES = 1 << 20  # smaller writes are hashed in the same thread
DISK_MARGIN = 1.05  # for file system blocks that are not full


class SaveError(CheckpointError):
    """A save that failed, the same on every rank. Earlier checkpoints are as they were.

    Args:
        may_pass: whether a restart may succeed, on each rank that had an error.
    """

    code = "save"

    def __init__(self, message: str, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


class Ranks:
    """The ranks that save. They communicate over a gloo group of their own, since the others are in use meanwhile."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if self.world > 1 else None

    def all_gather(self, value: T) -> list[T]:
        """Return the `value` of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, action: Callable[[], T]) -> list[T]:
        """Return what `action`, which has no collectives in it, returns on each rank.

        Raises SaveError on all ranks: it failed on one; the message says on which and why.
        """
        result, problem, passes = None, None, True
        try:
            result = action()
        except Exception as error:  # of any kind: the other ranks would wait for this one
            problem = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            passes = may_pass(error)
        found = self.all_gather((result, problem, passes))
        if any(problem for _, problem, _ in found):
            message = "; ".join(f"rank {r}: {p}" for r, (_, p, _) in enumerate(found) if p)
            raise SaveError(message, all(passes for _, _, passes in found))
        return [result for result, _, _ in found]  # type: ignore[misc]  # None only where action gave that


class Saver:
    """Saves checkpoints of one engine: saver.begin(state, background=True); training; saver.finish().

    Every rank calls the same at the same points.

    Args:
        root: of the checkpoints.
        keep: number of the newest checkpoints that stay; 0: all.
    """

    def __init__(self, engine: Any, root: Path, precision: Precision, keep: int):
        self.engine, self.root, self.precision, self.keep = engine, root, precision, keep
        self.ranks = Ranks()
        self._buffers: dict[str, HostBuffer] = {}  # by the name of the file
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """Whether there is a save whose outcome `finish` has not returned; the same on every rank."""
        return self._job is not None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes: `finish` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: RunState, background: bool) -> None:
        """Save `state` and what the engine holds now. In the background: return when it is copied; else when it is
        written, without a copy."""
        assert not self.pending, "call finish() first"
        start = time.perf_counter()
        job = Job(
            self.root / name_of(state.step), self.ranks, self.keep, asdict(state), state.unscheduled, start
        )

        def take(name: str, value: Any) -> None:
            job.files[name] = self._copy(name, value) if background else Snapshot(value, None)

        job.error = capture_checkpoint(self.engine, job.path, take)
        if job.error is None:
            try:
                take(rank_file(self.ranks.rank), rank_state(self.engine.module, self.precision))
            except Exception as error:  # raised when the ranks agree
                job.error = error
        self._job = job
        if background:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copies are complete
            # no daemon: a process that ends by itself completes its save first
            self._thread = threading.Thread(target=job.run, name="save")
            self._thread.start()
        else:
            job.run()
        job.waited_s = time.perf_counter() - start

    def finish(self) -> Job | None:
        """Wait for the save under way, which is then committed, and return it; None if there is none.

        Raises SaveError, on all ranks: it failed. What it wrote is removed, and no other checkpoint.
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
        """Copy what goes into the file `name`. Raises MemoryError: the host has no room for it."""
        buffer = self._buffers.setdefault(name, HostBuffer())
        try:
            return Snapshot(value, buffer)
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"no host memory for a copy of what goes into {name}: {error}. Set save_async to false: training then "
                "waits for its saves, and needs no copy"
            ) from error


@dataclass
class Job:
    """A save whose tensors are copied: it does not hold up training."""

    path: Path
    ranks: Ranks
    keep: int
    run_state: dict[str, Any]
    unscheduled: set[int]
    start: float  # by time.perf_counter
    files: dict[str, Snapshot] = field(default_factory=dict)
    error: Exception | None = None  # of the copies
    needed: int = 0  # bytes of all ranks' files
    failure: BaseException | None = None
    seconds: float = 0.0  # from `begin` to the commit
    waited_s: float = 0.0  # of these, seconds for which training waited

    def run(self) -> None:
        """Write, agree, commit. Raises nothing: `failure` has the error."""
        try:
            self._save()
        except BaseException as error:  # `finish` raises it in the main thread
            self.failure = error
        self.files = {}
        self.seconds = time.perf_counter() - self.start

    def _save(self) -> None:
        ranks, first = self.ranks, self.ranks.rank == 0
        try:
            self.needed = int(DISK_MARGIN * sum(ranks.run(self._bytes)))
            ranks.run(lambda: make_room(self.path, self.needed) if first else None)
            entries = [entry for each in ranks.run(self._write) for entry in each]
            ranks.run(
                lambda: write_manifest(self.path, entries, self.run_state["changes"]) if first else None
            )
        except SaveError as error:
            ranks.run(lambda: undo_save(self.path) if first else None)
            raise SaveError(self._message(error), error.may_pass) from error
        if first:
            discard_old(self.path, self.keep, self.unscheduled)

    def _message(self, error: SaveError) -> str:
        remedy = "Free disk space there, lower save_total_limit, or choose another output_dir"
        if error.may_pass:
            remedy = "The fault may pass: start the run again (run_training.sh does so by itself)"
        return (
            f"the checkpoint {self.path} could not be saved: {error}. In {self.path.parent} a save needs about "
            f"{size_text(self.needed)}; earlier checkpoints are as they were. {remedy}"
        )

    def _bytes(self) -> int:
        """Return the bytes of this rank's files. Raises the error of the copies."""
        if self.error is not None:
            raise self.error
        return sum(file.bytes for file in self.files.values()) + len(self._state_text())

    def _write(self) -> list[dict[str, Any]]:
        """Write this rank's files. Return their entries in the manifest."""
        self.path.mkdir(exist_ok=True)  # on network file systems rank 0's may not be visible yet
        entries = [write_tensors(self.path / name, file.value()) for name, file in self.files.items()]
        if text := self._state_text():
            write_durably(self.path / RUN_STATE, text)
            entries.append(describe_file(self.path / RUN_STATE))
        return entries

    def _state_text(self) -> str:
        """Return the content of run_state.json, which rank 0 writes."""
        return json.dumps(self.run_state, indent=1) if self.ranks.rank == 0 else ""


# ---------------------------------------------------------------- the files


def rank_state(module: nn.Module, precision: Precision) -> dict[str, Any]:
    """Return what each rank saves besides DeepSpeed's files: random generators, FP8 scales and histories."""
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
    """A file for torch.save that hashes what is written. It keeps an error: torch ignores what `write` returns, and an
    exception would pass through C code."""

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
                    # both release the interpreter lock; `data` is valid only until this returns
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
    """Write `value` to `path` with torch.save, flushed to the disk. Return its entry in the manifest.

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
