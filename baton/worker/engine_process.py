"""Choice of the process for a worker's engine: the worker's own, or a child."""

import logging
import sys

import torch

from baton.engine.process.engine_child import EngineChild, fork_engine
from baton.errors import InvalidArgumentError
from baton.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


def child_for(settings: WorkerSettings) -> EngineChild | None:
    """Forks a child for the engine if the settings and the device want one. Call before this
    process has other threads. Raises `InvalidArgumentError` where there cannot be one."""
    if settings.engine_process == "no":
        return None
    problem = _problem(settings.engine_config().device)
    if problem and settings.engine_process == "yes":
        raise InvalidArgumentError("engine_process", f"is yes, but {problem}; use auto or no")
    if problem:
        logger.info("the engine steps in a thread: %s", problem)
        return None
    return fork_engine()


def _problem(device: str) -> str:
    """Returns the reason why the engine cannot have a process of its own; empty if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return ""
    return "the KV pools are memory of a GPU, which transfers use in the engine's process"
