"""Memory settings of a worker process: its allocator and the caches of its libraries."""

import ctypes
import os

# glibc's parameters and values. Allocations below the first come from the heap, whose top is
# returned to the system only beyond the second.
_MMAP_THRESHOLD, _HEAP_BELOW = -3, 32 * 2**20
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 128 * 2**20
# oneDNN keeps a compiled primitive for each shape of each product, a prompt's length being one
# dimension, and torch an object beside it: about 0.4 MB together, 1,024 of them unless told less.
_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


def bound_primitive_caches() -> None:
    """Bounds the memory that CPU products of ever new shapes take to about 0.1 GB. Call before the
    first product. The environment has precedence."""
    for name, capacity in _PRIMITIVES.items():
        os.environ.setdefault(name, capacity)


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
