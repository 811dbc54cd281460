"""Memory in huge pages, which Linux gives to those who ask (its transparent huge pages).

Decoding reads every weight at each step, in order: a processor fetches ahead up to a page's end.
"""

import math
import mmap
from contextlib import suppress
from typing import Final

import torch

_PAGE: Final = 2 * 2**20  # bytes of a huge page, on x86-64 and most of ARM


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the host like `torch.empty`, in huge pages if it is of one or more, and
    the system has them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + num_bytes].view(dtype).view(shape)
