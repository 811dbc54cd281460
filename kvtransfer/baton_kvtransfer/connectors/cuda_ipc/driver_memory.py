"""CUDA IPC memory through the CUDA driver API, for GPU memory shared between processes.

The driver is called directly because torch's CUDA IPC counts references in named files, which
remain after a process is killed.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from baton.engine.cache.kv_pool import KvPool

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class DriverMemory:
    """`CudaMemory` of this process. Does not initialize CUDA before its first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._opened: dict[int, torch.device] = {}

    @cached_property
    def _driver(self) -> Any:
        try:
            return ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no CUDA driver: {error}") from error

    def device_uuid(self, device: torch.device) -> bytes:
        uuid: Any = torch.cuda.get_device_properties(device).uuid
        return bytes.fromhex(str(uuid).removeprefix("GPU-").replace("-", ""))

    def visible(self) -> dict[bytes, torch.device]:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return {self.device_uuid(device): device for device in devices}

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        own = torch.device("cuda", device.index or 0)
        return own == other or torch.cuda.can_device_access_peer(own, other)

    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        handle, base = _Handle(), ctypes.c_uint64()
        with _context(memory.device):
            address = ctypes.c_uint64(memory.data_ptr())
            self._do("cuMemGetAddressRange_v2", ctypes.byref(base), None, address)
            self._do("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), memory.data_ptr() - base.value

    def open(self, handle: bytes, device: torch.device) -> int:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        with _context(device):
            opened = _Handle.from_buffer_copy(handle)
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._do("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, flags)
        self._opened[address.value] = device
        return address.value

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.as_tensor(_Array(address, num_bytes), device=device)

    def close(self, address: int) -> None:
        with _context(self._opened.pop(address)):
            self._do("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(
        self, pool: KvPool, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        stream = self._stream(pool.device)
        with torch.cuda.device(pool.device), torch.cuda.stream(stream):
            pool.copy_content(sources, targets, origin)
        stream.synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _do(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} of the CUDA driver gave error {result}")


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Makes the device's context current in this thread, as the driver requires."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # a thread's first CUDA call makes the context current
        yield


class _Array:
    """Array of device bytes that exposes `__cuda_array_interface__`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
