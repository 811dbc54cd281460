"""Allocator settings of a worker process, so that memory of messages and tensors is reused."""

import ctypes

# glibc's parameters and values. Allocations below the first come from the heap, whose top is
# returned to the system only beyond the second.
_MMAP_THRESHOLD, _HEAP_BELOW = -3, 32 * 2**20
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 128 * 2**20


def keep_freed_memory() -> bool:
    """Makes the allocator reuse freed memory, up to 128 MiB.

    Otherwise each message of 1 MiB is made of fresh pages, and the system takes longer to zero
    those than the process to fill them. Returns False if the C library has no `mallopt`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _HEAP_BELOW) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
