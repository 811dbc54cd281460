"""Triton driver for an H100 that is not there: kernels are compiled for sm_90 and run by a machine.

    install(Compiler())    compiles what is launched, and runs nothing
    install(Emulator())    executes the PTX on the CPU (`tests.support.ptx.emulator`)

Install it before the first launch. Specialisation, cache keys and TMA descriptors are Triton's own.
It knows nothing about PTX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from baton_kernels.gpu import H100
from tests.support.ptx.tensor_map import TensorMap

_TARGET: Final = GPUTarget("cuda", 90, 32)
_PROPERTIES: Final = {
    "max_shared_mem": H100.shared_memory,
    "max_num_regs": 65536,
    "multiprocessor_count": 132,
    "warpSize": 32,
    "sm_clock_rate": 1,
    "mem_clock_rate": 1,
    "mem_bus_width": 1,
}
# Of a compiled kernel, which Triton compares with its limits; `check-kernels` counts registers.
_REGISTERS, _SPILLS, _MOST_THREADS = 64, 0, 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a kernel.

    Attributes:
        grid: number of programs in each dimension.
        shared_bytes: shared memory of a program.
        is_dependent: it may begin before the launch before it has ended (programmatic dependent
            launch).
        arguments: (Triton's type, value) of each parameter; of a pointer the address, of a tensor
            map its bytes with the type "tensormap".
        tensors: those that the arguments point to.
    """

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    is_dependent: bool
    arguments: tuple[tuple[str, Any], ...]
    tensors: tuple[torch.Tensor, ...]


class Machine(Protocol):
    """Device that runs launches."""

    def load(self, name: str, files: Mapping[str, str]) -> Any:
        """Returns a kernel. `files`: paths in Triton's cache by name, as in `split_kernel.ptx`."""

    def run(self, kernel: Any, launch: Launch) -> None: ...


class Compiler:
    """Machine that runs nothing: a launch fills Triton's cache and leaves its outputs alone."""

    def load(self, name: str, files: Mapping[str, str]) -> None:
        return None

    def run(self, kernel: None, launch: Launch) -> None:
        pass


class _Utils:
    """Functions that Triton calls on a device; 3.6 and 3.7 name those for TMA differently."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._files: Mapping[str, str] = {}

    def note_files(
        self, module: Any, function: Any, name: str, files: Mapping[str, str], key: str
    ) -> None:
        """Triton's hook before it loads a kernel."""
        self._files = files

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        kernel = self._machine.load(name, self._files)
        return self, kernel, _REGISTERS, _SPILLS, _MOST_THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        return _PROPERTIES


class _Launcher:
    """Launcher of one kernel: gives each parameter of the PTX its value."""

    def __init__(self, machine: Machine, source: Any, metadata: Any) -> None:
        assert not metadata.global_scratch_size, "kernels have no scratch memory"
        self._machine = machine
        self._types = tuple(source.signature.values())
        self._metadata = metadata
        self._descriptions = tuple(getattr(metadata, "tensordesc_meta", None) or ())

    def __call__(
        self, x: int, y: int, z: int, stream: int, kernel: Any, packed: Any, named: Any,
        enter: Any, leave: Any, *values: Any,
    ) -> None:  # fmt: skip
        if not x * y * z:
            return
        meta, tensors = self._metadata, list[torch.Tensor]()
        arguments = tuple(self._arguments(values, tensors))
        launch = Launch(
            meta.name, (x, y, z), meta.num_warps, meta.shared, bool(meta.launch_pdl), arguments,
            tuple(tensors),
        )  # fmt: skip
        self._machine.run(kernel, launch)

    def _arguments(self, values: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        descriptions = iter(self._descriptions)
        for kind, value in zip(self._types, values, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                tensors.append(value.base)
                yield "tensormap", bytes(TensorMap.of(value, next(descriptions)))
                yield from (("i32", size) for size in value.shape)
                yield from (("i64", stride) for stride in value.strides)
            elif not kind.startswith("*"):
                yield kind, value
            elif value is None:
                yield "i64", 0
            else:
                tensors.append(value)
                yield "i64", value.data_ptr()
        yield from (("i64", 0), ("i64", 0))  # scratch memory of the kernel and of a profiler


class PtxDriver(DriverBase):
    """Driver whose device is a machine. Its tensors are on the CPU, or on torch's `meta` device if
    the machine runs nothing."""

    def __init__(self, machine: Machine) -> None:
        self.utils = _Utils(machine)
        self.launcher_cls = lambda source, metadata: _Launcher(machine, source, metadata)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return H100.capability

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(kind))

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("an emulated GPU has no clock")


def install(machine: Machine) -> None:
    """Makes `machine` the device of every kernel of this process that Triton compiles."""
    driver = PtxDriver(machine)
    hooks = triton.knobs.runtime.kernel_load_start_hook
    hooks.add(driver.utils.note_files)
    triton.runtime.driver.set_active(driver)


def ptx_of(files: Mapping[str, str]) -> str:
    """Returns the PTX of a compilation."""
    (path,) = (path for name, path in files.items() if Path(name).suffix == ".ptx")
    return Path(path).read_text()
