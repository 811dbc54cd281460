"""Settings of a process's connection to Redis."""

from dataclasses import dataclass

from redis.asyncio import Redis

from baton.cluster.redis.address import with_password
from baton.cluster.redis.client import connect
from baton.cluster.redis.round_trips import RoundTrips
from baton.cluster.redis.signing import signing_keys
from baton.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Settings of a process's connection to Redis."""

    url: str | None = setting(
        None,
        "Redis for shared state, such as redis://127.0.0.1:6379/0; also "
        "redis+sentinel://host,host/service, redis+cluster://host,host, rediss (TLS) for redis in "
        "each, and unix:///path. Append ?prefix=NAME to keep several clusters on one Redis apart. "
        "Give a URL with a password as BATON_REDIS_URL, not as a flag.",
    )
    password: str | None = setting(
        None,
        "Password of --redis-url, as it is: nothing in it is escaped. Give it as "
        "BATON_REDIS_PASSWORD, not as a flag. Unset: the one in the URL.",
        is_secret=True,
    )
    signing_key_file: str | None = setting(
        None,
        "File of keys that sign what this process writes to Redis: one of 32 characters or more a "
        "line, as `openssl rand -hex 32` makes them. The first one signs, all of them verify; "
        "records, events and gossip that none has signed are ignored. Give all routers and workers "
        "one file. Unset: nothing is signed or verified.",
    )

    def connect(self, round_trips: RoundTrips) -> Redis | None:
        """Returns a client as `baton.cluster.redis.client.connect` does; None without a URL.

        Raises `InvalidArgumentError` if the URL is not one of Redis, `FailedPreconditionError` if
        the keys cannot be used.
        """
        keys = signing_keys(self.signing_key_file)
        if self.url is None:
            return None
        return connect(with_password(self.url, self.password), round_trips, keys)
