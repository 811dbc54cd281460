"""Devices of a local cluster's workers: a GPU of its own for each, a share of one, or of the cores.

Knows nothing of processes: it adds to the settings of the workers.
"""

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.engine.config import EngineConfig

Settings = Mapping[str, object]
"""Settings of a worker by field name; None: unset."""

_COUNT = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_COUNT_TIMEOUT = 60.0  # seconds, most of them to import torch
_ANY_GPU = ("auto", "cuda")


def count_gpus() -> int:
    """Returns the number of GPUs that torch can use here; 0 without a driver or torch."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    # In a process of its own: processes forked from one that has initialized CUDA cannot use it.
    command = [sys.executable, "-P", "-c", _COUNT]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=True, timeout=_COUNT_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(done.stdout)


def on_devices(
    workers: Sequence[Settings], count: Callable[[], int] = count_gpus
) -> list[dict[str, object]]:
    """Returns the settings of each worker with its device and its share of it.

    Workers whose `device` is "auto" or "cuda" get the GPUs by round robin. Those on one GPU share
    its memory, and those on CPUs the cores, in equal parts; a worker keeps what it sets itself.

    Args:
        workers: settings of each worker.
        count: returns the number of usable GPUs; called only if a worker's device is open.
    """
    assigned = [dict(settings) for settings in workers]
    open_ones = [settings for settings in assigned if _device(settings) in _ANY_GPU]
    if open_ones and (num_gpus := count()):
        for index, settings in enumerate(open_ones):
            settings["device"] = f"cuda:{index % num_gpus}"
    num_sharing = Counter(map(_device, assigned))
    for settings in assigned:
        device = _device(settings)
        for name, share in _share(device, num_sharing[device]).items():
            if _setting(settings, name) is None:
                settings[name] = share
    return assigned


def _share(device: str, num_workers: int) -> dict[str, object]:
    """Returns the settings by which a worker takes one of `num_workers` equal parts of a device."""
    if not device.startswith("cuda"):
        return {"num_threads": max(1, len(os.sched_getaffinity(0)) // num_workers)}
    if num_workers == 1:
        return {}
    # Rounded down, so that the shares add up to no more than one worker would take.
    share = EngineConfig().gpu_memory_utilization / num_workers
    return {"gpu_memory_utilization": math.floor(1000 * share) / 1000}


def _device(settings: Settings) -> str:
    return str(_setting(settings, "device") or "auto")


def _setting(settings: Settings, name: str) -> object:
    """Returns a setting, which may come from the environment that the worker inherits."""
    value = settings.get(name)
    return os.environ.get(f"BATON_{name.upper()}") if value is None else value
