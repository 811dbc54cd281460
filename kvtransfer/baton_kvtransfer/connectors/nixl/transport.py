"""Transport by which NIXL reads from other hosts, as UCX chooses it here.

UCX falls back to TCP without a word if a device or a permission is missing. So a program of its own
(`probe`) reads once, with the transports within one host turned off, while UCX prints the protocol
of each operation. The memory is the host's, as is the path: a peer may lack what this host has.
"""

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import FailedPreconditionError, UnavailableError
from baton_kvtransfer.connectors.nixl.agent import is_installed, load

if TYPE_CHECKING:
    from baton.worker.settings import WorkerSettings

_PROBE = Path(__file__).with_name("probe.py")
_TIMEOUT = 60.0  # seconds
# Of UCX: those within one host, by name and by group.
_LOCAL = ("self", "loopback", "sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem")
_RDMA = ("rc", "dc", "ud", "srd", "gga")
_READ = "remote memory read by ucp_get"
_ROW = re.compile(r"\|\s*\d+\.\.inf\s*\|[^|]*\|([^|]*)\|")
_LANE = re.compile(r"([a-z][a-z0-9_]*)/([\w.:-]+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NixlTransport:
    """Transports of one read, which may use several at once.

    Attributes:
        lanes: transport and device of each, as UCX names them, such as ("rc_mlx5", "mlx5_0:1").
    """

    lanes: tuple[tuple[str, str], ...]

    @property
    def is_rdma(self) -> bool:
        """Whether all bytes go by RDMA."""
        return all(name.partition("_")[0] in _RDMA for name, _ in self.lanes)

    def __str__(self) -> str:
        lanes = ", ".join(f"{name}/{device}" for name, device in self.lanes)
        return f"{'RDMA' if self.is_rdma else 'TCP'} ({lanes})"


def find_transport(devices: str | None) -> NixlTransport:
    """Reads once over `devices`, as UCX names them; None: over any. Blocks for a second or more.

    Raises `UnavailableError` if NIXL is missing, or has no transport to other hosts.
    """
    command = [sys.executable, "-P", str(_PROBE), load().__name__]
    try:
        done = subprocess.run(  # noqa: S603 - of this package
            command,
            env={**os.environ, **_variables(os.environ, devices)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"nixl read nothing within {_TIMEOUT:.0f} s") from None
    lanes = read_lanes(done.stdout)
    if done.returncode or not lanes:
        said = "; ".join(re.findall(r"UCX\s+ERROR (.*)", done.stdout)) or done.stderr[-300:].strip()
        raise UnavailableError(f"nixl has no transport to other hosts: {said}")
    return NixlTransport(lanes)


async def check_transport(settings: "WorkerSettings") -> None:
    """Logs over what NIXL reads from other hosts. Raises `FailedPreconditionError` if that is not
    RDMA, and has to be."""
    if not settings.probes_nixl or not (is_installed() or settings.require_rdma):
        return
    try:
        transport = await asyncio.to_thread(find_transport, settings.devices_of_nixl)
    except UnavailableError as error:
        if settings.require_rdma:
            raise FailedPreconditionError(f"{error}; expected RDMA, by --require-rdma") from error
        logger.warning("%s", error)
        return
    logger.info("nixl reads from other hosts over %s", transport)
    if settings.require_rdma:
        check_rdma(transport)


def check_rdma(transport: NixlTransport) -> None:
    """Raises `FailedPreconditionError` unless all bytes go by RDMA."""
    if not transport.is_rdma:
        raise FailedPreconditionError(
            f"nixl reads from other hosts over {transport}; expected RDMA, by --require-rdma. "
            "Give this process an RDMA device (in Kubernetes extraResources, and networks or "
            "hostNetwork), name it in --nixl-devices, and raise the limit of locked memory "
            "(ulimit -l)"
        )


def read_lanes(printed: str) -> tuple[tuple[str, str], ...]:
    """Returns the lanes of the largest reads in the tables that UCX prints; empty if none is."""
    tables = printed.split(_READ)[1:]
    rows = (_ROW.search(table) for table in tables)
    lanes = (lane for row in rows if row for lane in _LANE.findall(row[1]))
    return tuple(dict.fromkeys(lanes))


def _variables(environment: Mapping[str, str], devices: str | None) -> dict[str, str]:
    """Returns variables by which UCX prints its choice, without transports within one host."""
    return {
        **({} if devices is None else {"UCX_NET_DEVICES": devices}),
        "UCX_TLS": _between_hosts(environment.get("UCX_TLS", "all")),
        "UCX_PROTO_ENABLE": "y",
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_LEVEL": "error",
        "UCX_LOG_FILE": "stdout",
        "UCX_HANDLE_ERRORS": "none",
        "NIXL_LOG_LEVEL": "FATAL",
    }


def _between_hosts(transports: str) -> str:
    """Returns UCX_TLS without transports within one host."""
    if transports.startswith("^"):
        return ",".join([transports, *_LOCAL])
    names = transports.split(",")
    if "all" in names:
        return "^" + ",".join(_LOCAL)
    return ",".join(name for name in names if name not in _LOCAL) or "none"
