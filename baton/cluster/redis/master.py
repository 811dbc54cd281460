"""Lookup of the Redis master, by Sentinels or by the nodes of a Cluster.

All keys of Baton are in one hash slot, so that in a Cluster, too, one node is the master of all of
them, and one lookup serves both (ADR 0021).
"""

import asyncio
import random
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from baton.cluster.keys import KEY_TAG
from baton.cluster.redis.address import Node, RedisAddress, Tls

_TIMEOUT = 0.8  # seconds per node: two of three may hang within the timeout of connecting
_SLOT = key_slot(KEY_TAG.encode())


class MasterLookup:
    """Lookup of the master: queries the nodes in random order until one returns it.

    The next lookup in a Cluster also queries the nodes that this one reported, since those of the
    URL may be gone by then.
    """

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._nodes = frozenset(address.nodes)

    async def discover_master(self, _service: str) -> Node:
        """Returns host and port of the master; called by `SentinelConnectionPool`.

        Raises:
            redis.exceptions.ConnectionError: no node knows the master, or none answers.
        """
        nodes = list(self._nodes)
        random.shuffle(nodes)
        reasons = []
        for node in nodes:
            try:
                return await self._ask(node)
            except (RedisError, OSError, LookupError) as error:
                host, port = node
                reasons.append(f"{host}:{port}: {error or type(error).__name__}")
        raise RedisConnectionError(f"no sentinel or node names the master ({'; '.join(reasons)})")

    async def _ask(self, node: Node) -> Node:
        address = self._address
        is_sentinel = address.kind == "sentinel"
        client = Redis(
            host=node[0],
            port=node[1],
            username=address.sentinel_username if is_sentinel else address.username,
            password=address.sentinel_password if is_sentinel else address.password,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **tls_options(address.tls),
        )
        connection = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
        try:
            async with asyncio.timeout(_TIMEOUT):
                await connection.connect()
                await connection.send_command(*(command if is_sentinel else ("CLUSTER", "SLOTS")))
                reply: Any = await connection.read_response()
        finally:
            # A client closes its connections in tasks of their own, which a cancellation can end
            # before they start. This closes without suspending.
            await connection.disconnect(nowait=True)
        if is_sentinel:
            return _named(reply, address.service)
        self._nodes = frozenset(address.nodes) | _all_nodes(reply, node)
        return _owner(reply, node)


def tls_options(tls: Tls | None) -> dict[str, Any]:
    """Returns the TLS arguments of a redis-py client; empty without TLS."""
    if tls is None:
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": tls.ca_file,
        "ssl_certfile": tls.cert_file,
        "ssl_keyfile": tls.key_file,
        "ssl_check_hostname": tls.check_hostname,
    }


def _named(reply: Any, service: str) -> Node:
    if not reply:
        raise LookupError(f"it knows no master called {service!r}")
    host, port = reply
    return _text(host), int(port)


def _owner(slots: Any, queried: Node) -> Node:
    for first, last, master, *_ in slots:
        if first <= _SLOT <= last:
            return _node(master, queried)
    raise LookupError("it knows no node that serves our slot")


def _all_nodes(slots: Any, queried: Node) -> frozenset[Node]:
    return frozenset(_node(node, queried) for _, _, *nodes in slots for node in nodes)


def _node(fields: Any, queried: Node) -> Node:
    """Returns host and port of a node; one without a host in the reply has that of `queried`."""
    host, port = fields[:2]
    return (_text(host) if host else queried[0]), int(port)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
