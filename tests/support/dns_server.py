"""DNS server on loopback whose answers change: A records of every name that it is asked for."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

_TYPE_A = 1


class DnsServer(asyncio.DatagramProtocol):
    """Answers with `addresses`, which a test changes.

    Attributes:
        addresses: IPv4 addresses.
        port: UDP port on 127.0.0.1.
        num_asked: number of questions for A records so far.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.port = 0
        self.num_asked = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # of the question: name, type, class
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        found = self.addresses if kind == _TYPE_A else []
        self.num_asked += kind == _TYPE_A
        # A response, authoritative; one question; the answers point to the name at byte 12.
        head = data[:2] + struct.pack("!5H", 0x8580, 1, len(found), 0, 0)
        answers = [
            struct.pack("!3HIH", 0xC00C, _TYPE_A, 1, 0, 4) + ip_address(one).packed for one in found
        ]
        self._transport.sendto(head + data[12:end] + b"".join(answers), addr)


@asynccontextmanager
async def dns_server(*addresses: str) -> AsyncIterator[DnsServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: DnsServer([*addresses]), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
