"""Baton serves large language models with prefill and decode in separate worker pools.

`from baton import Client, Message, SamplingParams, LLM, ...` is what callers need; imports are
lazy, and only `LLM` and `EngineConfig` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.client.client import Generation
    from baton.client.types import Clip, Image, Message, OutputParsing, Tool, ToolCall
    from baton.engine import LLM, EngineConfig
    from baton.rpc.tls import Tls
    from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "Clip",
    "EarlyStopping",
    "EngineConfig",
    "Generation",
    "Grammar",
    "GrammarKind",
    "Image",
    "Message",
    "OutputParsing",
    "SamplingParams",
    "Tls",
    "Tool",
    "ToolCall",
]

_NAMES = {
    "baton.client": ("AsyncClient", "Client"),
    "baton.client.client": ("Generation",),
    "baton.client.types": ("Clip", "Image", "Message", "OutputParsing", "Tool", "ToolCall"),
    "baton.engine": ("LLM", "EngineConfig"),
    "baton.rpc.tls": ("Tls",),
    "baton.sampling": ("EarlyStopping", "Grammar", "GrammarKind", "SamplingParams"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
