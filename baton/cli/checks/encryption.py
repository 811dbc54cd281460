"""Checks of TLS: identities and expiry of the certificates that processes show."""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping

from baton.cli.checks.finding import Finding, fault, note, ok
from baton.errors import FailedPreconditionError
from baton.rpc.tls import Tls
from baton.serving.grpc.certificates import Certificate, certificate_shown, trusting_context
from baton.serving.listening import is_loopback

_TIMEOUT = 5.0
_DAY = 86400.0
# A certificate that expires within this time gets a note.
_SOON = 14 * _DAY


def encryption(endpoints: Mapping[str, str], tls: Tls | None) -> Iterator[Finding]:
    """Checks the certificates of processes by name; `tls` is None if they answer in plaintext."""
    if tls is None:
        yield _in_the_clear(endpoints)
        return
    shown: dict[str, Certificate] = {}
    for name, endpoint in endpoints.items():
        try:
            shown[name] = _shown_at(endpoint, tls)
        except (OSError, FailedPreconditionError) as error:
            reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
            advice = "start it with --tls-cert, --tls-key and --tls-ca, as the others are"
            yield fault("TLS", f"{name} at {endpoint} refuses a TLS connection: {reason}", advice)
    if shown:
        yield _expiry(shown)


def _expiry(shown: Mapping[str, Certificate]) -> Finding:
    first = min(shown, key=lambda name: shown[name].expires)
    left = shown[first].expires - time.time()
    roles = ", ".join(f"{name}: {one.identity or 'no role'}" for name, one in shown.items())
    text = f"the certificate that expires first, in {left / _DAY:.1f} days, is that of {first}"
    if left > _SOON:
        return ok("TLS", f"{text} ({roles})")
    return note("TLS", f"{text} ({roles})", "replace its files; it reloads them")


def _in_the_clear(endpoints: Mapping[str, str]) -> Finding:
    open_ones = sorted({one for one in endpoints.values() if not is_loopback(_host_of(one))})
    if not open_ones:
        return ok("TLS", "none, and none is needed: all listen on loopback")
    text = f"none, so others on the network of {', '.join(open_ones)} can read and change"
    advice = "start all with --tls-cert, --tls-key and --tls-ca; `baton certs` creates trial ones"
    return note("TLS", f"{text} the traffic", advice)


def _shown_at(endpoint: str, tls: Tls) -> Certificate:
    host, _, port = endpoint.rpartition(":")
    context = trusting_context(ssl.PROTOCOL_TLS_CLIENT, tls)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT) as connecting,
        context.wrap_socket(connecting) as connection,
    ):
        return certificate_shown(connection)


def _host_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")
