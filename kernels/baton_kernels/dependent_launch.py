"""Programmatic dependent launch: a kernel is on the GPU before the one before it has ended.

The small kernels of a layer take about as long as their launches, so they begin theirs while the
kernel before them runs. Each waits first of all, in every program: so it reads and writes nothing
before that kernel has ended, which by then has waited for the one before it.
"""

import functools
from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import Gpu
from baton_kernels.launch import INTERPRETED

FIRST_CAPABILITY: Final = (9, 0)


@triton.jit
def wait_for_kernel_before(IS_DEPENDENT: tl.constexpr):
    """Waits until the kernel before has ended and its writes are seen, and lets the next one come.
    Call it before any other access to memory, and in every program."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def dependent_launch(device: torch.device) -> Mapping[str, bool]:
    """Returns the arguments of a launch on a device of a kernel that waits: its constant, and
    Triton's option."""
    is_there = Gpu.of(device).capability >= FIRST_CAPABILITY and not INTERPRETED.value
    return {"IS_DEPENDENT": is_there, "launch_pdl": is_there}
