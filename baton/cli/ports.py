"""Ports for processes that must be told theirs before they start."""

import errno
import random
import socket

# Below the range from which the kernel takes ports for outgoing connections, so that none of those
# can slip in between this choice and the moment the port is listened on.
_RANGE = range(20_000, 32_768)
_ATTEMPTS = 200

HOST = "127.0.0.1"


def free_port(besides: set[int]) -> int:
    """A loopback port that nobody listens on now and that is not one of `besides`.

    Whoever listens on it may still find that another was faster, and should ask for another one.
    """
    for _ in range(_ATTEMPTS):
        port = random.choice(_RANGE)  # noqa: S311 - nothing secret
        if port not in besides and is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port in {_ATTEMPTS} attempts")


def is_free(port: int) -> bool:
    """Whether nobody listens on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
