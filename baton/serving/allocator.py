"""Settings of the C library's allocator."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# Above the 256 KiB by which asyncio reads a socket: to map a block for each read costs its pages.
_MAPPED_FROM_BYTES = 512 * 2**10
_KEPT_BYTES = 4 * 2**20
_NUM_ARENAS = 2


def return_large_blocks() -> None:
    """Makes malloc return each block of 512 KiB or more to the system when it is freed, and smaller
    ones when 4 MiB of them are free.

    By itself, glibc raises both bounds, to 32 and 64 MiB, after the first large message; then such
    blocks stay in its heaps, of which each of gRPC's threads would have one. Does nothing with
    another C library.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        libc.mallopt(_M_ARENA_MAX, _NUM_ARENAS)
