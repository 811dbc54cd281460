"""Allocator settings of a worker process, so that memory of messages and tensors is reused."""

import ctypes

# glibc's parameters, and the values. What is smaller than the first comes from the heap, whose top
# is given back to the system only beyond the second.
_MMAP_THRESHOLD, _HEAP_BELOW = -3, 32 * 2**20
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 128 * 2**20


def keep_freed_memory() -> bool:
    """Has the allocator keep what is freed, up to 128 MiB, for what comes next.

    Otherwise each message of 1 MiB is made of fresh pages, and it takes longer to get those zeroed
    from the system than to fill them. False where the C library is another.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _HEAP_BELOW) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
