"""Workers and routers over every kind of Redis there is: each a real one, each failing for real.

Over TLS they are tested in `test_redis_tls.py`.
"""

import asyncio
import gc
import logging
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from baton.cluster.keys import role_lock_key
from baton.cluster.redis.address import parse_address
from baton.cluster.redis.client import check_answers, connect, transact
from baton.cluster.redis.lock import RedisLock
from baton.cluster.redis.master import MasterLookup
from baton.errors import UnavailableError
from tests.support.redis_loops import BLOCKS, working
from tests.support.redis_servers import (
    SUPPORTED,
    RedisServer,
    Replicated,
    redis_cluster,
    sentinels,
)
from tests.support.repository import ROOT
from tests.support.waiting import until, wait_until

# What the documentation says a user of Baton must be allowed.
(LEAST_RIGHTS,) = re.findall(r"~\{baton\}:\*[^`]+", (ROOT / "docs/guides/redis.md").read_text())


# All over Valkey, and over each other server the failover that ends the master.
FAILOVERS = [
    pytest.param(
        kind,
        *server.values,
        signum,
        marks=server.marks,
        id=f"{kind.__name__}-{server.id}-{signum.name}",
    )
    for kind in (sentinels, redis_cluster)
    for server in SUPPORTED
    for signum in (signal.SIGKILL, signal.SIGSTOP)
    if signum == signal.SIGKILL or server.id == "valkey"
]


@pytest.mark.parametrize(("kind", "find_binary", "signum"), FAILOVERS)
@pytest.mark.slow
@pytest.mark.e2e
async def test_loops_resume_with_promoted_replica_after_failover(
    tmp_path: Path,
    kind: Callable[[Path, Path], AbstractContextManager[Replicated]],
    find_binary: Callable[[], Path],
    signum: signal.Signals,
) -> None:
    with kind(tmp_path, find_binary()) as replicated:
        check_answers(replicated.url)
        async with working(replicated.url) as pair:
            pair.publish(BLOCKS[:3])
            await until(lambda: pair.knows(3), within=10.0)
            replicated.master.signal(signum)
            pair.publish(BLOCKS[3:5])
            await asyncio.to_thread(replicated.until_promoted)
            pair.publish(BLOCKS[5:6])
            await until(lambda: pair.knows(6) and not pair.is_stale, within=15.0)
            members = ("SMEMBERS", "{baton}:workers")
            async with connect(replicated.url) as newcomer, asyncio.timeout(10.0):
                # A replica may be promoted that lacks them; the worker adds itself again.
                while await transact(newcomer, members) != [{b"w"}]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert replicated.replica.info("keyspace")["db0"]["keys"] >= 4


@pytest.mark.parametrize("kind", [sentinels, redis_cluster])
@pytest.mark.slow
@pytest.mark.e2e
async def test_loops_do_not_write_to_old_master_when_it_returns(
    tmp_path: Path, kind: Callable[[Path], AbstractContextManager[Replicated]]
) -> None:
    with kind(tmp_path) as replicated:
        async with working(replicated.url) as pair:
            await until(lambda: pair.watcher.records, within=10.0)
            replicated.master.kill()
            await asyncio.to_thread(replicated.until_promoted)
            await until(lambda: not pair.is_stale, within=15.0)
            replicated.master.start()
            pair.publish(BLOCKS[:4])
            await until(lambda: pair.knows(4), within=15.0)


@pytest.fixture(scope="module", params=SUPPORTED)
def cluster_node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    """One node is enough of a cluster here. It needs two seconds to start."""
    folder = tmp_path_factory.mktemp("cluster-node")
    with RedisServer(folder, "--cluster-enabled", "yes", binary=request.param()) as server:
        server.ask("CLUSTER", "ADDSLOTS", *range(16384))
        wait_until(lambda: "'cluster_state': 'ok'" in str(server.ask("CLUSTER INFO")))
        yield server


async def test_loops_find_the_master_by_any_cluster_node(cluster_node: RedisServer) -> None:
    """The URL has another one that is not there, too."""
    rights = [*LEAST_RIGHTS.split(), "+cluster|slots"]
    cluster_node.ask("ACL", "SETUSER", "baton", "on", ">pw", *rights)
    url = f"redis+cluster://baton:pw@127.0.0.1:1,{cluster_node.node}"
    check_answers(url)
    async with working(url) as pair:
        pair.publish(BLOCKS[:3])
        await until(lambda: pair.knows(3), within=5.0)


async def test_cancelled_lookup_of_the_master_closes_its_connection(
    cluster_node: RedisServer,
) -> None:
    """Cancelled after each number of iterations of the event loop that it can take, and until it
    ends, as `RedisLoop` does."""
    lookup = MasterLookup(parse_address(f"redis+cluster://{cluster_node.node}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for num_iterations in range(100):
            looking = asyncio.create_task(lookup.discover_master(""))
            for _ in range(num_iterations):
                await asyncio.sleep(0)
            if looking.done():
                break
            while not looking.done():
                looking.cancel()
                await asyncio.sleep(0)
        gc.collect()
    assert await looking == ("127.0.0.1", cluster_node.port)
    assert num_iterations > 5
    assert not caught


def test_check_answers_rejects_server_of_another_kind(supported_server: RedisServer) -> None:
    node = supported_server.node
    with pytest.raises(UnavailableError, match=r"no sentinel or node names the master .*SENTINEL"):
        check_answers(f"redis+sentinel://{node}/mine")
    with pytest.raises(UnavailableError, match="cluster support disabled"):
        check_answers(f"redis+cluster://{node}")


@pytest.fixture
def server_with_users(supported_server: RedisServer) -> RedisServer:
    supported_server.ask("ACL", "SETUSER", "baton", "on", ">s3cret/?", *LEAST_RIGHTS.split())
    supported_server.ask("ACL", "SETUSER", "default", "resetpass", ">another", "off")
    return supported_server


async def test_loops_need_only_the_documented_rights(
    server_with_users: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://baton:s3cret%2F%3F@{server_with_users.node}/0"
    check_answers(url)
    async with working(url) as pair:
        for number in range(6):
            pair.publish(BLOCKS[number : number + 1])
            await until(lambda: pair.knows(number + 1), within=5.0)  # noqa: B023
        await asyncio.sleep(0.5)  # the worker's renewals while nothing happens
        assert not pair.is_stale
        assert await RedisLock(pair.client, role_lock_key(), "a").acquire(60.0)
        await pair.registration.stop()
        await until(lambda: not pair.watcher.records, within=5.0)
    assert not caplog.records


@pytest.mark.parametrize("user", ["baton:wr0ng", ":wr0ng", "stranger:wr0ng"])
async def test_wrong_password_is_named_in_no_error_or_log(
    server_with_users: RedisServer, caplog: pytest.LogCaptureFixture, user: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://{user}@{server_with_users.node}/0"
    with pytest.raises(UnavailableError, match="invalid username-password pair") as caught:
        check_answers(url)
    async with working(url) as pair:
        await until(
            lambda: caplog.text.count("continuing without Redis") == 6, within=5.0
        )  # each loop
        assert pair.is_stale
    assert "wr0ng" not in caplog.text + str(caught.value)
