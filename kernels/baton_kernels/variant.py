"""Variant of a kernel for ahead-of-time compilation."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """Kernel with the types and constants for which it is compiled."""

    name: str
    kernel: Any  # the triton.jit function
    signature: dict[str, str]  # name of an argument -> Triton type ("*bf16", "i32")
    constants: dict[str, object]  # constexpr arguments, which `signature` need not have
    num_warps: int
    num_stages: int
    least_capability: int = 80  # fp8 e4m3 needs 90
    needs_mma: str | None = None  # "bf16": the PTX must contain bf16 MMA
    max_registers: int | None = None  # per thread; None leaves it to the assembler
