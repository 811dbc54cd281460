"""Whose a call is: told by the credentials it came with, and by nothing that it says.

Of a caller that has shown a certificate (mutual TLS) the tenant is the certificate's identity; else
it is what the token it bears was given to, in a file that holds tokens only as hashes; of a caller
without either, `DEFAULT_TENANT`.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.errors import FailedPreconditionError, UnauthenticatedError

DEFAULT_TENANT = "default"

_METADATA_KEY = "authorization"
_BEARER = re.compile(r"bearer +(?P<token>.+)", re.IGNORECASE)
_LINE = re.compile(r"(?P<hash>[0-9a-fA-F]{64})\s+(?P<tenant>\S{1,64})")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose something is.

    Attributes:
        salt: goes into the chain hashes of what is cached; who has another one finds none of it.
    """

    name: str = DEFAULT_TENANT
    salt: bytes = b""


class Caller(Protocol):
    """What is asked of a call; `grpc.aio.ServicerContext` has it."""

    def peer_identities(self) -> Iterable[bytes] | None: ...

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]] | None": ...


class Tenants:
    """Who bears which token. Without any, all callers that show no certificate are one tenant."""

    def __init__(
        self, name_of: Mapping[bytes, str] | None = None, *, share_prefixes: bool = False
    ) -> None:
        """`name_of`: a tenant's by the SHA-256 of each token. `share_prefixes`: what is cached for
        one tenant is found for all."""
        self._name_of = dict(name_of or {})
        self._share_prefixes = share_prefixes

    @classmethod
    def read(cls, path: Path, *, share_prefixes: bool = False) -> "Tenants":
        """From a file of lines `SHA-256 TENANT`; `#` begins a comment.

        Raises `FailedPreconditionError`, naming the line, for a file that cannot be read so.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPreconditionError(f"cannot read the tenants in {path}: {error}") from error
        name_of = {}
        for number, line in enumerate(lines, 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            match = _LINE.fullmatch(content)
            if match is None:
                raise FailedPreconditionError(
                    f"{path}:{number} is no line of a token's SHA-256 in hex and a tenant of at "
                    "most 64 characters"
                )
            name_of[bytes.fromhex(match["hash"])] = match["tenant"]
        return cls(name_of, share_prefixes=share_prefixes)

    def of(self, call: Caller) -> Tenant:
        """The tenant of a call. Raises `UnauthenticatedError` for a token that nobody was given."""
        name = self._name(call)
        # The prefixes of the default one are those of a cluster without tenants.
        is_apart = name != DEFAULT_TENANT and not self._share_prefixes
        return Tenant(name, hashlib.sha256(name.encode()).digest() if is_apart else b"")

    def _name(self, call: Caller) -> str:
        identities = sorted(call.peer_identities() or ())
        if identities:
            return identities[0].decode(errors="replace")
        token = _token_of(call)
        if token is None or not self._name_of:
            return DEFAULT_TENANT
        return self._name_with(hashlib.sha256(token.encode()).digest())

    def _name_with(self, shown: bytes) -> str:
        """Compares with every hash, in the same time whichever it is."""
        found = None
        for known, tenant in self._name_of.items():
            if hmac.compare_digest(known, shown):
                found = tenant
        if found is None:
            raise UnauthenticatedError("the token of this call is not known here")
        return found


def _token_of(call: Caller) -> str | None:
    for key, value in call.invocation_metadata() or ():
        if key == _METADATA_KEY and isinstance(value, str):
            match = _BEARER.fullmatch(value.strip())
            return None if match is None else match["token"]
    return None
