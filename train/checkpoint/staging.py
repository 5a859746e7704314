"""Copy an object for torch.save, so that training can change the tensors while the copy is written.

The copies are in host memory that is reused for every save (`HostBuffer`). For tensors on a GPU this memory is pinned:
copies then run at the speed of the bus, and all of them are queued before waiting for one.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import mmap
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)

ALIGNMENT = 512  # bytes; GPUs copy aligned memory fastest
PAGE, TOUCHING_THREADS = 4096, 8


class HostBuffer:
    """Host memory that is allocated on first use and reused while the size stays the same.

    It does not come from torch: torch's pinned allocator rounds sizes up to a power of two, and torch.save writes the
    whole storage of a tensor that is a part of one.
    """

    def __init__(self) -> None:
        self.size = 0
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize | None = None

    def reserve(self, size: int, pin: bool) -> None:
        """Allocate `size` bytes and discard the previous content. Raises OSError, MemoryError: host memory is full."""
        if size == self.size:
            return
        if self._unpin is not None:
            self._unpin()  # a finalizer runs only once
        self._memory, self.size = None, 0
        self._memory, self.size = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size
        with contextlib.suppress(OSError):  # the kernel does not support huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            self._touch()
            self._pin(torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr())

    def _touch(self) -> None:
        """Touch all pages in several threads. Pinning alone touches them in one thread, which took 5 s for 9 GB."""
        share = -(-self.size // (TOUCHING_THREADS * PAGE)) * PAGE
        starts = range(0, self.size, share)
        with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
            list(
                pool.map(
                    lambda start: self.part(start, min(share, self.size - start))[::PAGE].zero_(), starts
                )
            )

    def _pin(self, pointer: int) -> None:
        cudart = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(pointer, self.size, 0))
        if status == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, pointer)
            self._unpin.atexit = False
            return
        with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel
            torch.ones(1, device="cuda")
        logger.warning(
            f"{self.size / 1e9:.1f} GB of host memory for background saves could not be pinned (CUDA error {status}). "
            "Copies will be several times slower. Check ulimit -l"
        )

    def part(self, offset: int, size: int) -> torch.Tensor:
        """Return uint8 [size]: a view of the memory with its own storage."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)


class _Pickler(pickle.Pickler):
    """Pickles an object without its plain tensors, which it collects in `tensors`.

    Attributes that DeepSpeed adds to plain tensors are dropped; it does not read them from files.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_meta:
            return None  # Parameters and other subclasses are pickled; they consist of plain tensors
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)  # keeps it alive, so that its id stays unique
        return place


class Snapshot:
    """A copy of `value` in a buffer.

    Copies from a GPU are only queued: call torch.cuda.synchronize before using them. Without a buffer, the snapshot
    refers to the tensors of `value`, which must not change until they are written.

    Like torch.save, the snapshot copies whole storages, each only once. So the files are equal, byte for byte, with and
    without a buffer.

    Raises:
        MemoryError: host memory is full.
        PicklingError and similar: torch.save cannot write `value` either.
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
        """Return an object equal to the original `value`, with the tensors of this snapshot."""
        self._pickle.seek(0)
        unpickler = pickle.Unpickler(self._pickle)
        unpickler.persistent_load = self.tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()

    def _copy_storages(self, buffer: HostBuffer) -> dict[int, torch.UntypedStorage]:
        """Copy each storage into `buffer`. Copies from a GPU are only queued.

        Raises: MemoryError: host memory is full."""
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in self.tensors)}
        sizes = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages.values()]
        ends = list(itertools.accumulate(sizes, initial=0))
        try:
            buffer.reserve(ends[-1], pin=any(s.device.type == "cuda" for s in storages.values()))
        except (OSError, MemoryError) as error:
            raise MemoryError(
                f"not enough host memory for the copy of a checkpoint: {error}. Set save_async to false; training then "
                "waits for saves, which need no copy"
            ) from error
        copies = {}
        for (key, storage), offset in zip(storages.items(), ends, strict=False):
            copy = buffer.part(offset, storage.nbytes())
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            copies[key] = copy.copy_(there, non_blocking=True).untyped_storage()
        return copies


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor` with another storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    copy = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    return copy.requires_grad_(tensor.requires_grad)
