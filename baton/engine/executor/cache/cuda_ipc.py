"""CUDA IPC: GPU memory that another process of the host opens, through the CUDA driver API.

The driver is called directly because torch's CUDA IPC counts references in named files, which
remain after a process is killed.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from baton.engine.executor.device import current_context

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class IpcPlace:
    """Place of GPU memory, for other processes of the host.

    Attributes:
        handle: IPC handle of the device's allocation that has it.
        offset: its offset in that allocation, in bytes.
    """

    handle: bytes
    offset: int


class CudaIpc(Protocol):
    """CUDA IPC interface. Every call may raise `RuntimeError`."""

    def device_uuid(self, device: torch.device) -> bytes:
        """Returns the UUID of the GPU, which is independent of host and device number."""

    def visible(self) -> dict[bytes, torch.device]:
        """Returns the GPUs that this process sees, by UUID."""

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        """Returns whether `device` can read the memory of `other`."""

    def export(self, memory: torch.Tensor) -> IpcPlace:
        """Returns the place of this process's `memory`, once all work on it is done."""

    def open(self, handle: bytes, device: torch.device) -> int:
        """Maps another process's allocation into the context of `device`, this process's GPU, which
        then reads it over the link between the GPUs. Returns its address here, which is the same
        for all that have it open; each has to `close` it."""

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Returns a view of the bytes at an address that is mapped for `device`."""

    def close(self, address: int) -> None: ...


class MappedMemory:
    """GPU memory of another process, mapped into this one until `close`.

    Attributes:
        place: its place, by which further processes open it. This process could not export it.
        content: the bytes; valid until `close`.
    """

    def __init__(
        self, place: IpcPlace, num_bytes: int, device: torch.device, cuda: CudaIpc
    ) -> None:
        """Maps memory of the GPU that `device` names here. Raises `RuntimeError` if it cannot."""
        self.place = place
        self._cuda = cuda
        address = cuda.open(place.handle, device)
        self._address: int | None = address
        try:
            self.content = cuda.view(address + place.offset, num_bytes, device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the memory. Idempotent. Raises `RuntimeError` if the device is lost."""
        address, self._address = self._address, None
        if address is not None:
            self._cuda.close(address)


@dataclass(slots=True)
class _Mapping:
    """Allocation of another process, which the driver maps once for all that have it open."""

    device: torch.device
    num_users: int = 0


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def load_driver(library: str = "libcuda.so.1") -> Any:
    """Loads the CUDA driver's library. Raises `RuntimeError` where there is none."""
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise RuntimeError(f"no CUDA driver: {error}") from error


class CudaDriver:
    """`CudaIpc` of this process. Does not initialize CUDA before its first use."""

    def __init__(
        self,
        load: Callable[[], Any] = load_driver,
        context: Callable[[torch.device], AbstractContextManager[None]] = current_context,
    ) -> None:
        """`load` returns the driver's library, on first use. `context` makes a device's context
        current for calls of it."""
        self._load = load
        self._context = context
        self._lock = threading.Lock()
        self._opened: dict[int, _Mapping] = {}

    @property
    def num_opened(self) -> int:
        """Number of allocations of other processes that are open here."""
        return len(self._opened)

    @cached_property
    def _driver(self) -> Any:
        return self._load()

    def device_uuid(self, device: torch.device) -> bytes:
        uuid: Any = torch.cuda.get_device_properties(device).uuid
        return bytes.fromhex(str(uuid).removeprefix("GPU-").replace("-", ""))

    def visible(self) -> dict[bytes, torch.device]:
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return {self.device_uuid(device): device for device in devices}

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        own = torch.device("cuda", device.index or 0)
        return own == other or torch.cuda.can_device_access_peer(own, other)

    def export(self, memory: torch.Tensor) -> IpcPlace:
        handle, base = _Handle(), ctypes.c_uint64()
        with self._context(memory.device):
            torch.cuda.synchronize(memory.device)
            address = ctypes.c_uint64(memory.data_ptr())
            self._do("cuMemGetAddressRange_v2", ctypes.byref(base), None, address)
            self._do("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return IpcPlace(bytes(handle), memory.data_ptr() - base.value)

    def open(self, handle: bytes, device: torch.device) -> int:
        if len(handle) != HANDLE_BYTES:
            raise RuntimeError(f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        with self._context(device):
            opened = _Handle.from_buffer_copy(handle)
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._do("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, flags)
            with self._lock:
                self._opened.setdefault(address.value, _Mapping(device)).num_users += 1
        return address.value

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        # Names the device itself: torch would ask the driver, which may say the source's.
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def close(self, address: int) -> None:
        with self._lock:
            mapping = self._opened[address]
            mapping.num_users -= 1
            if not mapping.num_users:
                del self._opened[address]
        with self._context(mapping.device):
            self._do("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _do(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} of the CUDA driver gave error {result}")
