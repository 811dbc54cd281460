"""Store of responses in Redis, bounded per tenant and as a whole, with a TTL.

Redis is advisory here, too: what it loses is an unknown response, and a response that cannot be
stored is answered all the same. It is not trusted with texts: a response is encrypted with a key
that only its id has, of which Redis knows the first half alone.
"""

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.keys import response_bytes_key, response_key, responses_key
from baton.cluster.redis.client import Command, prefix_of, transact, transact_each
from baton.cluster.throttled_log import ThrottledLog
from baton.errors import NotFoundError, UnavailableError
from baton_router.apis.responses.limits import ResponseLimits
from baton_router.apis.responses.store_scripts import DELETE, PUT

_logger = logging.getLogger(__name__)

# Seconds for which the end of an answer may wait until it is stored.
_PUT_SECONDS = 0.5

# Its number, by which Redis knows the response, and the secret from which its key is made.
_ID = re.compile(r"resp_([0-9a-f]{16})([0-9a-f]{32})")
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco|item)_([0-9a-f]{48})_[0-9]{1,9}")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_NONCE_BYTES = 12
_MORE_BYTES = 64  # that encryption adds, at most


class ResponseStore:
    """Store of the responses of all tenants.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
    """

    def __init__(self, redis: Redis, limits: ResponseLimits) -> None:
        self._redis = redis
        self._ttl = limits.ttl_s
        self._max_bytes = limits.max_bytes
        self._max_responses = limits.per_tenant
        self._prefix = prefix_of(redis)
        self._log = ThrottledLog(_logger)

    @property
    def is_on(self) -> bool:
        return self._ttl > 0

    async def put(self, tenant: str, response_id: str, content: bytes) -> bool:
        """Stores a response under an id of `new_response_id`; returns whether it is stored."""
        if not self.is_on or len(content) > self._max_bytes:
            return False
        place = self._place(tenant, response_id)
        ttl, now = int(1000 * self._ttl), time.time_ns() // 1_000_000
        encrypted = place.encrypted(content)
        arguments = (place.number, encrypted, ttl, now, self._max_responses, place.tenant)
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                (is_stored,) = await transact(
                    self._redis, ("EVAL", PUT, 3, *place.keys, *arguments)
                )
        except (RedisError, OSError) as error:
            self._log.warning("a response is not stored: %s", error or type(error).__name__)
            return False
        return bool(is_stored)

    async def get(self, tenant: str, response_id: str) -> bytes:
        """Returns a response of the tenant. Raises `NotFoundError`, `UnavailableError`."""
        place = self._place(tenant, response_id)
        most = self._max_bytes + _MORE_BYTES  # whatever is there
        (reply,) = await self._ask(response_id, ("GETRANGE", place.key, 0, most))
        content = place.decrypted(reply) if isinstance(reply, bytes) else None
        if content is None:
            raise self._unknown(response_id)
        return content

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response of the tenant. Raises `NotFoundError`, `UnavailableError`."""
        await self.get(tenant, response_id)
        place = self._place(tenant, response_id)
        await self._ask(response_id, ("EVAL", DELETE, 3, *place.keys, place.number, place.tenant))

    async def _ask(self, response_id: str, *commands: Command) -> list[Any]:
        try:
            return await transact_each(self._redis, *commands)
        except (RedisError, OSError) as error:
            raise UnavailableError(
                f"response {response_id!r} cannot be reached: Redis does not answer. Retry, or "
                "send the whole conversation as input."
            ) from error

    def _place(self, tenant: str, response_id: str) -> "_Place":
        """Raises `NotFoundError` for what cannot be the id of a stored response."""
        match = _ID.fullmatch(response_id)
        if not self.is_on or match is None:
            raise self._unknown(response_id)
        digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
        number, secret = match.groups()
        return _Place(digest, number, secret, self._prefix)

    def _unknown(self, response_id: str) -> NotFoundError:
        if not self.is_on:
            reason = "this router stores no responses (--responses-ttl-s 0)"
        else:
            reason = (
                f"it was not stored, was deleted, has expired (after {self._ttl:g} s) or was lost"
            )
        return NotFoundError(
            f"response {response_id[:64]!r} is unknown: {reason}. Send the whole conversation as "
            "input."
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a response in Redis. `tenant`: the digest of its name."""

    tenant: str
    number: str
    secret: str
    prefix: str

    @property
    def key(self) -> str:
        return response_key(self.tenant, self.number, self.prefix)

    @property
    def keys(self) -> tuple[str, str, str]:
        """Keys of the tenant's index, of the response, and of the bytes of all tenants."""
        tenant, prefix = self.tenant, self.prefix
        return responses_key(tenant, prefix), self.key, response_bytes_key(prefix)

    def encrypted(self, content: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher().encrypt(nonce, content, self.key.encode())

    def decrypted(self, stored: bytes) -> bytes | None:
        """Returns None for what was not encrypted under this id, or was changed."""
        nonce, encrypted = stored[:_NONCE_BYTES], stored[_NONCE_BYTES:]
        try:
            return self._cipher().decrypt(nonce, encrypted, self.key.encode())
        except (InvalidTag, ValueError):
            return None

    def _cipher(self) -> AESGCM:
        return AESGCM(hashlib.sha256(self.secret.encode()).digest())


def new_response_id(number: str) -> str:
    """Returns an id that cannot be guessed. `number`: 16 hex digits."""
    return f"resp_{number}{secrets.token_hex(16)}"


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Returns the id of an item of a response, by which the response is found."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{index}"


def input_item_id(item: Mapping[str, Any], response_id: str, index: int) -> str:
    """Returns the id of an item of a response's input that has none. `index`: after those of its
    output."""
    return item_id(_PREFIXES.get(item.get("type", ""), "item"), response_id, index)


def response_of_item(item_id: str) -> str | None:
    """Returns the id of the response that has an item; None for what is no id of an item."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"
