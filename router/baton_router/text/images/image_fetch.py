"""Fetcher of images by http and https URL, from hosts that an operator allows.

A URL comes from a client, who must not reach through the router what only the router reaches. So
the address of each host is resolved here, checked, and the connection is made to that address: a
name that resolves to another one a moment later changes nothing. Redirects are checked as the URL.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore2

MAX_REDIRECTS: Final = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_OK = 200
_SHOWN_CHARS = 100
_MAX_REASON_CHARS = 200
_MAX_URL_CHARS = 8192
_MAX_LABEL_CHARS = 63  # of one part of a name in DNS (RFC 1035)
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# All that is assigned of IPv6 (IANA). The rest is reserved, or carries IPv4 addresses for gateways.
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")

# Beside what `is_global` excludes in each version of Python: addresses that carry an IPv4 address,
# by which a gateway could reach what is excluded, metadata services of clouds that have public
# addresses, documentation, and ranges that are not in use any more.
_REFUSED: Final[tuple[Network, ...]] = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",
            "192.0.0.0/24",
            "192.88.99.0/24",
            "2001::/23",
            "2002::/16",
            "3ffe::/16",
            "3fff::/20",
        ),
    )
)


class FetchError(Exception):
    """URL that is not fetched; the message gives the reason, after the field that has it."""


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host and port."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a host by the system's resolver. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


class AllowedHosts:
    """Hosts from which images are fetched, and networks that they may be in.

    Args:
        patterns: names of hosts, as in `images.example.org`, `*.example.org` or `*`.
        networks: networks that are not global and may be reached nevertheless.
    """

    def __init__(self, patterns: Iterable[str], networks: Iterable[str] = ()) -> None:
        self._patterns = [pattern.strip().lower().rstrip(".") for pattern in patterns]
        self._networks = [ipaddress.ip_network(network.strip()) for network in networks]

    def allows(self, host: str) -> bool:
        """Returns whether a host's name is allowed."""
        name = host.lower().rstrip(".")
        return any(
            pattern in ("*", name)
            or (pattern.startswith("*.") and name.endswith(pattern[1:]) and name != pattern[1:])
            for pattern in self._patterns
        )

    def may_reach(self, address: Address) -> bool:
        """Returns whether an address is public, or in one of the networks."""
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in self._networks):
            return True
        is_public = address.is_global and not address.is_multicast
        if isinstance(address, ipaddress.IPv6Address):
            is_public &= address in _GLOBAL_UNICAST
        return is_public and not any(address in network for network in _REFUSED)


class ImageFetcher:
    """Fetcher of images. Sends no cookies, credentials or headers of clients.

    Trusts the certificate authorities of the system, or of `SSL_CERT_FILE` and `SSL_CERT_DIR`.

    Args:
        max_bytes: maximum bytes of one answer.
        timeout: seconds for one image, with all redirects.
    """

    def __init__(
        self,
        hosts: AllowedHosts,
        max_bytes: int,
        timeout: float,
        resolve: Resolve = resolve,
    ) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._tls = ssl.create_default_context()

    async def fetch(self, url: str) -> bytes:
        """Returns the body of the answer. Raises `FetchError`."""
        try:
            async with asyncio.timeout(self._timeout):
                return await self._follow(url)
        except TimeoutError:
            raise FetchError(f"was not fetched within {self._timeout:g} s") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, ssl.SSLError) as error:
            raise FetchError(_reason(error)) from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._get(_checked(url, self._hosts))
            if isinstance(found, bytes):
                return found
            url = _joined(url, found)
        raise FetchError(f"redirects too often; at most {MAX_REDIRECTS} redirects are followed")

    async def _get(self, url: SplitResult) -> bytes | str:
        """Returns the body of the answer, or the URL to which it redirects."""
        # A pool of its own: no connection is kept for a request of another host or tenant.
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=_CheckedBackend(self._hosts, self._resolve)
        )
        headers = [("host", url.netloc), ("accept", "image/*"), ("user-agent", "baton")]
        async with pool, pool.stream("GET", url.geturl(), headers=headers) as response:
            if response.status in _REDIRECTS:
                location = dict(response.headers).get(b"location")
                if location is None:
                    raise FetchError(f"is answered with {response.status} without a location")
                return location.decode("latin-1")
            if response.status != _OK:
                raise FetchError(f"is answered with status {response.status}; expected {_OK}")
            body = bytearray()
            async with contextlib.aclosing(response.aiter_stream()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise FetchError(
                            f"has more than {self._max_bytes} bytes; at most that many are taken"
                        )
            return bytes(body)


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to hosts at addresses that may be reached."""

    def __init__(self, hosts: AllowedHosts, resolve: Resolve) -> None:
        self._hosts = hosts
        self._resolve = resolve
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        error: Exception = FetchError(f"has a host, {host!r}, that has no address")
        for address in await self._addresses(host, port):
            try:
                return await self._inner.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except httpcore2.NetworkError as failure:
                error = failure
        raise error

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore2.AsyncNetworkStream:
        raise FetchError(f"is no URL of a host, but of the socket {path!r}")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> Sequence[Address]:
        """Returns the addresses of a host, all of which may be reached. Raises `FetchError`."""
        addresses = list(map(ipaddress.ip_address, await self._resolve(host, port)))
        for address in addresses:
            if not self._hosts.may_reach(address):
                # The address is not told: it is knowledge of this network.
                raise FetchError(
                    f"has a host, {host!r}, at an address that is not public; expected a public one"
                )
        return addresses


def _reason(error: Exception) -> str:
    mapped = error.__context__  # httpcore2 wraps it in an error of its own
    if isinstance(mapped, ssl.SSLCertVerificationError):
        return f"has a certificate that is not valid: {mapped.verify_message}"[:_MAX_REASON_CHARS]
    return f"cannot be fetched: {str(error) or type(error).__name__}"[:_MAX_REASON_CHARS]


def _joined(url: str, location: str) -> str:
    """Returns the URL to which the answer at `url` redirects. Raises `FetchError`."""
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise FetchError(f"redirects to no URL: {error}") from None


def _checked(url: str, hosts: AllowedHosts) -> SplitResult:
    """Returns the parts of a URL that may be fetched. Raises `FetchError`."""
    if len(url) > _MAX_URL_CHARS:
        raise FetchError(f"has {len(url)} characters; at most {_MAX_URL_CHARS} are taken")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FetchError(f"is no URL: {error}") from None
    if parts.scheme not in _PORTS:
        raise FetchError(f"leads to a URL of scheme {parts.scheme!r}; expected http or https")
    if parts.username is not None or parts.password is not None:
        raise FetchError("has credentials; expected a URL without them")
    host = parts.hostname
    if not host or not host.isascii() or any(c in host for c in "\\%\x00 "):
        raise FetchError("has no host that can be looked up; expected an ASCII name")
    if not all(1 <= len(label) <= _MAX_LABEL_CHARS for label in host.removesuffix(".").split(".")):
        raise FetchError(
            "has a host that no DNS name can be; expected 1 to "
            f"{_MAX_LABEL_CHARS} characters between dots"
        )
    if not hosts.allows(host):
        raise FetchError(
            f"leads to the host {host[:_SHOWN_CHARS]!r}, which --images-url-hosts does not allow"
        )
    if port == 0:
        raise FetchError("has port 0; expected another one")
    path = parts.path or "/"
    if any(ord(c) <= 0x20 or ord(c) >= 0x7F for c in parts.netloc + path + parts.query):
        raise FetchError("has characters that a URL has escaped; expected ASCII without spaces")
    return parts._replace(path=path, fragment="")
