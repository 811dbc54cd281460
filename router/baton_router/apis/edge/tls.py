"""TLS of the HTTP server, with certificates that may be replaced while it serves."""

import ssl

from baton.rpc.tls import Tls
from baton.serving.grpc.certificates import names_shown, watched


def server_context(tls: Tls, *, asks_for_certificates: bool) -> ssl.SSLContext:
    """Returns the TLS context of the server. `asks_for_certificates`: clients without a trusted
    certificate are rejected (mTLS)."""
    files = watched(tls)
    made_of, context = files.current(), _context(tls, asks_for_certificates)

    def use_the_newest(connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
        """Sets the newest certificates for a connection, before one is shown."""
        nonlocal made_of, context
        now = files.current()
        if now is not made_of:
            made_of, context = now, _context(tls, asks_for_certificates)
        connection.context = context

    outermost = _context(tls, asks_for_certificates)
    outermost.sni_callback = use_the_newest
    return outermost


def auth_context(connection: ssl.SSLObject) -> dict[str, list[bytes]]:
    """Returns the identity in the client certificate as gRPC has it; empty if none was shown."""
    return {"peer_uri": [uri.encode() for uri in names_shown(connection, "URI")]}


def _context(tls: Tls, asks_for_certificates: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert tls.cert is not None
    context.load_cert_chain(tls.cert, tls.key)
    # No session resumption: a client that reconnects shows its certificate again.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    if asks_for_certificates:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
