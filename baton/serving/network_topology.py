"""Network topology of a cluster: the ports of each process, and which process connects to which.
The chart's network policies are tested against it, and it is tested against a cluster.
"""

from dataclasses import dataclass
from typing import Literal

Process = Literal["router", "encode", "prefill", "decode", "endpoint-picker"]
Port = Literal["grpc", "kv", "http", "metrics", "admin"]
"""Port by its traffic; see `PORTS`."""

Outside = Literal[
    "client", "operator", "scraper", "redis", "collector", "hub", "images", "dns", "endpoint"
]
"""Peers that are not Baton processes: clients, operators, the metrics scraper, Redis, the trace
collector, the hub that checkpoints come from, the hosts of images that requests name by URL, DNS,
and the model servers of others, which are the endpoints of an endpoint picker."""

WORKERS: tuple[Process, ...] = ("encode", "prefill", "decode")
CLUSTER: tuple[Process, ...] = ("router", *WORKERS)
"""Processes of a cluster, which find each other through Redis. An endpoint picker has no part in
one."""
PROCESSES: tuple[Process, ...] = (*CLUSTER, "endpoint-picker")

PORTS: dict[Port, tuple[str, tuple[Process, ...]]] = {
    "grpc": ("port", PROCESSES),
    "kv": ("kv_port", WORKERS),
    "http": ("http_port", ("router",)),
    "metrics": ("metrics_port", PROCESSES),
    "admin": ("admin_port", CLUSTER),
}
"""Setting of each port's number, and the processes that have the port."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Connections from one kind of process to a port of another one.

    Attributes:
        port: port of `target`; None if the target is not a Baton process.
        why: the traffic on it.
    """

    source: Process | Outside
    target: Process | Outside
    port: Port | None
    why: str


CONNECTIONS: tuple[Connection, ...] = (
    Connection("client", "router", "grpc", "requests and their answers"),
    Connection("client", "router", "http", "the same over HTTP"),
    # By default a router listens for it on loopback.
    Connection("operator", "router", "admin", "administration"),
    *(Connection("router", worker, "grpc", "work, health") for worker in WORKERS),
    *(
        Connection("router", worker, "admin", "changes of roles, caches to be forgotten")
        for worker in WORKERS
    ),
    # All roles, since any worker may change into any: encoder outputs go to prefill workers,
    # prompts' KV to decode workers, and cached outputs and prefixes wherever they save time.
    # Over NIXL and UCX workers connect to each other on ports that those libraries choose.
    *(
        Connection(reader, source, "kv", "blocks of KV and encoder outputs")
        for reader in WORKERS
        for source in WORKERS
    ),
    Connection("client", "endpoint-picker", "grpc", "questions of gateways"),
    Connection("endpoint-picker", "endpoint", None, "probes and metrics of model servers"),
    *(Connection("scraper", process, "metrics", "metrics") for process in PROCESSES),
    *(Connection(process, "redis", None, "the registry and KV events") for process in CLUSTER),
    *(Connection(process, "collector", None, "traces, if any") for process in PROCESSES),
    *(Connection(process, "hub", None, "a checkpoint, if it is a hub id") for process in PROCESSES),
    Connection("router", "images", None, "images by URL, if --images-url-hosts names any"),
    *(Connection(process, "dns", None, "where those are") for process in PROCESSES),
)
