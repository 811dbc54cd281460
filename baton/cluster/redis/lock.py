"""Distributed lock in Redis: the holder's name under a key with a TTL."""

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.redis.client import transact

_MAX_SECONDS = 86_400  # a key of a longer TTL, or none, is no lock

# Replaces a key that cannot be a lock. The TTL is not checked if the user may not read it.
#   KEYS: lock; ARGV: name, TTL in milliseconds, maximum TTL in milliseconds
_ACQUIRE = """
local owner = redis.pcall('HGET', KEYS[1], 'name')
local ttl = redis.pcall('PTTL', KEYS[1])
if type(ttl) ~= 'number' then ttl = 0 end
local is_lock = type(owner) == 'string' and ttl >= 0 and ttl <= tonumber(ARGV[3])
if not is_lock then
  redis.call('DEL', KEYS[1])
  owner = false
end
if owner and owner ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'name', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""


class RedisLock:
    """Best-effort lock in Redis with a TTL, by key and holder. Not a fencing token.

    The TTL bounds the time for which a dead holder blocks others. The lock keeps two holders from
    acting at the same time, but does not fence a holder that was delayed beyond its TTL.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        key: key of the lock in Redis.
        name: unique name of the caller.
    """

    def __init__(self, redis: Redis, key: str, name: str) -> None:
        self._redis = redis
        self._key = key
        self._name = name

    async def acquire(self, seconds: float) -> bool:
        """Acquires or extends the lock for `seconds` from now, at most a day. Returns False if
        another caller holds it or Redis does not answer."""
        milliseconds = int(1000 * min(seconds, _MAX_SECONDS))
        try:
            (is_acquired,) = await transact(
                self._redis,
                ("EVAL", _ACQUIRE, 1, self._key, self._name, milliseconds, 1000 * _MAX_SECONDS),
            )
        except (RedisError, OSError):
            return False
        return bool(is_acquired)
