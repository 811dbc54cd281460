"""Shared memory of this process that others on its host may map for reading. Knows no content.

It is a sealed memfd: a file without a name that exists until it is neither open nor mapped, so that
nothing is left however a process ends. The seals fix its size, so that no reader faults; those that
are set before a reader gets the descriptor deny writes to all that have not mapped it by then.
"""

import fcntl
import mmap
import os
from typing import Self

import numpy as np
import torch

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_WRITE_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Shared memory, zeroed at first, that this process may write.

    Attributes:
        fd: file descriptor for readers. Open until `close`, which the garbage collector calls too.
        content: the bytes, valid while a reference to them exists.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Maps memory of another process that is not sealed against writers yet, by a descriptor
        that belongs to this object from now on."""
        self.fd = fd
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            mapped = mmap.mmap(fd, num_bytes)
        except BaseException:
            self.close()
            raise
        self.content: torch.Tensor = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def allocate(cls, name: str, num_bytes: int) -> Self:
        """Allocates memory. Raises `OSError` if the system has no such memory, or none left."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, num_bytes)

    def seal(self) -> None:
        """Denies writes to processes that have not mapped the memory by now. Idempotent."""
        if not fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _WRITE_SEALS)

    def close(self) -> None:
        """Closes `fd` to new readers; existing mappings stay. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def map_readonly(fd: int, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Maps another process's `SharedMemory` for reading, until the array is released.

    Raises `ValueError` unless it is exactly `num_bytes` long and sealed at that size, `OSError` if
    it cannot be mapped.
    """
    size = os.fstat(fd).st_size
    if size != num_bytes:
        raise ValueError(f"the memory has {size} bytes where {num_bytes} were announced")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
        raise ValueError("the memory is not sealed: its size could change under a reader")
    return np.frombuffer(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), dtype=np.uint8)
