"""One router at a time, over Redis: a name under a key that expires."""

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.redis import transact

_TAKE = """
local owner = redis.call('HGET', KEYS[1], 'name')
if owner and owner ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'name', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""


class RedisLock:
    """Best-effort lock in Redis with a TTL, by key and holder. Not a fencing token.

    Whoever has it keeps it for a time and no longer, so that nobody's death blocks the others. It
    keeps two from doing the same at once; it is no fence for what one does that was held up.

    Args:
        redis: from `baton.cluster.redis.connect`.
        key: in Redis.
        name: of the caller, and of no other.
    """

    def __init__(self, redis: Redis, key: str, name: str) -> None:
        self._redis = redis
        self._key = key
        self._name = name

    async def take(self, seconds: float) -> bool:
        """Whether it is the caller's now, for so many seconds from here on. It is nobody's where
        Redis does not answer."""
        try:
            (taken,) = await transact(
                self._redis, ("EVAL", _TAKE, 1, self._key, self._name, int(1000 * seconds))
            )
        except (RedisError, OSError):
            return False
        return bool(taken)
