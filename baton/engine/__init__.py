"""Inference engine: model, KV cache and scheduler in one process, without any network.

`from baton.engine import Engine, EngineConfig, SamplingParams`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.engine.config import EngineConfig
    from baton.engine.engine import Engine
    from baton.engine.messages import GenerationResult, MultimodalPrompt
    from baton.sampling import SamplingParams

__all__ = ["Engine", "EngineConfig", "GenerationResult", "MultimodalPrompt", "SamplingParams"]

_MODULES = {
    "Engine": "baton.engine.engine",
    "EngineConfig": "baton.engine.config",
    "GenerationResult": "baton.engine.messages",
    "MultimodalPrompt": "baton.engine.messages",
    "SamplingParams": "baton.sampling",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'baton.engine' has no attribute {name!r}")
