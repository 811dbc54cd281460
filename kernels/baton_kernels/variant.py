"""Variant of a kernel for ahead-of-time compilation."""

from dataclasses import dataclass
from typing import Any

from baton_kernels.gpu import GPUS


@dataclass(frozen=True, slots=True)
class Variant:
    """Kernel with the types and constants for which it is compiled."""

    name: str
    kernel: Any  # the triton.jit function
    signature: dict[str, str]  # name of an argument -> Triton type ("*bf16", "i32")
    constants: dict[str, object]  # constexpr arguments, which `signature` need not have
    num_warps: int
    num_stages: int
    targets: tuple[int, ...] = tuple(GPUS)  # GPUs that launch it
    needs_mma: str | None = None  # "bf16": the PTX must contain bf16 MMA
    needs_tma: bool = False  # the PTX must contain copies by tensor descriptors
    max_registers: int | None = None  # per thread; None leaves it to the assembler
