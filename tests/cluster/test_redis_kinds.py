"""Workers and routers over every kind of Redis there is: each a real one, each failing for real."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.notices import Notices
from baton.cluster.publisher import EventPublisher
from baton.cluster.redis import check_answers, connect, transact
from baton.cluster.registry import Registration, WorkerRecord
from baton.cluster.subscriber import EventSubscriber
from baton.cluster.watcher import RegistryWatcher
from baton.errors import InvalidArgumentError, UnavailableError
from tests.support.redis_servers import (
    Certificates,
    RedisServer,
    Replicated,
    redis_cluster,
    sentinels,
    system_redis,
)
from tests.support.waiting import until

BLOCKS = [bytes([number]) * 16 for number in range(1, 21)]
RECORD = WorkerRecord(
    "w", "prefill", "a:1", "a:2", 7, "tiny", b"f", b"l", b"t", "float32", 16, 512, 64
)

# What the documentation says a user of Baton must be allowed.
LEAST_RIGHTS = (
    "~{baton}:* +ping +info +select +multi +exec +eval +smembers +sadd +srem +hgetall +hget +hset "
    "+hdel +del +expire +pexpire +set +getrange +setrange +xadd +xread +xrevrange +xtrim"
)


class Cluster:
    """A worker's side and a router's, each with a client of its own."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        ours, theirs = connect(url), connect(url)
        self.index = LocalityIndex()
        self.publisher = EventPublisher(ours, "w", RECORD.epoch, refresh_interval=0.2)
        self.registration = Registration(ours, RECORD, interval=0.1)
        self.watcher = RegistryWatcher(theirs, lambda *_: None, interval=0.1)
        self.subscriber = EventSubscriber(theirs, self.index)
        self.subscriber.follow("w", RECORD.epoch)
        stack.push_async_callback(ours.aclose)
        stack.push_async_callback(theirs.aclose)
        self.router, other = (
            Notices(redis, name, name.encode, interval=0.1)
            for redis, name in ((ours, "ours"), (theirs, "theirs"))
        )
        loops = (self.publisher, self.registration, self.watcher, self.subscriber)
        for loop in (*loops, self.router, other):
            loop.start()
            stack.push_async_callback(loop.stop)

    def knows(self, num_blocks: int) -> bool:
        """Whether the router has all that the worker has said so far, and the worker's record."""
        found = self.index.match(BLOCKS) == {"w": num_blocks}
        hears = self.router.others == [b"theirs"]
        return found and hears and dict(self.watcher.records) == {"w": RECORD}

    @property
    def is_stale(self) -> bool:
        return self.watcher.stale or self.subscriber.stale


@asynccontextmanager
async def working(url: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(url, stack)


@pytest.fixture(params=[sentinels, redis_cluster])
def replicated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replicated]:
    with request.param(tmp_path) as running:
        yield running


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
async def test_after_a_failover_all_goes_on_with_the_promoted_replica(
    replicated: Replicated, signum: int
) -> None:
    check_answers(replicated.url)
    async with working(replicated.url) as cluster:
        cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
        await until(lambda: cluster.knows(3), within=10.0)
        replicated.master.signal(signum)
        cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[3:5])))
        await asyncio.to_thread(replicated.until_promoted)
        cluster.publisher.publish(KvEvents(stored=(BLOCKS[5],)))
        await until(lambda: cluster.knows(6) and not cluster.is_stale, within=15.0)
        newcomer = connect(replicated.url)
        assert await transact(newcomer, ("SMEMBERS", "{baton}:workers")) == [{b"w"}]
        await newcomer.aclose()
        assert replicated.replica.info("keyspace")["db0"]["keys"] >= 4


@pytest.mark.slow
async def test_a_master_that_returns_as_a_replica_is_not_written_to(replicated: Replicated) -> None:
    async with working(replicated.url) as cluster:
        await until(lambda: cluster.watcher.records, within=10.0)
        replicated.master.kill()
        await asyncio.to_thread(replicated.until_promoted)
        await until(lambda: not cluster.is_stale, within=15.0)
        replicated.master.start()
        cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[:4])))
        await until(lambda: cluster.knows(4), within=15.0)


async def test_a_cluster_is_used_by_any_of_its_nodes(tmp_path: Path) -> None:
    """One node is enough of a cluster here. The URL has another one that is not there, too."""
    server = RedisServer(tmp_path, "--save", "", "--cluster-enabled", "yes")
    try:
        server.ask("CLUSTER", "ADDSLOTS", *range(16384))
        rights = [*LEAST_RIGHTS.split(), "+cluster|slots"]
        server.ask("ACL", "SETUSER", "baton", "on", ">pw", *rights)
        url = f"redis+cluster://baton:pw@127.0.0.1:1,{server.node}"
        await until(lambda: "'cluster_state': 'ok'" in str(server.ask("CLUSTER INFO")))
        check_answers(url)
        async with working(url) as cluster:
            cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
            await until(lambda: cluster.knows(3))
    finally:
        server.kill()


async def test_a_server_that_is_no_sentinel_or_no_cluster_is_an_error_that_says_so(
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path, "--save", "")
    try:
        with pytest.raises(UnavailableError, match=r"nobody says where the master is .*SENTINEL"):
            check_answers(f"redis+sentinel://{server.node}/mine")
        with pytest.raises(UnavailableError, match="cluster support disabled"):
            check_answers(f"redis+cluster://{server.node}")
    finally:
        server.kill()


@pytest.fixture
def server_with_users(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, "--save", "")
    server.ask("ACL", "SETUSER", "baton", "on", ">s3cret/?", *LEAST_RIGHTS.split())
    server.ask("ACL", "SETUSER", "default", "resetpass", ">another", "off")
    yield server
    server.kill()


async def test_a_user_with_the_least_rights_is_enough(
    server_with_users: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://baton:s3cret%2F%3F@{server_with_users.node}/0"
    check_answers(url)
    async with working(url) as cluster:
        for number in range(6):
            cluster.publisher.publish(KvEvents(stored=(BLOCKS[number],)))
            await until(lambda: cluster.knows(number + 1))  # noqa: B023
        await asyncio.sleep(0.5)  # the worker's renewals while nothing happens
        assert not cluster.is_stale
        await cluster.registration.stop()
        await until(lambda: not cluster.watcher.records)
    assert not caplog.records


@pytest.mark.parametrize("user", ["baton:wr0ng", ":wr0ng", "nobody:wr0ng"])
async def test_a_wrong_password_is_an_error_without_it(
    server_with_users: RedisServer,
    caplog: pytest.LogCaptureFixture,
    user: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://{user}@{server_with_users.node}/0"
    with pytest.raises(UnavailableError, match="invalid username-password pair") as caught:
        check_answers(url)
    async with working(url) as cluster:
        await until(lambda: caplog.text.count("going on without Redis") == 6)  # each loop
        assert cluster.is_stale
    assert "wr0ng" not in caplog.text + str(caught.value)


# TLS.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(tmp_path: Path, certificates: Certificates) -> Iterator[RedisServer]:
    options = certificates.server_options(certificates.server)
    server = RedisServer(tmp_path, "--save", "", *options, binary=system_redis())
    yield server
    server.kill()


async def test_over_tls_with_a_certificate_of_our_own(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    url = f"rediss://{tls_server.node}/0{certificates.query()}"
    async with working(url) as cluster:
        cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
        await until(lambda: cluster.knows(3), within=30.0)


async def test_a_client_without_a_certificate_is_refused_where_one_is_asked_for(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    redis = connect(f"rediss://{tls_server.node}/0?ssl_ca_certs={certificates.ca}")
    with pytest.raises((RedisError, OSError)):
        await transact(redis, ("PING",))
    await redis.aclose()


def test_a_server_whose_authority_is_unknown_is_not_talked_to(tls_server: RedisServer) -> None:
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        check_answers(f"rediss://{tls_server.node}/0")


def test_a_server_with_another_s_certificate_is_not_talked_to_unless_told_to(
    tmp_path: Path, certificates: Certificates
) -> None:
    options = certificates.server_options(certificates.elsewhere)
    server = RedisServer(tmp_path, "--save", "", *options, binary=system_redis())
    try:
        url = f"rediss://{server.node}/0{certificates.query()}"
        with pytest.raises(UnavailableError, match=r"certificate is not valid for '127\.0\.0\.1'"):
            check_answers(url)
        check_answers(f"{url}&ssl_check_hostname=false")
    finally:
        server.kill()


def test_a_key_that_does_not_belong_to_the_certificate_is_named(
    certificates: Certificates,
) -> None:
    wrong = certificates.key(certificates.server)
    with pytest.raises(InvalidArgumentError, match="ssl_certfile and ssl_keyfile cannot be used"):
        connect(f"rediss://host?ssl_certfile={certificates.client}&ssl_keyfile={wrong}")


async def eventually_done(redis: Redis, *command: str | int) -> None:
    """Shaking hands may take longer than a client waits where everybody computes."""
    for _ in range(10):
        with contextlib.suppress(RedisError, OSError):
            await redis.execute_command(*command)
            return
    raise AssertionError(f"{command} was not done")


async def test_a_cluster_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    options = (
        *certificates.server_options(certificates.server),
        *("--tls-cluster", "yes", "--cluster-enabled", "yes", "--tls-auth-clients", "yes"),
    )
    server = RedisServer(tmp_path, "--save", "", *options, binary=system_redis())
    url = f"rediss+cluster://{server.node}{certificates.query()}"
    nodes = connect(f"rediss://{server.node}{certificates.query()}")
    try:
        await eventually_done(nodes, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        async with working(url) as cluster:
            cluster.publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
            await until(lambda: cluster.knows(3), within=30.0)
    finally:
        await nodes.aclose()
        server.kill()


async def test_sentinels_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    options = (*certificates.server_options(certificates.server), "--tls-replication", "yes")
    master = RedisServer(tmp_path, "--save", "", *options, binary=system_redis())
    path = tmp_path / "sentinel.conf"
    path.write_text(f"sentinel monitor mine 127.0.0.1 {master.port} 1\n")
    sentinel = RedisServer(tmp_path, str(path), "--sentinel", *options, binary=system_redis())
    try:
        async with working(f"rediss+sentinel://{sentinel.node}/mine{certificates.query()}") as c:
            c.publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
            await until(lambda: c.knows(3), within=30.0)
    finally:
        sentinel.kill()
        master.kill()
