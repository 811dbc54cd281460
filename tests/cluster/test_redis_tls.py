"""Workers and routers over TLS, with certificates that openssl makes, and the system's Redis."""

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.redis.client import check_answers, connect, transact
from baton.errors import InvalidArgumentError, UnavailableError
from tests.support.redis_loops import BLOCKS, working
from tests.support.redis_servers import Certificates, RedisServer, system_redis
from tests.support.waiting import until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def started(tmp_path: Path, certificates: Certificates) -> Callable[..., RedisServer]:
    """Starts servers, with the certificate of a server on loopback by default."""
    with ExitStack() as stack:

        def start(*arguments: str, certificate: Path = certificates.server) -> RedisServer:
            options = certificates.server_options(certificate)
            server = RedisServer(tmp_path, *arguments, *options, binary=system_redis())
            return stack.enter_context(server)

        yield start


async def exchanges_blocks(url: str) -> None:
    async with working(url) as pair:
        pair.publish(BLOCKS[:3])
        await until(lambda: pair.knows(3), within=30.0)


async def test_loops_run_over_tls_with_a_client_certificate(started, certificates) -> None:
    await exchanges_blocks(f"rediss://{started().node}/0{certificates.query()}")


async def test_server_rejects_client_without_a_certificate(started, certificates) -> None:
    redis = connect(f"rediss://{started().node}/0?ssl_ca_certs={certificates.ca}")
    with pytest.raises((RedisError, OSError)):
        await transact(redis, ("PING",))
    await redis.aclose()


def test_client_rejects_server_of_unknown_authority(started) -> None:
    with pytest.raises(UnavailableError, match="certificate verify failed"):
        check_answers(f"rediss://{started().node}/0")


def test_client_checks_host_name_unless_told_not_to(started, certificates) -> None:
    server = started(certificate=certificates.elsewhere)
    url = f"rediss://{server.node}/0{certificates.query()}"
    with pytest.raises(UnavailableError, match=r"certificate is not valid for '127\.0\.0\.1'"):
        check_answers(url)
    check_answers(f"{url}&ssl_check_hostname=false")


def test_url_with_key_of_another_certificate_is_rejected(certificates) -> None:
    wrong = certificates.key(certificates.server)
    with pytest.raises(InvalidArgumentError, match="ssl_certfile and ssl_keyfile cannot be used"):
        connect(f"rediss://host?ssl_certfile={certificates.client}&ssl_keyfile={wrong}")


async def eventually_done(redis: Redis, *command: str | int) -> None:
    """Repeats a command: on a busy machine a TLS handshake may outlast the client's timeout."""
    for _ in range(10):
        with contextlib.suppress(RedisError, OSError):
            await redis.execute_command(*command)
            return
    raise AssertionError(f"{command} was not done")


async def test_loops_run_over_a_cluster_with_tls(started, certificates) -> None:
    options = ("--tls-cluster", "yes", "--cluster-enabled", "yes", "--tls-auth-clients", "yes")
    server = started(*options)
    async with connect(f"rediss://{server.node}{certificates.query()}") as nodes:
        await eventually_done(nodes, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    await exchanges_blocks(f"rediss+cluster://{server.node}{certificates.query()}")


async def test_loops_run_over_sentinels_with_tls(started, certificates, tmp_path: Path) -> None:
    master = started("--tls-replication", "yes")
    path = tmp_path / "sentinel.conf"
    path.write_text(f"sentinel monitor mine 127.0.0.1 {master.port} 1\n")
    sentinel = started(str(path), "--sentinel", "--tls-replication", "yes")
    await exchanges_blocks(f"rediss+sentinel://{sentinel.node}/mine{certificates.query()}")
