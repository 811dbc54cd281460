"""Router-to-router gossip: each router publishes a small payload periodically in a Redis hash.

The hash has one field per router. A payload begins with an increasing number, so that each reader
detects by its own clock which routers are still active. A key of a wrong type and a hash of too
many routers are replaced; too long payloads are ignored. Independent of the payloads' content.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from baton.cluster.keys import gossip_key
from baton.cluster.redis.client import prefix_of, signing_keys_of, transact
from baton.cluster.redis.loop import RedisLoop
from baton.cluster.redis.signing import check_age
from baton.cluster.throttled_log import ThrottledLog

INTERVAL = 1.0  # seconds between payloads
_MAX_AGE = 5.0  # seconds for which a payload is valid after its last change
_TTL = 60  # seconds for which the hash outlives its last change
_MAX_ROUTERS = 256
_MAX_BYTES = 1024  # of a name and its payload

# Writes the payload of one router, and returns all names and payloads.
#   KEYS: hash; ARGV: name, payload, TTL in seconds, maximum routers, maximum bytes of each
_EXCHANGE = """
local before = redis.pcall('HGETALL', KEYS[1])
if before.err or #before > 2 * ARGV[4] then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local all, found = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  if #all[i] + #all[i + 1] <= tonumber(ARGV[5]) then
    found[#found + 1] = all[i]
    found[#found + 1] = all[i + 1]
  end
end
return found
"""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Payload:
    """Payload of a router: the data in Redis, its content (None: refused), and when it changed."""

    data: bytes
    content: bytes | None
    at: float


class Gossip:
    """Gossip of one router: publishes its payload and reads those of the other routers.

    No method raises on Redis errors; payloads read before stay valid for their usual time. The
    caller owns the client.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        name: unique name of this router.
        write: returns the current payload.
        interval: seconds between payloads.
        max_age: seconds for which the last payload of a router is valid.
    """

    def __init__(
        self,
        redis: Redis,
        name: str,
        write: Callable[[], bytes],
        *,
        interval: float = INTERVAL,
        max_age: float = _MAX_AGE,
    ) -> None:
        self._redis = redis
        self._key = gossip_key(prefix_of(redis))
        self._signing_keys = signing_keys_of(redis)
        self._log = ThrottledLog(_logger)
        self._name = name
        self._write = write
        self._interval = interval
        self._max_age = max_age
        self._payloads: dict[bytes, _Payload] = {}
        self._number = 0
        self._loop = RedisLoop("gossip among routers", self._step)

    @property
    def others(self) -> list[bytes]:
        """Payloads of the other active routers."""
        oldest = time.monotonic() - self._max_age
        payloads = self._payloads.values()
        return [p.content for p in payloads if p.content is not None and p.at >= oldest]

    def start(self) -> None:
        """Starts publishing and reading in the background. Needs a running event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops. The last payload stays valid for other routers until its time is over."""
        await self._loop.stop()

    async def _step(self) -> float:
        self._number += 1
        data = self._signed(str(self._number).encode() + b" " + self._write())
        limits = (_TTL, _MAX_ROUTERS, _MAX_BYTES)
        (found,) = await transact(
            self._redis, ("EVAL", _EXCHANGE, 1, self._key, self._name, data, *limits)
        )
        self._receive(dict(zip(found[::2], found[1::2], strict=True)))
        expired = [router for router, p in self._payloads.items() if self._is_expired(p)]
        if expired:
            await transact(self._redis, ("HDEL", self._key, *expired))
        return self._interval

    def _receive(self, found: dict[bytes, bytes]) -> None:
        now, own = time.monotonic(), self._name.encode()
        for router, data in found.items():
            known = self._payloads.get(router)
            if router != own and (known is None or known.data != data):
                self._payloads[router] = _Payload(data, self._content(router, data), now)
        self._payloads = {router: p for router, p in self._payloads.items() if router in found}

    def _signed(self, data: bytes) -> bytes:
        """Returns `data`, with the time and a signature if there are keys."""
        if self._signing_keys is None:
            return data
        data += b" " + str(time.time_ns() // 1_000_000).encode()
        signature = self._signing_keys.sign(self._key.encode(), self._name.encode(), data)
        return data + b" " + signature.hex().encode()

    def _content(self, router: bytes, data: bytes) -> bytes | None:
        """Returns the payload in `data`; None if it is not signed as needed."""
        if self._signing_keys is None:
            return data.partition(b" ")[2]
        try:
            signed, signature = data.rsplit(b" ", 1)
            numbered, signed_at = signed.rsplit(b" ", 1)
            given = bytes.fromhex(signature.decode())
            if not self._signing_keys.is_signed(given, self._key.encode(), router, signed):
                raise ValueError("its signature is of another key, or it was changed")
            check_age(int(signed_at))
        except ValueError as error:
            self._log.warning("ignoring the gossip of router %r: %s", router, error)
            return None
        return numbered.partition(b" ")[2]

    def _is_expired(self, payload: _Payload) -> bool:
        return payload.at + 2 * self._max_age < time.monotonic()
