"""Save checkpoints in the background: copy the tensors to host memory, and write them in a thread on each rank.

    main thread   begin: copy tensors ......................... finish: wait, report errors
    save thread        write, flush and hash files -> manifest -> remove old checkpoints

The save threads of all ranks synchronize between these steps over their own process group. If a save fails on one rank,
it fails on all ranks with the same message, and earlier checkpoints are unchanged. With `background=False`, the main
thread writes the tensors directly, without a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
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
    checkpoint_name,
    describe_file,
    discard_old,
    rank_file,
    remove_unfinished,
    write_manifest,
)
from train.checkpoint.staging import HostBuffer, Snapshot
from train.engine.distributed import GROUP_TIMEOUT
from train.engine.zero import capture_checkpoint
from train.files import is_transient, write_durably

T = TypeVar("T")


class SaveError(CheckpointError):
    """Error raised on all ranks if a checkpoint cannot be saved. Earlier checkpoints are unchanged.

    Args:
        is_transient: whether a restart may succeed, because the errors on all failed ranks may be temporary.
    """

    code = "save"

    def __init__(self, message: str, is_transient: bool = False):
        super().__init__(message)
        self.is_transient = is_transient


class Ranks:
    """Collective operations for the save threads.

    They use a separate gloo group, because training uses the other process groups at the same time.
    """

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def all_gather(self, value: T) -> list[T]:
        """Gather a value from every rank, and return all values in rank order."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def run(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on each rank and return the results of all ranks. `action` must not contain collectives.

        Raises:
            SaveError: on all ranks, if `action` failed on at least one rank. The message contains the ranks and their
                errors.
        """
        result, problem, passes = None, None, True
        try:
            result = action()
        except Exception as error:  # catch every error, because the other ranks wait for this rank
            problem = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            passes = is_transient(error)
        found = self.all_gather((result, problem, passes))
        if any(problem for _, problem, _ in found):
            message = "; ".join(f"rank {r}: {p}" for r, (_, p, _) in enumerate(found) if p)
            raise SaveError(message, all(passes for _, _, passes in found))
        return [result for result, _, _ in found]  # type: ignore[misc]  # None only if `action` returns None


class Saver:
    """Saves checkpoints of an engine, in the background or in the main thread.

    Call `saver.begin(state, background=True)`, continue training, and then call `saver.finish()`. All ranks must call
    the methods at the same points.

    Args:
        root: folder that contains the checkpoints.
        keep, keep_every: the checkpoints to keep after a save (`excess_checkpoints`).
    """

    def __init__(self, engine: Any, root: Path, precision: Precision, keep: int, keep_every: int = 0):
        self.engine, self.root, self.precision = engine, root, precision
        self.keep, self.keep_every = keep, keep_every
        self.ranks = Ranks()
        self._buffers: dict[str, HostBuffer] = {}  # by file name
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """Whether a save has begun and `finish` has not been called yet. The value is the same on all ranks."""
        return self._job is not None

    @property
    def busy(self) -> bool:
        """Whether the save thread of this rank is still writing, so that `finish` would have to wait."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, state: RunState, background: bool) -> None:
        """Start saving `state` and the current state of the engine.

        Args:
            background: If True, return once the tensors have been copied to host memory, and write the copies in a
                background thread. If False, return when the tensors have been written.
        """
        assert not self.pending, "call finish() first"
        job = Job(
            self.root / checkpoint_name(state.step),
            self.ranks,
            self.keep,
            self.keep_every,
            asdict(state),
            time.perf_counter(),
        )

        def take(name: str, value: Any) -> None:
            buffer = self._buffers.setdefault(name, HostBuffer()) if background else None
            job.files[name] = Snapshot(value, buffer)

        job.error = capture_checkpoint(self.engine, job.path, take)
        try:
            take(rank_file(self.ranks.rank), rank_state(self.engine.module, self.precision))
        except Exception as error:  # all ranks raise the error together in Job.run
            job.error = job.error or error
        self._job = job
        if background:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # wait for the copies
            # not a daemon thread, so the process completes the save before it exits
            self._thread = threading.Thread(target=job.run, name="save")
            self._thread.start()
        else:
            job.run()
        job.waited_s = time.perf_counter() - job.start

    def finish(self) -> Job | None:
        """Wait until the current save is complete.

        Returns:
            The completed save, or None if no save has begun.

        Raises:
            SaveError: on all ranks, if the save failed. The files of the failed save are removed, and other checkpoints
                are unchanged.
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


@dataclass
class Job:
    """A single save of a checkpoint. It runs in the save thread after the tensors are copied."""

    path: Path
    ranks: Ranks
    keep: int
    keep_every: int
    run_state: dict[str, Any]
    start: float  # value of time.perf_counter() when the save began
    files: dict[str, Snapshot] = field(default_factory=dict)
    error: Exception | None = None  # error raised while copying the tensors
    failure: BaseException | None = None  # error raised by `run`
    seconds: float = 0.0  # duration of the save, including the copies
    waited_s: float = 0.0  # part of `seconds` during which training waited

    def run(self) -> None:
        """Write the checkpoint. If this fails, store the error in `failure` instead of raising it."""
        try:
            self._save()
        except BaseException as error:  # `finish` raises it in the main thread
            self.failure = error
        self.files = {}
        self.seconds = time.perf_counter() - self.start

    def _save(self) -> None:
        ranks, first = self.ranks, self.ranks.rank == 0
        try:
            ranks.run(self._make_folder)
            entries = [entry for each in ranks.run(self._write) for entry in each]
            ranks.run(
                lambda: write_manifest(self.path, entries, self.run_state["changes"]) if first else None
            )
        except SaveError as error:
            if first:
                with contextlib.suppress(OSError):
                    remove_unfinished(self.path)
            ranks.all_gather(None)  # wait for rank 0, because the next save may use the folder
            remedy = (
                "The error may be temporary. Start the run again, or use run_training.sh, which restarts automatically"
                if error.is_transient
                else "Free disk space, keep fewer checkpoints (save_total_limit), or choose another output_dir"
            )
            raise SaveError(
                f"the checkpoint {self.path} could not be saved: {error}. Earlier checkpoints are unchanged. {remedy}",
                error.is_transient,
            ) from error
        if first:
            discard_old(self.path, self.keep, self.keep_every)

    def _make_folder(self) -> None:
        """Create the checkpoint folder on rank 0. If copying the tensors failed, raise that error instead."""
        if self.error is not None:
            raise self.error
        if self.ranks.rank == 0:
            remove_unfinished(self.path)  # from a save that was killed
            self.path.mkdir(parents=True)

    def _write(self) -> list[dict[str, Any]]:
        """Write the files of this rank, and return their manifest entries."""
        # on a network file system, the folder created by rank 0 may not be visible yet
        self.path.mkdir(exist_ok=True)
        entries = [write_tensors(self.path / name, file.value()) for name, file in self.files.items()]
        if self.ranks.rank == 0:
            write_durably(self.path / RUN_STATE, json.dumps(self.run_state, indent=1))
            entries.append(describe_file(self.path / RUN_STATE))
        return entries


# ---------------------------------------------------------------- the files


def rank_state(module: nn.Module, precision: Precision) -> dict[str, Any]:
    """Return the state of this rank that DeepSpeed does not save: RNG states, FP8 scales and amax histories."""
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
    """A file object for torch.save that also computes the hash of the written data.

    `write` stores an error instead of raising it. torch.save ignores the return value of `write`, and an exception
    would have to propagate through C code.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.sha256 = file, hashlib.sha256()
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data)
        try:
            if self.error is None:
                self.sha256.update(data)
                self.file.write(data)
        except Exception as error:
            self.error = error
        return data.nbytes

    def flush(self) -> None:
        pass


def write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """Write `value` to a file with torch.save, and flush the file to the disk.

    Returns:
        The manifest entry of the file.

    Raises:
        OSError: if the file could not be written for any reason. The message contains the path.
    """
    try:
        with open(path, "wb") as file:
            hashed = _Hashed(file)
            torch.save(value, hashed)  # type: ignore[arg-type]  # torch.save only calls write and flush
            if hashed.error is not None:
                raise hashed.error
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        raise OSError(f"{path} could not be written: {error}") from error
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hashed.sha256.hexdigest()}
