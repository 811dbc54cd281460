"""Tenant of a call, determined by its credentials alone.

The tenant in the caller's certificate (mutual TLS) takes precedence; else the token decides, by a
file that holds tokens only as hashes. A caller without either is refused, or is `DEFAULT_TENANT`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from baton.errors import UnauthenticatedError
from baton.rpc.watched_files import WatchedFiles
from baton.serving.grpc.access import Connected, identity_of
from baton.serving.tokens import Tokens, owner_of, read_tokens

DEFAULT_TENANT = "default"

_METADATA_KEY = "authorization"
_BEARER = re.compile(r"bearer +(?P<token>.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant of a request.

    Attributes:
        salt: part of the chain hashes of cached blocks; tenants of other salts find none of them.
    """

    name: str = DEFAULT_TENANT
    salt: bytes = b""

    def salted(self, text: str) -> "Tenant":
        """Returns the tenant with a salt of its own for this text; an empty one changes nothing."""
        if not text:
            return self
        return replace(self, salt=hashlib.sha256(self.salt + b"/" + text.encode()).digest())


class Caller(Connected, Protocol):
    """Caller of a request; `grpc.aio.ServicerContext` implements it."""

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]] | None": ...


class Tenants:
    """Tenants by token. Without tokens, callers without a tenant's certificate share one tenant."""

    def __init__(
        self,
        tokens: Callable[[], Tokens] | None = None,
        *,
        share_prefixes: bool = False,
        needs_token: bool = False,
    ) -> None:
        """Takes `tokens`, which returns the valid ones; None: tokens are ignored. `share_prefixes`:
        tenants share cached prefixes. `needs_token`: calls without a token are refused, unless
        their certificate names a tenant or is an administrator's."""
        self._tokens = tokens
        self._share_prefixes = share_prefixes
        self._needs_token = needs_token

    @classmethod
    def read(
        cls, path: Path, *, share_prefixes: bool = False, needs_token: bool = False
    ) -> "Tenants":
        """Returns the tenants of a token file (`baton.serving.tokens`), which is reloaded when it
        changes: a removed token is refused a second later.

        Raises `FailedPreconditionError`, naming the line, if the file cannot be parsed.
        """
        file = WatchedFiles([path], partial(read_tokens, path))
        return cls(file.current, share_prefixes=share_prefixes, needs_token=needs_token)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tenants that have a token."""
        return frozenset() if self._tokens is None else frozenset(self._tokens().values())

    def of(self, call: Caller) -> Tenant:
        """Returns the tenant of a call. Raises `UnauthenticatedError` for an unknown token, and for
        a missing one where one is needed."""
        name = self._name(call)
        # The default tenant shares prefixes with a cluster without tenants.
        is_isolated = name != DEFAULT_TENANT and not self._share_prefixes
        return Tenant(name, hashlib.sha256(name.encode()).digest() if is_isolated else b"")

    def _name(self, call: Caller) -> str:
        identity = identity_of(call)
        if identity is not None and identity.tenant is not None:
            return identity.tenant
        token = _token_of(call)
        if token is None and self._needs_token and not is_administrator(call):
            raise UnauthenticatedError("a token is needed here: authorization: Bearer TOKEN")
        if token is None or self._tokens is None:
            return DEFAULT_TENANT
        return owner_of(token, self._tokens())


def is_administrator(call: Caller) -> bool:
    """Returns whether a call's certificate is an administrator's, and no token names a tenant."""
    identity = identity_of(call)
    return identity is not None and identity.role == "admin" and _token_of(call) is None


def _token_of(call: Caller) -> str | None:
    for key, value in call.invocation_metadata() or ():
        if key == _METADATA_KEY and isinstance(value, str):
            match = _BEARER.fullmatch(value.strip())
            return None if match is None else match["token"]
    return None
