"""Inference engine: model, KV cache and scheduler in one process, without any network.

`from baton.engine import LLM, EngineConfig, SamplingParams`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.engine.config import EngineConfig
    from baton.engine.llm import LLM, GenerationResult
    from baton.engine.request import MultimodalPrompt
    from baton.sampling import SamplingParams

    Engine = LLM

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "GenerationResult",
    "MultimodalPrompt",
    "SamplingParams",
]

_MODULES = {
    "LLM": "baton.engine.llm",
    "EngineConfig": "baton.engine.config",
    "GenerationResult": "baton.engine.llm",
    "MultimodalPrompt": "baton.engine.request",
    "SamplingParams": "baton.sampling",
}
_OLD_NAMES = {"Engine": "LLM"}
"""Names of the release before, which work in this one."""


def __getattr__(name: str) -> Any:
    current = _OLD_NAMES.get(name, name)
    if current in _MODULES:
        return getattr(import_module(_MODULES[current]), current)
    raise AttributeError(f"module 'baton.engine' has no attribute {name!r}")
