"""Address of a client, as a holder of connections."""

from ipaddress import IPv6Address, ip_address, ip_network

# A host of IPv6 has at least so many bits to itself.
_PREFIX_BITS = 64


def holder_of(host: str) -> str:
    """Returns whose an IP address is: the address itself, or the network of one of IPv6, since its
    host may have any other in it."""
    address = ip_address(host)
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, _PREFIX_BITS), strict=False))
