"""Listen addresses: their format, the loopback check, and errors of ports that cannot be bound."""

import errno
from ipaddress import ip_address

from baton.errors import FailedPreconditionError

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound to here


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


def cannot_listen(host: str, port: int, flag: str, error: OSError) -> FailedPreconditionError:
    """Returns the error with its reason; for a port in use, with the `flag` to choose another."""
    if error.errno == errno.EADDRINUSE:
        return FailedPreconditionError(
            f"port {port} on {host} is taken; choose another with {flag}"
        )
    reason = error.strerror or str(error)
    return FailedPreconditionError(f"cannot listen on {host_and_port(host, port)}: {reason}")
