"""Ahead-of-time compilation of every kernel variant for every target, without a GPU.

    python -m baton_kernels.compile

prints registers, spills and shared memory of each, and fails with a sentence if a variant spills,
needs more shared memory than a thread block may have, lacks the matrix or TMA instructions it is
meant to use, or may overwrite what a wgmma still reads. It reads all of this from the compiled
files.
"""

import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton_kernels.dependent_launch import FIRST_CAPABILITY
from baton_kernels.gpu import GPUS, RESERVED
from baton_kernels.variant import Variant
from baton_kernels.wgmma_barriers import unordered_writes

# Each has `VARIANTS`, and `FP_FUSION`: whether multiplication and addition may be fused, as in its
# launches.
MODULES: Final = (
    "baton_kernels.rows.activation",
    "baton_kernels.attention.variants",
    "baton_kernels.sampling.bitmask",
    "baton_kernels.block_copy",
    "baton_kernels.rows.cache_write",
    "baton_kernels.rows.expert_choice",
    "baton_kernels.rows.experts",
    "baton_kernels.rows.linear",
    "baton_kernels.rows.norm",
    "baton_kernels.sampling.penalties",
    "baton_kernels.rows.rotary",
    "baton_kernels.sampling.row_summary",
    "baton_kernels.sampling.sampling",
    "baton_kernels.sampling.search",
    "baton_kernels.sampling.token_rules",
)
# From here on `cuobjdump` counts the bytes that the system reserves, which no limit does.
_COUNTS_RESERVED: Final = 90
_RESOURCES: Final = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WARP_MMA: Final = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async)\S*\.bf16\b")
_TENSOR_CORE_MMA: Final = re.compile(r"\btcgen05\.mma\S*kind::f16\b")
_TMA: Final = "cp.async.bulk.tensor"
_WAIT: Final = "griddepcontrol.wait"
# Accesses to global memory, and branches.
_ACCESS: Final = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?:\w+[.:])*global|cp\.async|bra)\b")


@dataclass(frozen=True, slots=True)
class Job:
    """Compile job: a variant, by its index in a module, and its target."""

    module: str
    index: int
    capability: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Registers and memory of a compiled variant.

    Attributes:
        registers: registers per thread.
        spilled_bytes: local memory per thread in bytes, which is in device memory.
        static_shared, dynamic_shared: bytes of shared memory per thread block, the first with those
            that the system reserves.
        faults: reasons for which it must not be used, in sentences.
    """

    registers: int
    spilled_bytes: int
    static_shared: int
    dynamic_shared: int
    faults: tuple[str, ...]


def variants(module: str) -> tuple[Variant, ...]:
    found: tuple[Variant, ...] = importlib.import_module(module).VARIANTS
    return found


def compile_variant(variant: Variant, capability: int, fp_fusion: bool) -> Any:
    """Returns Triton's compiled kernel. As in launches, pointers and strides are multiples of 16,
    and so are arguments whose signature has Triton's mark, as in `i32:16`; kernels of a dependent
    launch wait where GPUs have it."""
    constants = dict(variant.constants)
    if "IS_DEPENDENT" in variant.kernel.arg_names:
        constants["IS_DEPENDENT"] = divmod(capability, 10) >= FIRST_CAPABILITY
    types = variant.signature | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(variant.kernel.arg_names)
        if types[name].startswith("*") or types[name].endswith(":16") or "stride" in name
    }
    signature = {name: kind.removesuffix(":16") for name, kind in types.items()}
    return triton.compile(
        ASTSource(variant.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "maxnreg": variant.max_registers,
            "enable_fp_fusion": fp_fusion,
            "launch_pdl": constants.get("IS_DEPENDENT", False),
        },
    )


def inspect(variant: Variant, capability: int, fp_fusion: bool) -> Usage:
    """Compiles one variant for one target and returns its resource usage and faults."""
    compiled = compile_variant(variant, capability, fp_fusion)
    registers, stack, static, local = _resources(compiled.asm["cubin"])
    dynamic = compiled.metadata.shared
    spilled = stack + local
    faults = list(_faults(capability, spilled, static, dynamic))
    if variant.needs_mma == "bf16" and not has_bf16_mma(compiled.asm["ptx"], compiled.asm["ttgir"]):
        faults.append("has no bf16 matrix instruction in its PTX, so it does not use tensor cores")
    if variant.needs_tma and _TMA not in compiled.asm["ptx"]:
        faults.append(f"has no {_TMA} in its PTX, so it does not copy tiles by TMA")
    is_over_fp8 = "*fp8e4nv" in variant.signature.values()
    if writes := unordered_writes(compiled.asm["ptx"], copies_are_read=not is_over_fp8):
        faults.append(
            f"writes shared memory in line {writes[0]} of its PTX that a wgmma of other warps may "
            "still read: compile it with a Triton that has triton-lang/triton #11056"
        )
    if compiled.metadata.launch_pdl and not waits_first(compiled.asm["ptx"]):
        faults.append("accesses memory before it has waited for the kernel before it")
    return Usage(registers, spilled, static, dynamic, tuple(faults))


def run(job: Job) -> Usage:
    """Judges the job's variant, in any process."""
    variant = variants(job.module)[job.index]
    return inspect(variant, job.capability, importlib.import_module(job.module).FP_FUSION)


def waits_first(ptx: str) -> bool:
    """Returns whether all threads wait for the kernel before, and access no memory till then."""
    access = _ACCESS.search(ptx)
    return access is not None and 0 <= ptx.find(_WAIT) < access.start()


def has_bf16_mma(ptx: str, ttgir: str) -> bool:
    """Returns whether the tensor cores compute in bf16. On Blackwell bf16 and fp16 have the same
    instruction and are told apart in the TTGIR."""
    if _WARP_MMA.search(ptx):
        return True
    lines = [line for line in ttgir.splitlines() if "tc_gen5_mma" in line]
    return bool(_TENSOR_CORE_MMA.search(ptx)) and any("xbf16" in line for line in lines)


def _resources(cubin: bytes) -> tuple[int, int, int, int]:
    """Returns registers, and bytes of stack, static shared and local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = _RESOURCES.search(report)
    assert found is not None, f"cuobjdump prints something new: {report}"
    registers, stack, static, local = map(int, found.groups())
    return registers, stack, static, local


def _faults(capability: int, spilled: int, static: int, dynamic: int) -> Iterator[str]:
    if spilled:
        yield (
            f"spills {spilled} bytes of registers per thread: give it smaller tiles or more warps"
        )
    shared = static + dynamic - RESERVED * (capability >= _COUNTS_RESERVED)
    limit = GPUS[capability].shared_memory
    if shared > limit:
        yield (
            f"takes {shared} bytes of shared memory, {shared - limit} more than sm_{capability} "
            "has: give it smaller tiles or fewer stages"
        )


def main() -> int:
    names = {
        Job(module, index, capability): variant.name
        for module in MODULES
        for index, variant in enumerate(variants(module))
        for capability in variant.targets
    }
    spawn = multiprocessing.get_context("spawn")
    num_processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(num_processes, mp_context=spawn) as processes:
        usages = dict(zip(names, processes.map(run, names, chunksize=4), strict=True))
    return report(names, usages)


def report(names: dict[Job, str], usages: dict[Job, Usage]) -> int:
    """Prints the table and then the faults; returns the exit status."""
    width = max(map(len, names.values()))
    print(f"{'kernel':{width}}  target  registers  spills  shared: static  dynamic", flush=True)
    faults = []
    for job, usage in usages.items():
        name = names[job]
        print(
            f"{name:{width}}  sm_{job.capability:<4} {usage.registers:9} {usage.spilled_bytes:7} "
            f"{usage.static_shared:15} {usage.dynamic_shared:8}"
        )
        faults += [f"{name} on sm_{job.capability} {fault}." for fault in usage.faults]
    print(f"{len(usages)} compiled by Triton {triton.__version__}, {len(faults)} at fault")
    print("\n".join(faults), file=sys.stderr, end="\n" * bool(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
