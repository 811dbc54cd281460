"""Tenant of a call, determined by its credentials and by nothing else that it says.

Of a caller that has shown a certificate (mutual TLS) which names a tenant, it is that one; else it
is what the token it bears was given to, in a file that holds tokens only as hashes; a caller
without either is refused, or is `DEFAULT_TENANT`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.errors import UnauthenticatedError
from baton.serving.access import Connected, identity_of
from baton.serving.tokens import Tokens, owner_of, read_tokens
from baton.watched_files import WatchedFiles

DEFAULT_TENANT = "default"

_METADATA_KEY = "authorization"
_BEARER = re.compile(r"bearer +(?P<token>.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant of a request.

    Attributes:
        salt: goes into the chain hashes of what is cached; who has another one finds none of it.
    """

    name: str = DEFAULT_TENANT
    salt: bytes = b""


class Caller(Connected, Protocol):
    """Caller of a request; `grpc.aio.ServicerContext` implements it."""

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]] | None": ...


class Tenants:
    """Tenants by token. Without tokens, all callers whose certificate names no tenant are one."""

    def __init__(
        self,
        tokens: Callable[[], Tokens] | None = None,
        *,
        share_prefixes: bool = False,
        needs_token: bool = False,
    ) -> None:
        """`tokens`: those that hold now; None: of what callers bear nothing is asked.
        `share_prefixes`: what is cached for one tenant is found for all. `needs_token`: a call
        without one is refused, unless an administrator's certificate was shown."""
        self._tokens = tokens
        self._share_prefixes = share_prefixes
        self._needs_token = needs_token

    @classmethod
    def read(
        cls, path: Path, *, share_prefixes: bool = False, needs_token: bool = False
    ) -> "Tenants":
        """From a file (`baton.serving.tokens`), which is read again once it has changed: a token
        that is taken out of it is refused a second later.

        Raises `FailedPreconditionError`, naming the line, for a file that cannot be read so.
        """
        file = WatchedFiles([path], partial(read_tokens, path))
        return cls(file.current, share_prefixes=share_prefixes, needs_token=needs_token)

    def of(self, call: Caller) -> Tenant:
        """The tenant of a call. Raises `UnauthenticatedError` for a token that nobody was given,
        and for none where one is needed."""
        name = self._name(call)
        # The prefixes of the default one are those of a cluster without tenants.
        is_apart = name != DEFAULT_TENANT and not self._share_prefixes
        return Tenant(name, hashlib.sha256(name.encode()).digest() if is_apart else b"")

    def _name(self, call: Caller) -> str:
        identity = identity_of(call)
        if identity is not None and identity.tenant is not None:
            return identity.tenant
        token = _token_of(call)
        is_admin = identity is not None and identity.role == "admin"
        if token is None and self._needs_token and not is_admin:
            raise UnauthenticatedError("a token is needed here: authorization: Bearer TOKEN")
        if token is None or self._tokens is None:
            return DEFAULT_TENANT
        return owner_of(token, self._tokens())


def _token_of(call: Caller) -> str | None:
    for key, value in call.invocation_metadata() or ():
        if key == _METADATA_KEY and isinstance(value, str):
            match = _BEARER.fullmatch(value.strip())
            return None if match is None else match["token"]
    return None
