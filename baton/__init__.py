"""Baton serves large language models with prefill and decode in separate worker pools.

`from baton import Client, AsyncClient, SamplingParams` is what callers need; imports are lazy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client
    from baton.rpc.tls import Tls
    from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams

__all__ = [
    "AsyncClient",
    "Client",
    "EarlyStopping",
    "Grammar",
    "GrammarKind",
    "SamplingParams",
    "Tls",
]

_MODULES = {
    "AsyncClient": "baton.client",
    "Client": "baton.client",
    "EarlyStopping": "baton.sampling",
    "Grammar": "baton.sampling",
    "GrammarKind": "baton.sampling",
    "SamplingParams": "baton.sampling",
    "Tls": "baton.rpc.tls",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
