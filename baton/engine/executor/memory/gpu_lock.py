"""Lock of a GPU among the workers of one host, which measure its free memory and then take it."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def gpu_lock(device: torch.device) -> Iterator[None]:
    """Holds the lock of the device in the `with` block; nothing on a CPU.

    Only workers of the same user that see the same temporary folder exclude each other. A process
    that is killed releases it.
    """
    if device.type != "cuda":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    name = f"baton-gpu-{os.getuid()}-{uuid}.lock"
    with file_lock(Path(tempfile.gettempdir(), name)):
        yield


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, which it creates; waits until it is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
