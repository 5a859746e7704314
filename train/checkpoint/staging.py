"""Copy tensors to host memory, so that training can change the tensors while a checkpoint is written.

The host memory (`HostBuffer`) is allocated once and reused for every save. For GPU tensors the memory is pinned. Copies
then run at the full speed of the bus, and all copies are queued before waiting for the first one.
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

ALIGNMENT = 512  # in bytes; GPUs copy aligned memory faster
PAGE, TOUCHING_THREADS = 4096, 8


class HostBuffer:
    """A host memory buffer that is allocated on first use, and reused while the size does not change.

    The memory is not allocated by torch. torch's pinned memory allocator rounds sizes up to a power of two, and
    torch.save writes the whole storage of a tensor even if the tensor is only a part of the storage.
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
            self._touch()
            self._pin(torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr())

    def _touch(self) -> None:
        """Touch all memory pages in several threads before the memory is pinned.

        Pinning would touch them in a single thread, which took 5 s for 9 GB.
        """
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
        # Clear the error, which CUDA reports again at the next kernel.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        logger.warning(
            f"{self.size / 1e9:.1f} GB of host memory for background saves could not be pinned (CUDA error {status}). "
            "Copies from the GPU will be several times slower. Increase the limit on locked memory (ulimit -l)"
        )

    def part(self, offset: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor of `size` elements that has its own storage and uses the buffer from byte `offset`."""
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

    Copies from a GPU are asynchronous: call torch.cuda.synchronize before using them. Without a buffer, the snapshot
    refers to the original tensors, which must not change until they are written.

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
        """Return a copy of the original object that contains the tensors of this snapshot."""
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
