"""Identification of the server that listens at an address, for errors that name it."""

import json
import socket

from baton.client.client import Client
from baton.errors import BatonError, UnauthenticatedError
from baton.rpc.tls import Tls

_TIMEOUT = 1.0  # seconds for each question
_MAX_ANSWER = 1 << 16
_HTTP_REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def resolves(host: str) -> bool:
    """Returns whether a host name, or an address, has addresses."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def listens(host: str, port: int) -> bool:
    """Returns whether a server accepts connections there."""
    try:
        with socket.create_connection((host, port), _TIMEOUT):
            return True
    except OSError:
        return False


def http_answer(host: str, port: int) -> bytes:
    """Returns the answer to an HTTP request for the list of models; empty if it is not HTTP."""
    answer = b""
    try:
        with socket.create_connection((host, port), _TIMEOUT) as connection:
            connection.settimeout(_TIMEOUT)
            connection.sendall(_HTTP_REQUEST)
            while len(answer) < _MAX_ANSWER and (part := connection.recv(_MAX_ANSWER)):
                answer += part
    except OSError:
        pass
    return answer if answer.startswith(b"HTTP/") else b""


def router_at(address: str, tls: Tls | None = None) -> str | None:
    """Returns "a Baton router that serves MODEL" if one answers gRPC at `address`; "the
    admin service of Baton VERSION" at that of any process; None for other servers."""
    try:
        with Client(address, timeout=_TIMEOUT, tls=tls) as client:
            return f"a Baton router that serves {client.get_model().name}"
    except UnauthenticatedError:
        return "a Baton router that asks for a token"
    except BatonError:
        return _admin_at(address, tls)


def _admin_at(address: str, tls: Tls | None) -> str | None:
    try:
        with Client(address, timeout=_TIMEOUT, tls=tls) as client:
            return f"the admin service of Baton {client.get_info().versions['baton']}"
    except (BatonError, KeyError):
        return None


def holder(host: str, port: int) -> str:
    """Returns the server that holds a port, as far as it tells: "a Baton router that ...", or
    "another program"."""
    answer = http_answer(host, port)
    if not answer:
        return router_at(f"{host}:{port}") or "another program"
    models = _baton_models(answer)
    return f"the HTTP API of a Baton router that serves {models}" if models else "an HTTP server"


def _baton_models(answer: bytes) -> str:
    """Returns the models that an answer of Baton's HTTP API lists; empty for other answers."""
    try:
        listed = json.loads(answer.partition(b"\r\n\r\n")[2])["data"]
        return ", ".join(str(m["id"]) for m in listed if m["owned_by"] == "baton")
    except (ValueError, LookupError, TypeError):
        return ""
