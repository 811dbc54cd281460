"""Addresses whose connections are dropped again and again, beside clients of others."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network

import pytest

from baton.serving.grpc.connection_guard import ConnectionLimits
from baton.serving.grpc.handshake_filter import MAX_ADDRESSES, refuse
from baton.serving.grpc.own_sockets import tcp_sockets
from baton.serving.grpc.refused_addresses import RefusedAddresses
from baton.v1 import inference_pb2 as pb
from bench.router.stream_resets import PREFACE, SETTINGS, attackers_again, frame
from tests.support.kvtransfer.held import open_files
from tests.support.serving.fakes import chunk, serving
from tests.support.waiting import until

GENERATE = "/baton.v1.Inference/Generate"
ATTACKER, OTHER = "127.0.0.2", "127.0.0.3"
REFUSED_WITHIN = 0.3
pytestmark = pytest.mark.slow  # of those lanes that run as root

LIMITS = ConnectionLimits(max_new_streams_per_s=2000, max_resets_per_s=200, max_drops_per_address=2)


def connect(port: int, source: str, timeout: float = 10.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout, (source, 0))


def is_refused(port: int, source: str) -> bool:
    """Whether the kernel does not answer."""
    try:
        connect(port, source, REFUSED_WITHIN).close()
    except TimeoutError:
        return True
    return False


@pytest.fixture
def filters() -> None:
    """Skips a test where the kernel lets this user set no filter on a TCP socket."""
    with listening("127.0.0.1") as port:
        try:
            refuse(port, [ip_network(ATTACKER)])
        except OSError as error:
            pytest.skip(f"no filter can be set: {error.strerror}")


@pytest.mark.usefixtures("filters")
async def test_address_dropped_again_and_again_may_not_connect():
    async def generate(request, context):
        yield chunk("x")

    async with serving(generate, connection_limits=LIMITS) as running:
        server = running.server
        with connect(server.port, ATTACKER) as before:
            before.sendall(PREFACE + frame(SETTINGS))
            with attackers_again(server.port, GENERATE, 1, 60.0, ATTACKER):
                await until(lambda: server.num_refused_addresses == 1, within=30.0)
                assert server.num_dropped_connections > LIMITS.max_drops_per_address
                assert is_refused(server.port, ATTACKER)
                call = running.inference.Generate(pb.GenerateRequest(text="a"), timeout=60.0)
                assert (await call.read()).tokens.text == "x"
                connect(server.port, OTHER).close()
            before.settimeout(10.0)
            assert before.recv(9), "an established connection was closed"


@contextmanager
def listening(host: str) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("filters")
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_address_may_connect_again_after_a_minute(host):
    addresses = RefusedAddresses(max_drops=2)
    with listening(host) as port:
        for at in range(3):
            assert addresses.holders == ()
            addresses.count(ATTACKER, float(at))
            addresses.count("2001:db8::1", float(at))
            addresses.apply(port, float(at))
            addresses.count(OTHER, float(at))
        assert {*addresses.holders} == {ATTACKER, "2001:db8::/64"}
        assert is_refused(port, ATTACKER)
        connect(port, OTHER).close()
        addresses.apply(port, 59.0)
        assert is_refused(port, ATTACKER)
        addresses.apply(port, 61.0)
        assert addresses.holders == ()
        connect(port, ATTACKER).close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
@pytest.mark.usefixtures("filters")
def test_network_of_ipv6_may_not_connect_as_a_whole():
    addresses = RefusedAddresses(max_drops=1)
    with listening("::") as port:
        for _ in range(2):
            addresses.count("::2", 0.0)
        addresses.apply(port, 0.0)
        assert addresses.holders == ("::/64",)
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), REFUSED_WITHIN).close()
        connect(port, OTHER).close()


@pytest.mark.usefixtures("filters")
def test_addresses_dropped_last_are_refused_of_too_many():
    addresses = RefusedAddresses(max_drops=1)
    hosts = [f"127.1.0.{number}" for number in range(1, MAX_ADDRESSES + 2)]
    with listening("127.0.0.1") as port:
        for at, host in enumerate(hosts):
            addresses.count(host, at / 100)
            addresses.count(host, at / 100)
        addresses.apply(port, 1.0)
        assert addresses.holders == (*hosts[1:],)
        connect(port, hosts[0]).close()
        assert is_refused(port, hosts[1])
        assert is_refused(port, hosts[-1])


def test_no_address_is_refused_without_a_limit():
    addresses = RefusedAddresses(max_drops=0)
    with listening("127.0.0.1") as port:
        for _ in range(1000):
            addresses.count(ATTACKER, 0.0)
        addresses.apply(port, 0.0)
        connect(port, ATTACKER).close()


def test_search_for_sockets_leaves_nothing_open(tmp_path):
    with listening("127.0.0.1") as port, (tmp_path / "no socket").open("w"):
        before = sorted(open_files())
        for _ in range(3):
            assert [found.getsockname()[1] for found in tcp_sockets(port)] == [port]
        assert sorted(open_files()) == before
