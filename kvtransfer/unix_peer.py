"""What both ends of the descriptors' socket check and share. Knows nothing of blocks.

The socket is abstract: it has no file, so nothing is left of it however its owner ends, and it is
seen only inside one network namespace. It has no permissions either, so each end asks the kernel
who the other is.
"""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
GREETING = b"baton-kv"


@dataclass(frozen=True, slots=True)
class Door:
    """Where a source passes the descriptors of its pools.

    Attributes:
        address: the name of its socket, that nobody can guess.
        host: where it can be reached from.
        num_blocks: of the pool of each cache group, not counting block 0.
    """

    address: str
    host: str
    num_blocks: tuple[int, ...]


def host_id() -> str:
    """The same for all processes that may share memory: those under one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this one's user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def abstract(name: str) -> str:
    """The address of an abstract socket."""
    return f"\0{name}"
