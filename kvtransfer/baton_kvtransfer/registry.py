"""Registry of connectors: Baton's, and those that other packages declare in their metadata:

    [project.entry-points."baton.kv_connectors"]
    fabric = "my_package:FabricConnector"

The entry point is a class as `Connector` describes. Both workers name it (`--kv-connector fabric`).
Each makes its connectors once for KV and, if its model has an encoder, once for encoder outputs.
"""

from collections.abc import Sequence

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import InvalidArgumentError
from baton.plugins import plugin_named
from baton.worker.settings import KV_CONNECTOR_GROUP, KV_CONNECTORS, WorkerSettings
from baton_kvtransfer.connector import Connector
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.connectors.nixl.connector import NixlConnector
from baton_kvtransfer.connectors.shm.connector import ShmConnector

FALLBACK = GrpcConnector
BUILT_IN: tuple[type[Connector], ...] = (CudaIpcConnector, ShmConnector, NixlConnector, FALLBACK)
"""In order of preference. The last is the fallback, which every worker has."""


def connectors_for(pools: Sequence[KvPool], settings: WorkerSettings) -> list[Connector]:
    """Returns the connectors of a worker's pools, in order of preference.

    Raises `InvalidArgumentError` if the settings name one that no installed package adds.
    """
    name, kinds = settings.kv_connector, BUILT_IN
    if name not in KV_CONNECTORS:
        kind: type[Connector] = plugin_named("kv_connector", name, {}, KV_CONNECTOR_GROUP)
        if kind.name != name:
            raise InvalidArgumentError(
                "kv_connector", f"is {name!r}; its class has the name {kind.name!r}"
            )
        kinds = (kind, *kinds)
    return [kind.for_worker(pools, settings) for kind in kinds]


async def preflight(settings: WorkerSettings) -> None:
    """Checks that this host has what the connectors need. Raises as `Connector.preflight`."""
    for kind in BUILT_IN:
        await kind.preflight(settings)
