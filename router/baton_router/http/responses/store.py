"""Store of responses in Redis, bounded per tenant, with a TTL.

Redis is advisory here, too: what it loses is an unknown response, and a response that cannot be
stored is answered all the same.
"""

import asyncio
import hashlib
import logging
import re
import time

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.keys import response_key, responses_key
from baton.cluster.redis import prefix_of, signing_keys_of, transact, transact_each
from baton.cluster.throttled_log import ThrottledLog
from baton.errors import NotFoundError, UnavailableError

_logger = logging.getLogger(__name__)

# Seconds for which the end of an answer may wait until it is stored.
_PUT_SECONDS = 0.5

_ID = re.compile(r"resp_[0-9a-f]{16}")

# Stores a response and drops the expired ones from the index, and the oldest ones above the limit.
# Stores nothing in a Redis whose memory is half full, which registration needs more.
#   KEYS: index, response; ARGV: id, content, signature, TTL in milliseconds, now in milliseconds,
#   maximum number of responses
_PUT = """
local memory = redis.call('INFO', 'memory')
local used = tonumber(string.match(memory, 'used_memory:(%d+)')) or 0
local most = tonumber(string.match(memory, 'maxmemory:(%d+)')) or 0
if most > 0 and 2 * (used + #ARGV[2]) > most then return 0 end
local now, kept = tonumber(ARGV[5]), {}
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  local expiry = tonumber(found[i + 1]) or 0
  if expiry <= now then redis.call('HDEL', KEYS[1], found[i])
  else kept[#kept + 1] = {expiry, found[i]} end
end
table.sort(kept, function(a, b) return a[1] < b[1] end)
for i = 1, #kept - tonumber(ARGV[6]) + 1 do
  redis.call('HDEL', KEYS[1], kept[i][2])
  redis.call('DEL', KEYS[1] .. ':' .. kept[i][2])
end
redis.call('HSET', KEYS[1], ARGV[1], now + ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[2], 'content', ARGV[2], 'signature', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""


class ResponseStore:
    """Store of the responses of all tenants.

    Args:
        redis: from `baton.cluster.redis.connect`.
        ttl: seconds for which a response is kept; 0: none are stored.
        max_bytes: maximum bytes of a response with its conversation.
        max_responses: maximum number of responses of a tenant; the oldest are dropped beyond it.
    """

    def __init__(self, redis: Redis, ttl: float, max_bytes: int, max_responses: int) -> None:
        self._redis = redis
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._prefix = prefix_of(redis)
        self._signing_keys = signing_keys_of(redis)
        self._log = ThrottledLog(_logger)

    @property
    def is_on(self) -> bool:
        return self._ttl > 0

    async def put(self, tenant: str, response_id: str, content: bytes) -> bool:
        """Stores a response; returns whether it is stored."""
        if not self.is_on or len(content) > self._max_bytes:
            return False
        key = self._key(tenant, response_id)
        script = ("EVAL", _PUT, 2, responses_key(_digest(tenant), self._prefix), key)
        signature = self._signature(key, content)
        ttl, now = int(1000 * self._ttl), time.time_ns() // 1_000_000
        arguments = (response_id, content, signature, ttl, now, self._max_responses)
        try:
            async with asyncio.timeout(_PUT_SECONDS):
                (is_stored,) = await transact(self._redis, (*script, *arguments))
        except (RedisError, OSError) as error:
            self._log.warning("a response is not stored: %s", error or type(error).__name__)
            return False
        return bool(is_stored)

    async def get(self, tenant: str, response_id: str) -> bytes:
        """Returns a response of the tenant. Raises `NotFoundError`, `UnavailableError`."""
        self._check(response_id)
        key = self._key(tenant, response_id)
        try:
            (reply,) = await transact_each(self._redis, ("HGETALL", key))
        except (RedisError, OSError) as error:
            raise _unavailable(response_id) from error
        if isinstance(reply, RedisError) or not reply:
            raise self._unknown(response_id)
        content: bytes = reply.get(b"content", b"")
        signature = reply.get(b"signature", b"")
        keys = self._signing_keys
        if keys is not None and not keys.is_signed(signature, key.encode(), content):
            self._log.warning("ignoring response %s: it is not signed with our keys", response_id)
            raise self._unknown(response_id)
        return content

    async def delete(self, tenant: str, response_id: str) -> None:
        """Deletes a response of the tenant. Raises `NotFoundError`, `UnavailableError`."""
        self._check(response_id)
        index = responses_key(_digest(tenant), self._prefix)
        commands = (("DEL", self._key(tenant, response_id)), ("HDEL", index, response_id))
        try:
            num_deleted, _ = await transact_each(self._redis, *commands)
        except (RedisError, OSError) as error:
            raise _unavailable(response_id) from error
        if not num_deleted:
            raise self._unknown(response_id)

    def _key(self, tenant: str, response_id: str) -> str:
        return response_key(_digest(tenant), response_id, self._prefix)

    def _signature(self, key: str, content: bytes) -> bytes:
        keys = self._signing_keys
        return b"" if keys is None else keys.sign(key.encode(), content)

    def _check(self, response_id: str) -> None:
        """Raises `NotFoundError` for what cannot be the id of a stored response."""
        if not self.is_on or not _ID.fullmatch(response_id):
            raise self._unknown(response_id)

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


def _unavailable(response_id: str) -> UnavailableError:
    return UnavailableError(
        f"response {response_id!r} cannot be reached: Redis does not answer. Retry, or send the "
        "whole conversation as input."
    )


def _digest(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
