"""Device of an engine: found by its name, made current in threads, and its lack of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import requires
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.installation import package_command

# Of the CUDA driver, by torch or Triton; of cuBLAS and cuDNN.
_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED")


class Gpus(Protocol):
    """GPUs of this process; `torch.cuda` is one."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def current_device(self) -> int: ...

    def set_device(self, device: torch.device) -> None: ...

    def current_stream(self) -> Any: ...


CUDA: Gpus = torch.cuda


def resolve_device(name: str, gpus: Gpus = CUDA) -> torch.device:
    """Returns the device, one of `gpus` with its index: "auto" and "cuda" name the current GPU.

    Raises `InvalidArgumentError` for a missing GPU, with no CPU fallback, and
    `FailedPreconditionError` for a GPU without Triton.
    """
    if name == "auto":
        name = "cuda" if gpus.is_available() else "cpu"
    if name.startswith("cuda") and not gpus.is_available():
        raise InvalidArgumentError(
            "device",
            f"is {name!r}, but torch sees no GPU (torch {torch.__version__}); "
            "install a CUDA build of torch and a driver, or use --device cpu",
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(
            "device", f"is {name!r}; must be auto, cpu or cuda[:N]"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= gpus.device_count():
        raise InvalidArgumentError(
            "device",
            f"is {name!r}; torch sees {gpus.device_count()} GPUs here, the first is cuda:0",
        )
    if device.type == "cuda":
        check_triton()
    return indexed(device, gpus)


def check_triton() -> None:
    """Raises `FailedPreconditionError` if Triton is not installed, which every engine on a GPU
    needs: a kernel copies its blocks, whatever computes. Builds of torch for GPUs require one
    release of it."""
    if find_spec("triton") is not None:
        return
    required = (line.partition(";")[0].strip() for line in requires("torch") or ())
    release = next((name for name in required if name.startswith("triton")), "triton")
    raise FailedPreconditionError(
        f"a GPU needs Triton, which is not installed; {package_command(release)}"
    )


def indexed(device: torch.device, gpus: Gpus = CUDA) -> torch.device:
    """Returns the device with its index: that of the current GPU for a GPU without one."""
    index: int | None = device.index  # torch declares an int
    if device.type == "cuda" and index is None:
        return torch.device("cuda", gpus.current_device())
    return device


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for an error that says that device memory is short. Libraries that allocate
    beside torch raise plain `RuntimeError`s, which their text alone tells apart."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def use_device(device: torch.device, gpus: Gpus = CUDA) -> None:
    """Makes a GPU, one of `gpus`, the current device of this thread, and its context current;
    nothing for a CPU.

    Call it first in each thread that launches kernels, makes streams or events, or pins memory for
    the GPU: these use the current device, and not that of their tensors. Libraries that call the
    driver want the context.
    """
    if device.type == "cuda":
        gpus.set_device(indexed(device, gpus))  # which refuses a device without an index
        gpus.current_stream().query()  # a thread's first CUDA call makes the context current


@contextmanager
def current_context(device: torch.device) -> Iterator[None]:
    """Enters the context of a GPU for the `with` block."""
    with torch.cuda.device(device):
        use_device(device)
        yield
