"""Access control of gRPC services, by the role in the caller's certificate.

A role is the path of a URI that the certificate is for, in the form of SPIFFE:
`spiffe://any-domain/baton/router`. `baton.serving.network_topology` has the connections between
processes.
"""

import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import grpc
from grpc_status import rpc_status

from baton.errors import BatonError, PermissionDeniedError, UnauthenticatedError
from baton.serving.grpc.errors import status_of
from baton.serving.grpc.interceptors import Context, Continuation, Handler, guarded

Role = Literal["client", "router", "encode", "prefill", "decode", "worker", "admin"]
"""`worker`: all roles of a worker; such a worker may change its role."""

# DNS names in the certificates of every worker, and of every router.
WORKER_NAME = "baton-worker"
ROUTER_NAME = "baton-router"

_WORKERS: tuple[Role, ...] = ("encode", "prefill", "decode", "worker")

INFERENCE = "baton.v1.Inference"
"""Name of the service that clients call; over HTTP, too."""

CALLERS: dict[str, tuple[Role, ...]] = {
    INFERENCE: ("client", "admin"),
    "baton.v1.Encode": ("router",),
    "baton.v1.Prefill": ("router",),
    "baton.v1.Decode": ("router",),
    "baton.v1.KvSharing": ("router",),
    "baton.v1.KvTransfer": _WORKERS,
    "baton.v1.EncoderTransfer": _WORKERS,
    "baton.v1.Admin": ("admin", "router"),
    # A gateway that asks for endpoints: it passes on what clients sent.
    "envoy.service.ext_proc.v3.ExternalProcessor": ("client", "admin"),
}
"""Roles that may call each service."""

ANY_CALLER = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)
"""Services that need no role: every connected peer may call them."""

_URI = re.compile(
    r"spiffe://[^/]+/baton/(?P<role>[a-z]+)(?:/(?P<tenant>[A-Za-z0-9._-]{1,64}))?", re.ASCII
)


class Connected(Protocol):
    """Connection of a call; `grpc.aio.ServicerContext` implements it."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity in a certificate.

    Attributes:
        tenant: tenant of all calls of a client; None: its token names the tenant, if any.
    """

    role: Role
    tenant: str | None = None

    def __str__(self) -> str:
        return self.role if self.tenant is None else f"{self.role} of {self.tenant}"


def identity_in(uris: Iterable[str]) -> Identity | None:
    """Returns the identity that a certificate's `uris` name; None if they name none, or several."""
    found = set(_identities(uris))
    return found.pop() if len(found) == 1 else None


def _identities(uris: Iterable[str]) -> Iterator[Identity]:
    for uri in uris:
        match = _URI.fullmatch(uri)
        if match is None:
            continue
        for role in get_args(Role):
            if role == match["role"] and (role == "client" or match["tenant"] is None):
                yield Identity(role, match["tenant"])


def identity_of(call: Connected) -> Identity | None:
    """Returns the identity in the caller's certificate; None too if the caller showed none."""
    uris = call.auth_context().get("peer_uri", ())
    return identity_in(uri.decode(errors="replace") for uri in uris)


class Access:
    """Access check of gRPC calls: the caller's role must be among the service's `CALLERS`."""

    def __init__(self, by_token: Collection[str] = ()) -> None:
        """Exempts the services `by_token`, whose callers authenticate by a token."""
        self._by_token = by_token

    def check(self, call: Connected, service: str) -> None:
        """Raises `UnauthenticatedError` if the caller has no role, and `PermissionDeniedError` if
        its role may not call `service`."""
        if service in ANY_CALLER or service in self._by_token:
            return
        roles = CALLERS.get(service, ())
        needed = f"{service} is for {' and '.join(roles) or 'no role'}"
        identity = identity_of(call)
        if identity is None:
            raise UnauthenticatedError(
                f"{needed}; this connection has shown no certificate with a role, which is a URI "
                "such as spiffe://example.org/baton/client"
            )
        if identity.role not in roles:
            raise PermissionDeniedError(f"{needed}; the certificate shown is for {identity.role}")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that rejects unauthorized calls before they reach their handler."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.split("/")[1]
        if handler is None or service in ANY_CALLER:
            return handler
        return guarded(handler, lambda context: self._checked(context, service))

    @asynccontextmanager
    async def _checked(self, context: Context, service: str) -> AsyncIterator[None]:
        try:
            self._access.check(context, service)
        except BatonError as error:
            await context.abort_with_status(rpc_status.to_status(status_of(error)))
        yield
