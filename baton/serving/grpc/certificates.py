"""TLS certificate of this process: whether peers accept it, and its role, names and expiry.

The process checks it by a TLS handshake with itself, in memory: whatever a peer would reject is
found here, with the same error text.
"""

import ssl
from dataclasses import dataclass
from typing import Literal, cast

from baton.errors import FailedPreconditionError
from baton.rpc.tls import PemFiles, Tls
from baton.serving.grpc.access import ROUTER_NAME, WORKER_NAME, Identity, Role, identity_in

# Rounds of an in-memory TLS handshake, at most.
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Certificate:
    """Parsed certificate.

    Attributes:
        identity: None: the certificate has no role.
        names: DNS names that it is for.
        expires: in Unix seconds.
    """

    identity: Identity | None
    names: frozenset[str]
    expires: float


def read_certificate(tls: Tls) -> Certificate:
    """Returns this process's certificate. Raises `FailedPreconditionError` if certificate, key and
    authorities do not match: peers that trust the same authorities would refuse it."""
    near, far = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting_context(ssl.PROTOCOL_TLS_CLIENT, tls).wrap_bio(near, far)
    server = trusting_context(ssl.PROTOCOL_TLS_SERVER, tls).wrap_bio(far, near, server_side=True)
    _complete_handshake(tls, client, server)
    return certificate_shown(client)


def certificate_shown(connection: ssl.SSLObject | ssl.SSLSocket) -> Certificate:
    """Returns the peer's certificate, on a connection that demands one."""
    return Certificate(
        identity_in(names_shown(connection, "URI")),
        frozenset(names_shown(connection, "DNS")),
        ssl.cert_time_to_seconds(cast("str", (connection.getpeercert() or {})["notAfter"])),
    )


def names_shown(
    connection: ssl.SSLObject | ssl.SSLSocket, kind: Literal["URI", "DNS"]
) -> list[str]:
    """Returns the names of one kind in the peer's certificate; none if it showed none."""
    shown = (connection.getpeercert() or {}).get("subjectAltName", ())
    return [name for of, name in cast("tuple[tuple[str, str], ...]", shown) if of == kind]


def check_role(tls: Tls | None, roles: tuple[Role, ...], server_name: str) -> Role | None:
    """Returns the certificate's role; None without TLS, where no role is needed. Raises
    `FailedPreconditionError` unless it is one of `roles` and the certificate names `server_name`,
    which peers verify."""
    if tls is None:
        return None
    certificate = read_certificate(tls)
    wanted = " or ".join(f"/baton/{role}" for role in roles)
    if certificate.identity is None or certificate.identity.role not in roles:
        found = certificate.identity or "no role"
        raise FailedPreconditionError(
            f"the certificate in {tls.cert} is for {found}; this process needs one that is "
            f"for a URI such as spiffe://example.org{wanted}"
        )
    if server_name not in certificate.names:
        raise FailedPreconditionError(
            f"the certificate in {tls.cert} is not for the DNS name {server_name}, by which others "
            "know this process"
        )
    return certificate.identity.role


def watched(tls: Tls) -> PemFiles:
    """Returns the files, reloaded when they change; role and name of the certificate must stay.

    Raises `FailedPreconditionError` if peers would reject the certificate in them.
    """
    first: tuple[object, ...] | None = None

    def check(files: Tls) -> None:
        nonlocal first
        now = read_certificate(files)
        role = now.identity, now.names & {ROUTER_NAME, WORKER_NAME}
        if first is None:
            first = role
        elif role != first:
            raise FailedPreconditionError(f"{files.cert} is of another role or name than before")

    return PemFiles(tls, check)


def trusting_context(protocol: int, tls: Tls) -> ssl.SSLContext:
    """Returns a TLS context that demands a certificate of any name and shows that of `tls`, if any.
    Raises `FailedPreconditionError` if the files do not match or cannot be read."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        if tls.cert is not None:
            # An encrypted key fails here instead of asking for its password.
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
        context.load_verify_locations(tls.ca)
    except OSError as error:  # includes ssl.SSLError
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise FailedPreconditionError(
            f"{tls.cert}, {tls.key} and {tls.ca} are no certificate, its key and authorities: "
            f"{str(reason).replace('_', ' ').lower()}"
        ) from error
    return context


def _complete_handshake(tls: Tls, client: ssl.SSLObject, server: ssl.SSLObject) -> None:
    try:
        for _ in range(_MAX_ROUNDS):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or str(error)
        raise FailedPreconditionError(
            f"the authorities in {tls.ca} do not verify the certificate in {tls.cert}: {reason}"
        ) from error
