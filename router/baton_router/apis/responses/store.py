"""Store of responses in Redis, bounded per tenant, with a TTL.

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

from baton.cluster.keys import response_key, responses_key
from baton.cluster.redis.client import Command, prefix_of, transact, transact_each
from baton.cluster.throttled_log import ThrottledLog
from baton.errors import NotFoundError, UnavailableError
from baton_router.apis.responses.limits import ResponseLimits

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

# Stores a response and drops the expired ones from the index, and the oldest ones above the limit.
# Stores nothing in a Redis whose memory is half full, which registration needs more.
#   KEYS: index, response; ARGV: number, content, TTL in milliseconds, now in milliseconds, maximum
#   number of responses
_PUT = """
local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)')) or 0
local most = tonumber(string.match(memory, 'maxmemory:(%d+)')) or 0
if most > 0 and 2 * (used + #ARGV[2]) > most then return 0 end
local now, kept = tonumber(ARGV[4]), {}
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  local expiry = tonumber(found[i + 1]) or 0
  if expiry <= now then redis.call('HDEL', KEYS[1], found[i])
  else kept[#kept + 1] = {expiry, found[i]} end
end
table.sort(kept, function(a, b) return a[1] < b[1] end)
for i = 1, #kept - tonumber(ARGV[5]) + 1 do
  redis.call('HDEL', KEYS[1], kept[i][2])
  redis.call('DEL', KEYS[1] .. ':' .. kept[i][2])
end
redis.call('HSET', KEYS[1], ARGV[1], now + ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""


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
        arguments = (place.number, place.encrypted(content), ttl, now, self._max_responses)
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                (is_stored,) = await transact(
                    self._redis, ("EVAL", _PUT, 2, place.index, place.key, *arguments)
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
        await self._ask(response_id, ("DEL", place.key), ("HDEL", place.index, place.number))

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
        index = responses_key(digest, self._prefix)
        return _Place(index, response_key(digest, number, self._prefix), number, secret)

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
    """Place of a response in Redis: the keys of its tenant's index and of itself."""

    index: str
    key: str
    number: str
    secret: str

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
