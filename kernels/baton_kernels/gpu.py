"""GPU limits, by which kernels are tiled, and the programs of a kernel that a GPU runs at once."""

from dataclasses import dataclass
from typing import Any, Final, Self

import torch

_KIB: Final = 1024
# Registers are allocated to warps of 32 threads, in units of so many.
_WARP: Final = 32
_REGISTER_UNIT: Final = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU as kernels see it.

    Attributes:
        capability: compute capability.
        shared_memory: bytes of shared memory that a thread block may have at most.
    """

    capability: tuple[int, int]
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Returns the GPU of a CUDA device; for a CPU, where Triton interprets, an H100."""
        if device.type != "cuda":
            return cls(H100.capability, H100.shared_memory)
        found: Any = torch.cuda.get_device_properties(device)  # its stub lacks some
        return cls((found.major, found.minor), found.shared_memory_per_block_optin)

    @property
    def accumulates_in_groups(self) -> bool:
        """Whether groups of warps multiply matrices together (wgmma, tcgen05), which leaves each
        warp registers for larger tiles. Consumer GPUs of 12.0 have the instructions of 8.x."""
        return (9, 0) <= self.capability < (12, 0)

    @property
    def has_tma(self) -> bool:
        """Whether it copies boxes of tensors to shared memory by descriptors."""
        return self.capability >= (9, 0)


H100: Final = Gpu((9, 0), 227 * _KIB)
# The GPUs that kernels are compiled for ahead of time, by the number in "sm_90".
GPUS: Final = {
    80: Gpu((8, 0), 163 * _KIB),
    86: Gpu((8, 6), 99 * _KIB),
    89: Gpu((8, 9), 99 * _KIB),
    90: H100,
    100: Gpu((10, 0), 227 * _KIB),
    120: Gpu((12, 0), 99 * _KIB),
}
# The first that converts to and from fp8 (e4m3).
FP8_CAPABILITY: Final = (8, 9)
FP8_TARGETS: Final = tuple(n for n, gpu in GPUS.items() if gpu.capability >= FP8_CAPABILITY)
# From 9.0 on the system reserves these bytes of each thread block; of all, on a multiprocessor.
RESERVED: Final = 1024


def resident_programs(kernel: Any, device: torch.device) -> int:
    """Returns the programs of a kernel, which was launched there, that the device runs at once."""
    found = torch.cuda.get_device_properties(device)
    metadata = kernel.metadata
    each = occupancy(kernel.n_regs, metadata.num_warps, metadata.shared, found)
    return each * found.multi_processor_count


def occupancy(num_registers: int, num_warps: int, shared_memory: int, properties: Any) -> int:
    """Returns the programs of a kernel that one multiprocessor runs at once, at least 1.

    Args:
        num_registers: registers per thread.
        shared_memory: bytes per program.
        properties: the device's, as torch gives them.
    """
    of_warp = -(-num_registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    warps = min(
        properties.regs_per_multiprocessor // of_warp,
        properties.max_threads_per_multi_processor // _WARP,
    )
    by_shared = properties.shared_memory_per_multiprocessor // (shared_memory + RESERVED)
    return max(1, int(min(warps // num_warps, by_shared)))
