"""Settings of the C library's allocator."""

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MAPPED_FROM_BYTES = 64 * 2**10
_NUM_ARENAS = 2


def return_large_blocks() -> None:
    """Makes malloc return each block of 64 KiB or more to the system when it is freed.

    By itself, glibc raises that bound to 32 MiB after the first large message; then such blocks
    stay in its heaps, of which each of gRPC's threads would have one. Does nothing with another C
    library.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)
