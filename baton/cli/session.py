"""Connection to a running cluster, with errors that tell how to get one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from baton.client.client import Client
from baton.errors import UnavailableError
from baton.tls import Tls

_PROBE_TIMEOUT = 1.0


@contextmanager
def session(
    address: str, timeout: float, token: str | None = None, tls: Tls | None = None
) -> Iterator[Client]:
    """Yields a client of the router at `address`, with the bearer token and over TLS, if given.

    Raises:
        UnavailableError: nothing listens there (the error advises what to do), or the router cannot
            serve now.
    """
    with _client(address, timeout, token, tls, "--address or BATON_ADDRESS") as client:
        yield client


@contextmanager
def admin_session(
    admin: str, timeout: float, token: str | None = None, tls: Tls | None = None
) -> Iterator[Client]:
    """Yields a client of a router's admin service, as `session` does."""
    with _client(admin, timeout, token, tls, "--admin or BATON_ADMIN_ADDRESS") as client:
        yield client


@contextmanager
def _client(
    address: str, timeout: float, token: str | None, tls: Tls | None, options: str
) -> Iterator[Client]:
    try:
        with Client(address, timeout=timeout, token=token or None, tls=tls) as client:
            yield client
    except UnavailableError as error:
        if _listens(address):
            raise
        raise UnavailableError(
            f"no router answers at {address}; start a cluster with `baton up`, or give its address "
            f"with {options}"
        ) from error


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT):
            return True
    except (OSError, ValueError):
        return False
