"""Choice of the process for a worker's engine: the worker's own, or a child."""

import logging
import sys
from importlib.util import find_spec

from baton.engine.core.process.engine_child import EngineChild, fork_engine
from baton.engine.executor.device import CUDA, Gpus
from baton.errors import InvalidArgumentError
from baton.worker.settings import KV_CONNECTORS, WorkerSettings

logger = logging.getLogger(__name__)


def child_for(settings: WorkerSettings, gpus: Gpus = CUDA) -> EngineChild | None:
    """Forks a child for the engine if the settings and the device, which may be one of `gpus`, want
    one. Call before this
    process has other threads. Raises `InvalidArgumentError` where there cannot be one.

    Whether the server can open a GPU's memory of the child is found out as the engine is loaded.
    """
    if settings.engine_process == "no":
        return None
    problem = _problem(settings, gpus)
    if problem and settings.engine_process == "yes":
        raise InvalidArgumentError("engine_process", f"is yes, but {problem}; use auto or no")
    if problem:
        logger.info("the engine steps in a thread: %s", problem)
        return None
    return fork_engine()


def _problem(settings: WorkerSettings, gpus: Gpus) -> str:
    """Returns the reason why the engine cannot have a process of its own; empty if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if not _is_on_gpu(settings.engine_config().device, gpus):
        return ""
    if settings.kv_connector not in KV_CONNECTORS:
        return (
            f"--kv-connector {settings.kv_connector} is of another package, which may register "
            "memory of a GPU in its own process alone"
        )
    if settings.may_use_nixl and find_spec("nixl"):
        return (
            "nixl, which is to move blocks, registers memory of a GPU in its own process alone "
            "(grpc and cuda-ipc do not need that: --kv-connector)"
        )
    return ""


def _is_on_gpu(device: str, gpus: Gpus) -> bool:
    # Not `is_available`, which initializes CUDA without NVML's help: no child could use it then.
    return device.startswith("cuda") or (device == "auto" and gpus.device_count() > 0)
