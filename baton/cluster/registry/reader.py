"""Registry reader: reads ids and records from Redis, bounded in number and in size.

A key of a wrong type or of too large a size costs only its own record: scripts check both in Redis,
so that the reader never receives the content. Independent of the records' meaning.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence

from redis.asyncio import Redis

from baton.cluster.keys import record_key, workers_key
from baton.cluster.redis.client import Command, prefix_of, transact
from baton.cluster.registry.registry import MAX_ID_BYTES

Fields = Mapping[bytes, bytes]

_MAX_IDS = 4096  # ids read at once; if there are more, a random choice of them each time
_MAX_FIELDS = 64
_MAX_RECORD_BYTES = 65_536
_CHUNK = 64  # records in one reply

# The scripts use no command beyond those that Baton used before: users of access lists stay valid.

# Returns some members of the set, beginning at a random one, without too long ones; 0 if the key is
# of another type.
#   KEYS: set; ARGV: maximum number, maximum bytes of each, random number
_READ_IDS = """
local all = redis.pcall('SMEMBERS', KEYS[1])
if all.err then return 0 end
local ids = {}
for i = 1, math.min(#all, tonumber(ARGV[1])) do
  local id = all[(ARGV[3] + i) % #all + 1]
  if #id <= tonumber(ARGV[2]) then ids[#ids + 1] = id end
end
return ids
"""

# Returns for each key the fields and values of its hash, or the reason why it cannot be a record;
# an empty reply if there is no such key.
#   KEYS: hashes; ARGV: maximum number of fields, maximum bytes of all
_READ_RECORDS = """
local found = {}
for i, key in ipairs(KEYS) do
  local all, size = redis.pcall('HGETALL', key), 0
  if all.err then found[i] = 'its key cannot be read: ' .. all.err
  elseif #all > 2 * ARGV[1] then found[i] = 'it has too many fields'
  else
    for _, part in ipairs(all) do size = size + #part end
    found[i] = size > tonumber(ARGV[2]) and 'it has ' .. size .. ' bytes' or all
  end
end
return found
"""


class RegistryReader:
    """Registry reader of one client. Makes one round trip for each `_CHUNK` records."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._prefix = prefix_of(redis)
        self._workers_key = workers_key(self._prefix)

    async def ids(self) -> list[bytes] | None:
        """Returns the listed ids; None if the list is a key of another type.

        Raises:
            redis.exceptions.RedisError, OSError: within the timeouts.
        """
        limits = (_MAX_IDS, MAX_ID_BYTES, random.randrange(2**31))  # noqa: S311
        (found,) = await transact(self._redis, ("EVAL", _READ_IDS, 1, self._workers_key, *limits))
        return None if isinstance(found, int) else list(found)

    async def records(self, workers: Sequence[str]) -> dict[str, Fields | str]:
        """Returns the fields of each worker's record, or the reason why it can be none. Omits
        workers without a record. Lets other tasks run after each `_CHUNK` records.

        Raises:
            redis.exceptions.RedisError, OSError: within the timeouts.
        """
        found: dict[str, Fields | str] = {}
        for start in range(0, len(workers), _CHUNK):
            chunk = workers[start : start + _CHUNK]
            keys = [record_key(worker, self._prefix) for worker in chunk]
            limits = (_MAX_FIELDS, _MAX_RECORD_BYTES)
            command: Command = ("EVAL", _READ_RECORDS, len(keys), *keys, *limits)
            (replies,) = await transact(self._redis, command)
            for worker, reply in zip(chunk, replies, strict=True):
                if isinstance(reply, bytes):
                    found[worker] = reply.decode()
                elif reply:
                    found[worker] = dict(zip(reply[::2], reply[1::2], strict=True))
            await asyncio.sleep(0)
        return found
