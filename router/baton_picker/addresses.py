"""Addresses of model servers: "ip:port" as the endpoint picker protocol has them."""

from ipaddress import ip_address

from baton.errors import InvalidArgumentError
from baton.serving.listening import host_and_port


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
