"""Connection to a running cluster, with errors that tell how to get one."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.cli.listener import http_answer, listens, resolves, router_at
from baton.cli.options.common import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from baton.client.client import Client
from baton.errors import UnauthenticatedError, UnavailableError
from baton.rpc.tls import Tls


@contextmanager
def session(
    address: str, timeout: float, token: str | None = None, tls: Tls | None = None
) -> Iterator[Client]:
    """Yields a client of the router at `address`, with the bearer token and over TLS, if given.

    Raises:
        UnavailableError: nothing listens there (the error advises what to do), or the router cannot
            serve now.
    """
    options = "--address or BATON_ADDRESS"
    with _client(address, timeout, token, tls, options, "--port", DEFAULT_ADDRESS) as client:
        yield client


@contextmanager
def admin_session(
    admin: str, timeout: float, token: str | None = None, tls: Tls | None = None
) -> Iterator[Client]:
    """Yields a client of a router's admin service, as `session` does."""
    options = "--admin or BATON_ADMIN_ADDRESS"
    default = DEFAULT_ADMIN_ADDRESS
    with _client(admin, timeout, token, tls, options, "--admin-port", default) as client:
        yield client


@contextmanager
def _client(
    address: str,
    timeout: float,
    token: str | None,
    tls: Tls | None,
    options: str,
    flag: str,
    default: str,
) -> Iterator[Client]:
    try:
        with Client(address, timeout=timeout, token=token or None, tls=tls) as client:
            yield client
    except UnauthenticatedError as error:
        if token or tls is not None:  # where a certificate may be what is needed
            raise
        raise UnauthenticatedError(f"{error}; give it with --token or BATON_TOKEN") from error
    except UnavailableError as error:
        scheme, is_url, _ = address.partition("://")
        if is_url:
            raise UnavailableError(
                f"{address!r} begins with {scheme}://; expected HOST:PORT, such as {default}: "
                f"leave out {scheme}:// in {options}"
            ) from error
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if not (host and port.isdecimal()):
            raise UnavailableError(
                f"{address!r} is no address; expected HOST:PORT, such as {default}, by {options}"
            ) from error
        if not resolves(host):
            raise UnavailableError(
                f"the host name {host!r} does not resolve; give another with {options}"
            ) from error
        if not listens(host, int(port)):
            raise UnavailableError(
                f"no router answers at {address}; start a cluster with `baton up`, or give its "
                f"address with {options}"
            ) from error
        if not http_answer(host, int(port)):
            raise
        usual = f"{address.rpartition(':')[0]}:{default.rpartition(':')[2]}"
        found = usual if router_at(usual, tls) else f"the router's {flag}, {usual} by default"
        raise UnavailableError(
            f"{address} answers HTTP; gRPC is at {found}: give it with {options}"
        ) from error
