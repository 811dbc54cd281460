"""CUDA IPC on a CPU: handles of shared memory, which other processes open by the descriptor that
they name. Engines with a process of their own then share their pools as on a GPU.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.core.process import pool_memory
from baton.engine.executor.cache.cuda_ipc import HANDLE_BYTES, CudaDriver, IpcPlace


class HostIpc(CudaDriver):
    """`CudaIpc` of memory in memfds; any other memory is exported as a copy.

    Attributes:
        opened: the allocations that this process has open, by address.
        problems: errors of "export", "open" and "view".
        shows_content: whether a view has what the allocation has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[int, mmap.mmap] = {}
        self.problems: dict[str, str] = {}
        self.shows_content = True

    def _check(self, call: str) -> None:
        if call in self.problems:
            raise RuntimeError(self.problems[call])

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        self._check("view")
        content = super().view(address, num_bytes, device)
        return content if self.shows_content else torch.zeros_like(content)

    def export(self, memory: torch.Tensor) -> IpcPlace:
        self._check("export")
        found = _memfd_of(memory.data_ptr())
        if found is None:
            found = os.memfd_create("copy"), 0
            os.write(found[0], memory.numpy().tobytes())
        descriptor, offset = found
        return IpcPlace(f"{os.getpid()} {descriptor}".encode().ljust(HANDLE_BYTES), offset)

    def open(self, handle: bytes, device: torch.device) -> int:
        self._check("open")
        pid, descriptor = handle.decode().split()
        try:
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"no such handle: {error}") from error
        mapped = mmap.mmap(opened, os.fstat(opened).st_size)
        os.close(opened)
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self.opened[address] = mapped
        return address

    def close(self, address: int) -> None:
        del self.opened[address]


def install(put: Callable[[object, str, object], None] = setattr) -> HostIpc:
    """Makes engines of this process, and of those forked from it, share pools by handle. Returns
    what opens them here. `put` sets attributes, such as `MonkeyPatch.setattr`."""
    ipc = HostIpc()
    put(pool_memory, "is_opened_by_handle", lambda _device: True)
    put(pool_memory, "cuda_ipc", lambda: ipc)
    return ipc


def _memfd_of(address: int) -> tuple[int, int] | None:
    """Returns the descriptor of the memfd that this process has mapped at an address, and the
    offset there; None if it is other memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end and inode != "0":
            for descriptor in (int(path.name) for path in Path("/proc/self/fd").iterdir()):
                try:
                    if os.fstat(descriptor).st_ino == int(inode):
                        return descriptor, int(offset, 16) + address - start
                except OSError:  # that of the listing itself
                    continue
    return None
