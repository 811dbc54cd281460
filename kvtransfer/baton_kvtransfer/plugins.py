"""KV connectors of other packages, which declare them as entry points in their metadata:

    [project.entry-points."baton.kv_connectors"]
    fabric = "my_package:FabricConnector"

Both workers name it (`--kv-connector fabric`); each calls the entry point without arguments: once
for KV and, if its model has an encoder, once for encoder outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.executor.cache.kv_pool import KvPool
from baton.plugins import plugin_named
from baton.worker.settings import KV_CONNECTOR_GROUP, KV_CONNECTORS
from baton_kvtransfer.connector import Connector, Receiver


class ConnectorPlugin(Protocol):
    """Connector of one worker for both directions, for blocks of one content: claimants read them
    where they are.

    `is_local`: blocks never cross a network on which bits could flip, so that no checksums are
    needed.
    """

    is_local: bool

    def open(self, pools: Sequence[KvPool]) -> bytes:
        """Opens pools of this worker to claimants: of KV one per cache group, of encoder outputs
        one. Called in a thread.

        Returns what a claimant needs to read them, at most 1 MiB. Raises `UnavailableError`, with
        the reason, if they cannot be opened.
        """

    async def attach(self, metadata: bytes, pools: Sequence[KvPool]) -> Receiver:
        """Returns a receiver that reads the pools which another worker opened, as `metadata` says,
        into `pools`. Raises `UnavailableError`, with the reason, if it cannot."""

    def close(self) -> None:
        """Closes what `open` opened, if it was called. Receivers are closed by then."""


@dataclass(frozen=True, slots=True)
class NamedPlugin:
    """Connector plug-in with its name."""

    connector: Connector
    plugin: ConnectorPlugin


def connector_plugin(name: str) -> NamedPlugin | None:
    """Makes the plug-in that the setting `kv_connector` names; None for a connector of Baton.

    Raises `InvalidArgumentError` if no installed package adds it.
    """
    if name in KV_CONNECTORS:
        return None
    plugin: ConnectorPlugin = plugin_named("kv_connector", name, {}, KV_CONNECTOR_GROUP)()
    connector = Connector(name, is_local=plugin.is_local, detects_loss=False, is_plugin=True)
    return NamedPlugin(connector, plugin)
