"""Device stream: work in the order of its launch, and the moment from which the host may use it.

On a GPU work runs behind the thread that launches it. What the host does because of a step (tell
another process that blocks are written, free memory that a kernel reads, read tokens) waits for the
event behind the step's last operation, and for nothing that was launched after it.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt
import torch

Upload = Callable[["npt.NDArray[Any]"], torch.Tensor]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Launch(Protocol[T_co]):
    """Launched work.

    `value` is what it returned; its tensors are for work that is launched behind it.
    """

    @property
    def value(self) -> T_co: ...

    def wait(self) -> T_co:
        """Waits until the device has done the work and returns `value`, which the host may read."""
        ...


class DeviceStream(Protocol):
    """Stream of one device.

    `is_asynchronous`: whether work runs behind the thread that launches it.
    """

    is_asynchronous: bool

    def launch(self, work: Callable[[], T]) -> Launch[T]:
        """Launches work behind all that was launched before. May return before it is done."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the host of what running work has computed, complete once that work
        has been waited for."""
        ...


class _Done(Generic[T]):
    """Work that was done as it was launched."""

    def __init__(self, value: T) -> None:
        self.value = value

    def wait(self) -> T:
        return self.value


class HostStream:
    """`DeviceStream` of a CPU, which computes in the thread that launches."""

    is_asynchronous = False

    def launch(self, work: Callable[[], T]) -> Launch[T]:
        return _Done(work())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Recorded(Generic[T]):
    """Work that an event follows on its CUDA stream."""

    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        self.value = value
        self._event = event

    def wait(self) -> T:
        self._event.synchronize()
        return self.value


class CudaStream:
    """`DeviceStream` of a GPU: the current CUDA stream of the thread that launches."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, work: Callable[[], T]) -> Launch[T]:
        value = work()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _Recorded(value, event)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def stream_of(device: torch.device) -> DeviceStream:
    """Returns the stream on which an engine computes."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


def uploader(device: torch.device) -> Upload:
    """Returns a function from arrays to tensors on the device. On a CPU both share memory; to a
    GPU, a pinned copy is transferred without waiting."""
    if device.type == "cpu":
        return torch.from_numpy
    return lambda array: torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
