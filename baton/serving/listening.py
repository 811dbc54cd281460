"""Listen addresses: their format, the loopback check, sockets, and errors of ports that cannot be
bound."""

import errno
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from baton.errors import FailedPreconditionError

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound to here


def without_brackets(host: str) -> str:
    """Returns a host as sockets take it: an IPv6 address may be in brackets, as in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_and_port(host: str, port: int) -> str:
    """Returns "host:port"; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to it. Of names only "localhost" is known."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def socket_address(
    host: str, port: int, has_ipv6: Callable[[], bool] = socket.has_dualstack_ipv6
) -> tuple[int, tuple[Any, ...]]:
    """Returns the family of a TCP socket, and the address to bind it to. "::" is "0.0.0.0" where
    the kernel has no IPv6. Raises `OSError` for a host that does not resolve."""
    if host == "::" and not has_ipv6():
        host = "0.0.0.0"  # noqa: S104 - as the caller wants
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError:  # of the codec of names in DNS
        raise socket.gaierror(socket.EAI_NONAME, "the host is no DNS name") from None
    return family, address


def listen(host: str, port: int, flag: str, backlog: int) -> socket.socket:
    """Returns a socket that listens; on "::" for IPv4 as well, as gRPC does. Raises
    `FailedPreconditionError` if it cannot; the error names `flag` if the port is in use."""
    try:
        family, address = socket_address(host, port)
        return socket.create_server(
            address, family=family, backlog=backlog, dualstack_ipv6=address[0] == "::"
        )
    except OSError as error:
        raise cannot_listen(host, port, flag, error) from error


def probe(host: str, port: int) -> None:
    """Raises `OSError` if the address cannot be bound."""
    family, address = socket_address(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)


def cannot_listen(host: str, port: int, flag: str, error: OSError) -> FailedPreconditionError:
    """Returns the error with its reason; for a port in use, with the `flag` to choose another."""
    if error.errno == errno.EADDRINUSE:
        return FailedPreconditionError(
            f"port {port} on {host} is taken; choose another with {flag}"
        )
    reason = error.strerror or str(error)
    return FailedPreconditionError(f"cannot listen on {host_and_port(host, port)}: {reason}")
