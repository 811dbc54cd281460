"""Bearer tokens: random, shown once, and stored only as hashes in a file of lines

    SHA-256 TENANT     # comment

Tokens are long and random, so that a plain hash reveals nothing of them.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from baton.errors import FailedPreconditionError, InvalidArgumentError, UnauthenticatedError

MAX_NAME_CHARS = 64

Tokens: TypeAlias = Mapping[bytes, str]
"""Tenant of each token, by the token's SHA-256."""

# Secret scanners recognize tokens by it.
_PREFIX = "baton_"
_NUM_BYTES = 32
_NAME = rf"[^\s#]{{1,{MAX_NAME_CHARS}}}"
_LINE = re.compile(rf"(?P<hash>[0-9a-fA-F]{{64}})\s+(?P<tenant>{_NAME})")


def new_token(tenant: str) -> tuple[str, str]:
    """Returns a new token, and the line of a token file that gives it to the tenant.

    Raises `InvalidArgumentError` for a name that such a line cannot hold.
    """
    if re.fullmatch(_NAME, tenant) is None:
        problem = f"is {tenant!r}; must be 1 to {MAX_NAME_CHARS} characters, no space and no #"
        raise InvalidArgumentError("tenant", problem)
    token = _PREFIX + secrets.token_urlsafe(_NUM_BYTES)
    return token, f"{_hash_of(token).hex()} {tenant}"


def read_tokens(path: Path) -> Tokens:
    """Returns a file's tokens. Raises `FailedPreconditionError`, naming a line that is invalid."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPreconditionError(f"cannot read the tenants in {path}: {error}") from error
    tokens = {}
    for number, line in enumerate(lines, 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise FailedPreconditionError(
                f"{path}:{number} is no line of a token's SHA-256 in hex and a tenant of at most "
                f"{MAX_NAME_CHARS} characters"
            )
        tokens[bytes.fromhex(match["hash"])] = match["tenant"]
    return tokens


def owner_of(token: str, tokens: Tokens) -> str:
    """Returns the token's tenant, in constant time: it is compared with every hash. Raises
    `UnauthenticatedError` for an unknown token."""
    shown, found = _hash_of(token), None
    for known, tenant in tokens.items():
        if hmac.compare_digest(known, shown):
            found = tenant
    if found is None:
        raise UnauthenticatedError("the token of this call is not known here")
    return found


def _hash_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
