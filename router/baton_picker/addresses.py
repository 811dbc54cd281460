"""Addresses of model servers: "ip:port" as the endpoint picker protocol has them."""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from baton.errors import InvalidArgumentError
from baton.serving.listening import host_and_port


@dataclass(frozen=True, slots=True)
class Subset:
    """Endpoints to pick from.

    Attributes:
        addresses: "ip:port" each.
        hosts: IP addresses, of which any port is meant.
    """

    addresses: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def read(cls, texts: Iterable[str], field: str) -> Self:
        """Returns the subset that texts name, each of one address or of several with commas between
        them. Raises `InvalidArgumentError`, naming `field`, for what is no address."""
        given = [one.strip() for text in texts for one in text.split(",") if one.strip()]
        hosts = {one: host for one in given if (host := _host(one))}
        rest = (one for one in given if one not in hosts)
        return cls(frozenset(endpoint(one, field) for one in rest), frozenset(hosts.values()))

    def has(self, address: str, host: str) -> bool:
        """Returns whether the endpoint at `address` of `host` is one of them."""
        return address in self.addresses or host in self.hosts


def _host(address: str) -> str:
    """Returns an IP address without a port in one spelling; "" for anything else. One of version 6
    without brackets that ends like a port is one with a port."""
    host = address.removeprefix("[").removesuffix("]")
    try:
        endpoint(address, "")
    except InvalidArgumentError:
        try:
            return str(ip_address(host))
        except ValueError:
            return ""
    return ""


def host_port(address: str, field: str) -> tuple[str, int]:
    """Returns host and port of "host:port"; an IPv6 address is in brackets. Raises
    `InvalidArgumentError`, naming `field`, for anything else."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16
    if not (host and colon and is_port):
        raise InvalidArgumentError(field, f"holds {address!r}; expected HOST:PORT")
    return host, int(port)


def endpoint(address: str, field: str) -> str:
    """Returns "ip:port" in one spelling. Raises `InvalidArgumentError`, naming `field`, for an
    address that is none."""
    host, port = host_port(address, field)
    try:
        return host_and_port(str(ip_address(host)), port)
    except ValueError:
        raise InvalidArgumentError(field, f"holds {address!r}; expected IP:PORT") from None
