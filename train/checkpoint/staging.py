"""Copy what torch.save would write of an object, so that training may change its tensors meanwhile.

The copies lie in host memory that is kept from save to save (`HostBuffer`). Of tensors on a GPU it is pinned, so that
copies run at the speed of the bus and all of them are queued before one is waited for.
"""

from __future__ import annotations

import contextlib
import io
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
# Bytes of a file besides its tensors' and the pickle: headers and padding of each tensor's record, and of the whole.
RECORD_BYTES = 256
FILE_BYTES = 4096


class HostBuffer:
    """Host memory, mapped when it is first needed and kept while it has the right size.

    It is not torch's: the pinned allocator rounds sizes up to a power of two, and torch.save would write a part of a
    tensor as the whole of it.
    """

    def __init__(self) -> None:
        self.size = 0
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize | None = None

    def reserve(self, size: int, pin: bool) -> None:
        """Allocate `size` bytes; what was there before is lost. Raises OSError, MemoryError: the host has no room."""
        if size == self.size:
            return
        if self._unpin is not None:
            self._unpin()  # once
        self._memory, self.size = None, 0
        self._memory, self.size = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            self._touch()
            self._pin(torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr())

    def _touch(self) -> None:
        """Touch the pages in several threads. Pinning would do so one by one, which took 5 s for 9 GB."""
        share = -(-self.size // (TOUCHING_THREADS * PAGE)) * PAGE

        def touch(start: int) -> None:
            self.part(start, min(share, self.size - start))[::PAGE].zero_()

        with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
            list(pool.map(touch, range(0, self.size, share)))

    def _pin(self, pointer: int) -> None:
        cudart = torch.cuda.cudart()
        status = int(cudart.cudaHostRegister(pointer, self.size, 0))
        if status == 0:
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, pointer)
            self._unpin.atexit = False
        else:
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again, to the next kernel
                torch.ones(1, device="cuda")
            logger.warning(
                f"{self.size / 1e9:.1f} GB of host memory for saves in the background could not be pinned (CUDA error "
                f"{status}; ulimit -l may be low): copies to it will be several times slower"
            )

    def part(self, offset: int, size: int) -> torch.Tensor:
        """Return uint8 [size], `size` > 0: a view of the memory with a storage of its own."""
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)


class _Pickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not _is_plain(value) or value.__dict__:
            return None  # a Parameter, or a tensor of another class, is pickled as plain ones
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)  # keeps it alive, so that its id stays unique
        return place

    def reducer_override(self, value: Any) -> Any:
        """Keep the attributes that DeepSpeed gives some tensors: torch.save writes them too."""
        if _is_plain(value):
            return _with_attributes, (value.detach().requires_grad_(value.requires_grad), value.__dict__)
        return NotImplemented


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta


def _with_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    tensor.__dict__.update(attributes)
    return tensor


class Snapshot:
    """A copy of `value` in a buffer. Copies from a GPU are only queued: call torch.cuda.synchronize before they are
    used. Without a buffer the tensors are those of `value`, and must not change until they are written.

    Whole storages are copied, and once each, because that is what torch.save writes: the files are the same, byte for
    byte, with and without a buffer.

    Raises:
        OSError, MemoryError: the host has no room.
        PicklingError and the like: torch.save could not write it either.
    """

    def __init__(self, value: Any, buffer: HostBuffer | None):
        self._pickle = io.BytesIO()
        pickler = _Pickler(self._pickle)
        pickler.dump(value)
        self.tensors = pickler.tensors
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in self.tensors)}
        self.bytes = (
            self._pickle.tell()
            + sum(storage.nbytes() for storage in storages.values())
            + RECORD_BYTES * len(storages)
            + FILE_BYTES
        )
        if buffer is not None:
            copies = _copies(storages, buffer)
            self.tensors = [_over(copies[t.untyped_storage()._cdata], t) for t in self.tensors]

    def value(self) -> Any:
        """Return an object equal to the given one, with the tensors of this snapshot."""
        self._pickle.seek(0)
        unpickler = pickle.Unpickler(self._pickle)
        unpickler.persistent_load = self.tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()


def _copies(storages: dict[int, torch.UntypedStorage], buffer: HostBuffer) -> dict[int, torch.UntypedStorage]:
    """Return a copy in `buffer` of each storage; copies from a GPU are only queued."""
    offsets, size = {}, 0
    for key, storage in storages.items():
        offsets[key] = size
        size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    if size:
        buffer.reserve(size, pin=any(storage.device.type == "cuda" for storage in storages.values()))
    copies = {}
    for key, storage in storages.items():
        if storage.nbytes():
            copy = buffer.part(offsets[key], storage.nbytes())
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            copy.copy_(there, non_blocking=True)
        else:
            copy = torch.empty(0, dtype=torch.uint8)
        copies[key] = copy.untyped_storage()
    return copies


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on another storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    copy = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    return copy.requires_grad_(tensor.requires_grad)
