"""Memory of this process that others of its host may be let read. Knows nothing of its content.

It is a sealed memfd: a file without a name that lives as long as somebody has it open or mapped, so
that nothing is left behind however a process ends. The seals keep it at its size, lest a reader
fault, and keep it unwritable for all but its maker.
"""

import fcntl
import mmap
import os

import numpy as np
import torch

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python 3.11 has no name for it
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS = SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Zeroed bytes that this process may write.

    Attributes:
        fd: what to hand to a reader. Open until `close`, which also the garbage collector calls.
        content: the bytes, valid for as long as somebody refers to them.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        """Raises `OSError` where the system has no such memory, or none left."""
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            mapped = mmap.mmap(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise
        self.content: torch.Tensor = torch.frombuffer(mapped, dtype=torch.uint8)

    def close(self) -> None:
        """Hands out no more; what is mapped stays. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def map_readonly(fd: int, num_bytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Another process's `SharedMemory`, for reading. It is mapped while the array is referred to.

    Raises `ValueError` unless it is exactly so long and sealed to stay so, `OSError` where it
    cannot be mapped.
    """
    size = os.fstat(fd).st_size
    if size != num_bytes:
        raise ValueError(f"the memory has {size} bytes where {num_bytes} were announced")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS:
        raise ValueError("the memory is not sealed: its size could change under a reader")
    return np.frombuffer(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), dtype=np.uint8)
