"""Free ports, for processes that must know theirs before they start."""

import errno
import random
import socket

# Below the kernel's range for outgoing connections, so that none of them takes the port between
# this choice and the moment a process listens on it.
_RANGE = range(20_000, 32_768)
_ATTEMPTS = 200

HOST = "127.0.0.1"


def free_port(besides: set[int]) -> int:
    """Returns a loopback port that is free now and not one of `besides`.

    Another process may still listen on it first; the caller should then ask for another one.
    """
    for _ in range(_ATTEMPTS):
        port = random.choice(_RANGE)  # noqa: S311 - nothing secret
        if port not in besides and is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port in {_ATTEMPTS} attempts")


def is_free(port: int) -> bool:
    """Returns whether no process listens on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
