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
import io
import itertools
import json
import logging
import mmap
import os
import pickle
import random
import threading
import time
import weakref
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
from train.engine.process_group import GROUP_TIMEOUT, all_gather
from train.engine.zero import capture_checkpoint
from train.files import is_transient, write_durably

logger = logging.getLogger(__name__)
T = TypeVar("T")
ALIGNMENT = 512  # in bytes; GPUs copy aligned memory faster


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
        self.rank = dist.get_rank()
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def all_gather(self, value: T) -> list[T]:
        """Gather a value from every rank, and return all values in rank order."""
        return all_gather(value, self.group)

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
        ranks: the same object for all savers of a run, because it holds a process group.
        keep, keep_every: the checkpoints to keep after a save (`excess_checkpoints`).
    """

    def __init__(
        self, engine: Any, root: Path, precision: Precision, ranks: Ranks, keep: int, keep_every: int = 0
    ):
        self.engine, self.root, self.precision = engine, root, precision
        self.ranks, self.keep, self.keep_every = ranks, keep, keep_every
        self._buffers: dict[str, HostBuffer] = {}  # by file name
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """Return whether a save has begun and `finish` has not been called yet. The result is the same on all ranks."""
        return self._job is not None

    @property
    def busy(self) -> bool:
        """Return whether the save thread of this rank is still writing, so that `finish` would have to wait."""
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
            # not a daemon thread, so Python completes the save before the process exits normally
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
    """A single save of a checkpoint. After the tensors are copied, `run` writes the files."""

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
        """Write the checkpoint. If an error occurs, store it in `failure` instead of raising it."""
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
                "The error may be temporary. Run the same command to resume, or use run_training.sh, which restarts "
                "automatically"
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


# ---------------------------------------------------------------- the copy in host memory

# The host memory (`HostBuffer`) is allocated once and reused for every save. For GPU tensors the memory is pinned.
# Copies then run at the full speed of the bus, and all copies are queued before waiting for the first one.


class HostBuffer:
    """A host memory buffer that is allocated on first use, and reused while the size does not change.

    The memory is not allocated by torch, because torch's pinned memory allocator rounds sizes up to a power of two.
    torch.save would then write the whole storage of a tensor, including the unused part.
    """

    def __init__(self) -> None:
        self.size = 0
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize | None = None

    def reserve(self, size: int, pin: bool) -> None:
        """Allocate `size` bytes and discard the previous content.

        Args:
            pin: whether to pin the memory, for fast copies from a GPU.

        Raises:
            OSError, MemoryError: if there is not enough host memory.
        """
        if size == self.size:
            return
        if self._unpin is not None:
            self._unpin()  # a finalizer runs only once
        self._memory, self.size = None, 0
        self._memory, self.size = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size
        with contextlib.suppress(OSError):  # ignore kernels that do not support huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            self._pin(torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr())

    def _pin(self, pointer: int) -> None:
        cudart = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(pointer, self.size, 0))
        if status == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, pointer)
            self._unpin.atexit = False
            return
        # Clear the error, which CUDA reports again at the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        logger.warning(
            f"{self.size / 1e9:.1f} GB of host memory for background saves could not be pinned (CUDA error {status}). "
            "Copies from the GPU will be several times slower. Increase the limit on locked memory (ulimit -l)"
        )

    def part(self, offset: int, size: int) -> torch.Tensor:
        """Return `size` bytes of the buffer, starting at byte `offset`, as a uint8 tensor with a separate storage."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)


class _Pickler(pickle.Pickler):
    """Pickles an object, and collects its plain tensors in `tensors` instead of pickling them.

    Attributes that DeepSpeed adds to plain tensors are dropped, because DeepSpeed does not read them from files.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_meta:
            return None  # parameters and other subclasses are pickled, and contain plain tensors
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)  # keeps the tensor alive, so that its id stays unique
        return place


class Snapshot:
    """A copy of an object for torch.save, with the tensor data in a host buffer.

    Copies from a GPU are asynchronous: call torch.cuda.synchronize before using the snapshot. Without a buffer, the
    snapshot refers to the original tensors, which must not change until they are written.

    Like torch.save, a snapshot contains each storage as a whole and only once. The written files are therefore equal,
    byte for byte, with and without a buffer.

    Raises:
        MemoryError: if there is not enough host memory.
        PicklingError and similar: if the object cannot be pickled. torch.save cannot write such an object either.
    """

    def __init__(self, value: Any, buffer: HostBuffer | None):
        self._pickle = io.BytesIO()
        pickler = _Pickler(self._pickle)
        pickler.dump(value)
        self.tensors = pickler.tensors
        if buffer is not None:
            copies = self._copy_storages(buffer)
            self.tensors = [_over(copies[t.untyped_storage()._cdata], t) for t in self.tensors]

    def value(self) -> Any:
        """Return a copy of the original object, with each tensor replaced by the tensor of this snapshot."""
        self._pickle.seek(0)
        unpickler = pickle.Unpickler(self._pickle)
        unpickler.persistent_load = self.tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def _copy_storages(self, buffer: HostBuffer) -> dict[int, torch.UntypedStorage]:
        """Copy the storage of each tensor into `buffer`. Copies from a GPU are asynchronous.

        Returns:
            {address of the original storage (`_cdata`): copied storage}.

        Raises:
            MemoryError: if there is not enough host memory.
        """
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in self.tensors)}
        sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages.values()]
        ends = list(itertools.accumulate(sizes, initial=0))
        try:
            buffer.reserve(ends[-1], pin=any(s.device.type == "cuda" for s in storages.values()))
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"not enough host memory for a copy of the checkpoint: {error}. Set save_async to false to save "
                "without a copy. Training then waits until each save is complete"
            ) from error
        copies = {}
        for (key, storage), offset in zip(storages.items(), ends, strict=False):
            copy = buffer.part(offset, storage.nbytes())
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            copies[key] = copy.copy_(there, non_blocking=True).untyped_storage()
        return copies


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that uses `storage` with the shape, strides and dtype of `tensor`."""
    empty = torch.empty(0, dtype=tensor.dtype)
    copy = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    return copy.requires_grad_(tensor.requires_grad)
