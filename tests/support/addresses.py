"""Loopback addresses of this machine."""

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
LOOPBACKS = ("127.0.0.1", pytest.param("::1", marks=needs_ipv6))
