"""TCP sockets of this process, also those that gRPC keeps to itself."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def tcp_sockets(port: int) -> Iterator[socket.socket]:
    """Yields a duplicate of each socket at a local port, which is closed after its turn: gRPC may
    close its descriptor meanwhile, and another take the number."""
    for path in Path("/dev/fd").iterdir():
        with suppress(OSError), _duplicate(int(path.name)) as found:  # closed meanwhile
            if found.family in _TCP_FAMILIES and found.getsockname()[1] == port:
                yield found


def _duplicate(descriptor: int) -> socket.socket:
    """Raises `OSError` if it is none of a socket."""
    number = os.dup(descriptor)
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
