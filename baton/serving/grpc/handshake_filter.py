"""Filter of handshakes: the kernel drops packets of some addresses to a port that listens.

A program of classic BPF (Linux, Documentation/networking/filter.rst) on the listening socket. Most
kernels let any process set one on its own sockets; some want CAP_NET_ADMIN for those of TCP.
Connections that are established have no listening socket, and go on.
"""

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network

from baton.serving.grpc.own_sockets import tcp_sockets

Network = IPv4Network | IPv6Network
"""One address of IPv4, or a network of 64 bits of IPv6."""

# Addresses of a program at most: its jumps are of 255 instructions.
MAX_ADDRESSES = 32

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_IP_HEADER = 2**32 - 0x100000  # offset of the IP header, whatever the socket's packets begin with
_IPV4_SOURCE, _IPV6_SOURCE = _IP_HEADER + 12, _IP_HEADER + 8
_KEEP, _DROP = (_RETURN, 0, 0, 2**32 - 1), (_RETURN, 0, 0, 0)

_Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true and if false, operand."""


def refuse(port: int, networks: Collection[Network]) -> None:
    """Drops handshakes from these networks to the sockets of this process that listen on `port`,
    and from no others any more. Raises `OSError` where the kernel lets none be set."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    for listening in tcp_sockets(port):
        if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            _filter(listening, networks)


def _filter(listening: socket.socket, networks: Collection[Network]) -> None:
    if not networks:
        listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    program = _program(networks)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)


def _program(networks: Collection[Network]) -> list[_Instruction]:
    of_ipv4: list[_Instruction] = [(_LOAD_WORD, 0, 0, _IPV4_SOURCE)]
    of_ipv6: list[_Instruction] = []
    for network in networks:
        words = struct.unpack("!II", network.network_address.packed[:8].rjust(8, b"\0"))
        if network.version == 4:
            of_ipv4 += [(_JUMP_IF_EQUAL, 0, 1, words[1]), _DROP]
            continue
        of_ipv6 += [
            (_LOAD_WORD, 0, 0, _IPV6_SOURCE),
            (_JUMP_IF_EQUAL, 0, 3, words[0]),
            (_LOAD_WORD, 0, 0, _IPV6_SOURCE + 4),
            (_JUMP_IF_EQUAL, 0, 1, words[1]),
            _DROP,
        ]
    of_ipv4.append(_KEEP)
    version = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    return [*version, (_JUMP_IF_EQUAL, 0, len(of_ipv4), 4), *of_ipv4, *of_ipv6, _KEEP]
