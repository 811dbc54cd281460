"""Small kernels in PTX, for tests of the machine that executes them."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.ptx.driver import Launch
from tests.support.ptx.emulator import Checks, Program, storage_of

_KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({parameters}
)
.reqntid {num_threads}
{{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<128>;
  .reg .b64 %rd<32>;
{loads}
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
{body}
  ret;
}}
"""


def program(body: str, num_arguments: int, num_warps: int = 1) -> Program:
    """Returns a kernel of pointers: argument i is in %rd<i>, the thread in %r0, the program in
    %r1. In the body `;` ends a statement; one may go on over lines."""
    names = range(num_arguments)
    parameters = ",".join(f"\n  .param .u64 .ptr .global .align 1 kernel_param_{i}" for i in names)
    loads = "\n".join(f"  ld.param.b64 %rd{i}, [kernel_param_{i}];" for i in names)
    text = _KERNEL.format(parameters=parameters, num_threads=32 * num_warps, loads=loads, body=body)
    return Program(text)


def run(
    body: str,
    *tensors: torch.Tensor,
    num_warps: int = 1,
    num_programs: int = 1,
    shared_bytes: int = 0,
    is_dependent: bool = False,
    arguments: Sequence[tuple[str, Any]] | None = None,
    checks: Checks = Checks(),  # noqa: B008
    written_before: Sequence[torch.Tensor] = (),
    read_before: Sequence[torch.Tensor] = (),
) -> None:
    """Executes a kernel over tensors. `arguments`: those of its parameters, if not the tensors'
    addresses; `written_before`, `read_before`: tensors of the launch before."""
    given = arguments or [("i64", tensor.data_ptr()) for tensor in tensors]
    launch = Launch(
        "kernel", (num_programs, 1, 1), num_warps, shared_bytes, is_dependent, tuple(given), tensors
    )
    before = {storage_of(x): False for x in read_before}
    before |= {storage_of(x): True for x in written_before}
    program(body, len(given), num_warps).run(launch, checks, before)
