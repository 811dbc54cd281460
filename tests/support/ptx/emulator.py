"""Emulator of an H100's programs: executes the PTX of a launch and raises what its checks report.

What is checked: bounds and alignment of every access, shared memory that is read before it is
written, races between the warps of a program and between programs, data used before its
asynchronous copy was waited for, shared memory that is written while a wgmma reads it, tensors of
the launch before that a dependent launch does not wait for. What is not modelled: time, rounding
inside tensor cores, clusters, tcgen05, local memory.
"""

import ctypes
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch

from tests.support.ptx import library
from tests.support.ptx.driver import Launch, ptx_of

_REPORT_BYTES: Final = 20_000
_LOCATION: Final = re.compile(r"^\s*\.loc\b.*//\s*([\w./-]+:\d+)")
_LINE: Final = re.compile(r"\bline (\d+)")


Storages = dict[tuple[int, int], bool]
"""Address and bytes of tensors' memory; whether a launch wrote it."""


class EmulatorError(RuntimeError):
    """A launch broke a rule of the GPU; the text has one sentence a line."""


class _Parameter(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_int), ("size", ctypes.c_int))


class _Buffer(ctypes.Structure):
    _fields_ = tuple((n, ctypes.c_uint64) for n in ("base", "size", "before", "is_written"))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("num_warps", ctypes.c_int),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("is_watched", ctypes.c_int),
        ("copies_are_late", ctypes.c_int),
        ("is_dependent", ctypes.c_int),
        ("num_buffers", ctypes.c_int),
        ("most_instructions", ctypes.c_uint64),
        ("num_instructions", ctypes.c_uint64),
        ("parameters", ctypes.c_char_p),
        ("buffers", ctypes.POINTER(_Buffer)),
    )


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks beside those of bounds, and the order in which things happen.

    Attributes:
        is_watched: report races, and shared memory that is read before it is written.
        copies_are_late: tensor copies land when a warp waits for them; otherwise at any time.
        seed: of the order of programs, warps and copies; 0: programs in ascending order.
        most_instructions: of the warps of one program; a launch with more does not end.
    """

    is_watched: bool = True
    copies_are_late: bool = False
    seed: int = 1
    most_instructions: int = 50_000_000

    @classmethod
    def of_environment(cls) -> Self:
        """By PTX_CHECKS (`none`, `races`, `late`) and PTX_SEED."""
        chosen = os.environ.get("PTX_CHECKS", "races")
        if chosen not in ("none", "races", "late"):
            raise ValueError(f"PTX_CHECKS is {chosen!r}; expected none, races or late")
        seed = int(os.environ.get("PTX_SEED", "1"))
        return cls(is_watched=chosen != "none", copies_are_late=chosen == "late", seed=seed)


class Program:
    """Program of one kernel, parsed from PTX. Raises `EmulatorError` where the PTX is not known."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self._library = _library()
        error = ctypes.create_string_buffer(_REPORT_BYTES)
        self._program = self._library.ptx_load(ptx.encode(), error, _REPORT_BYTES)
        if not self._program:
            raise EmulatorError(error.value.decode())
        self._parameters = [
            self._library.ptx_parameter(self._program, i)
            for i in range(self._library.ptx_num_parameters(self._program))
        ]

    def run(
        self,
        launch: Launch,
        checks: Checks = Checks(),
        before: Storages | None = None,
    ) -> Storages:
        """Executes a launch; returns the storages that it may read, and whether it wrote them.

        Args:
            before: those of the launch before.
        """
        before = before or {}
        storages = sorted({storage_of(tensor) for tensor in launch.tensors})
        buffers = (_Buffer * max(len(storages), 1))(
            *(
                (*storage, 1 + before[storage] if storage in before else 0, 0)
                for storage in storages
            )
        )
        made = _Launch(
            launch.grid, launch.num_warps, launch.shared_bytes, checks.seed, checks.is_watched,
            checks.copies_are_late, launch.is_dependent, len(storages), checks.most_instructions, 0,
            self._packed(launch.arguments), buffers,
        )  # fmt: skip
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        if self._library.ptx_run(self._program, ctypes.byref(made), report, _REPORT_BYTES):
            raise EmulatorError(f"{launch.name}: {self._located(report.value.decode())}")
        written = [bool(buffer.is_written) for buffer in buffers]
        return dict(zip(storages, written[: len(storages)], strict=True))

    def _packed(self, arguments: Sequence[tuple[str, Any]]) -> bytes:
        if len(arguments) != len(self._parameters):
            raise EmulatorError(f"{len(arguments)} arguments of {len(self._parameters)} parameters")
        block = bytearray(self._library.ptx_parameter_bytes(self._program))
        for (kind, value), parameter in zip(arguments, self._parameters, strict=True):
            end = parameter.offset + parameter.size
            block[parameter.offset : end] = _bytes_of(kind, value, parameter.size)
        return bytes(block)

    def source_of(self, line: int) -> str | None:
        """Returns the place in the kernel's source, as in `linear.py:70`, of a line of the PTX."""
        before = reversed(self.ptx.splitlines()[:line])
        return next((found[1] for text in before if (found := _LOCATION.match(text))), None)

    def _located(self, report: str) -> str:
        """Adds the place in the source to each line of the PTX in a report."""
        return _LINE.sub(lambda match: f"{match[0]} ({self.source_of(int(match[1]))})", report)


@dataclass(slots=True)
class Emulator:
    """Machine that executes launches at once, one after the other.

    Attributes:
        launched: the last program that was launched, by name of the kernel.
        substitutes: programs that are executed in place of others.
    """

    checks: Checks = field(default_factory=Checks)
    launched: dict[str, Program] = field(default_factory=dict)
    substitutes: dict[Program, Program] = field(default_factory=dict)
    _before: Storages = field(default_factory=dict)

    @classmethod
    def of_environment(cls) -> Self:
        return cls(Checks.of_environment())

    def load(self, name: str, files: Mapping[str, str]) -> Program:
        return Program(ptx_of(files))

    def run(self, kernel: Program, launch: Launch) -> None:
        self.launched[launch.name] = kernel
        program = self.substitutes.get(kernel, kernel)
        self._before = program.run(launch, self.checks, self._before)


def _library() -> ctypes.CDLL:
    loaded = library.load()
    loaded.ptx_load.restype = ctypes.c_void_p
    loaded.ptx_load.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]
    loaded.ptx_parameter.restype = _Parameter
    loaded.ptx_parameter.argtypes = [ctypes.c_void_p, ctypes.c_int]
    for name in ("ptx_num_parameters", "ptx_parameter_bytes"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
    loaded.ptx_run.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    ]  # fmt: skip
    return loaded


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _bytes_of(kind: str, value: Any, size: int) -> bytes:
    if kind == "tensormap":
        return bytes(value)
    if kind in ("fp32", "f32"):
        return struct.pack("<f", value)
    if kind == "fp64":
        return struct.pack("<d", value)
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
