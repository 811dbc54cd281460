"""Client of a Baton router: `Client`, and `AsyncClient` with the same calls to await."""

from baton.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
