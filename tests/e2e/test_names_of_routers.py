"""Clients of a name whose routers are replaced by others, with other addresses."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.dns_server import DnsServer, dns_server
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

# Asks one request after the other, and says how each ended. A process of its own, since gRPC reads
# the choice of its resolver once.
CLIENT = """
import asyncio, json, sys, time
from baton import AsyncClient, SamplingParams

async def main():
    async with AsyncClient(sys.argv[1], timeout=10.0) as client:
        while True:
            began, end = time.monotonic(), "ok"
            try:
                await client.generate("def main(", SamplingParams(max_tokens=4)).token_ids()
            except Exception as error:
                end = f"{type(error).__name__}: {error}"
            print(json.dumps([end, time.monotonic() - began]), flush=True)
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


class Outcomes:
    """Ends of the requests of a client, in order."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, float]] = []

    async def more(self, number: int) -> None:
        wanted = len(self.ends) + number
        await until(lambda: len(self.ends) >= wanted, within=60.0)

    @property
    def failures(self) -> list[str]:
        return [end for end, _ in self.ends if end != "ok"]


@asynccontextmanager
async def running_client(dns: DnsServer, port: int) -> AsyncIterator[Outcomes]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, f"dns://127.0.0.1:{dns.port}/routers.test:{port}"),
        env={**os.environ, "GRPC_DNS_RESOLVER": "ares"},
        stdout=asyncio.subprocess.PIPE,
    )
    told = Outcomes()

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            told.ends.append(tuple(json.loads(line)))

    reading = asyncio.create_task(read())
    try:
        yield told
    finally:
        process.kill()
        await process.wait()
        await reading


class Routers:
    """Routers of a cluster's workers, on one port of several addresses."""

    def __init__(self, cluster: LocalCluster, folder) -> None:
        self.port = free_port(set())
        self._cluster = cluster
        self._folder = folder
        self._running: dict[str, Process] = {}

    async def start(self, host: str) -> None:
        flags = {
            "host": host,
            "advertise_host": host,
            "redis_url": self._cluster.redis_url,
            "model": "tiny",
            "metrics": False,
        }
        process = Process(f"router-{host}", "router", self.port, flags)
        await asyncio.to_thread(process.start, self._folder)
        self._running[host] = process
        async with AsyncClient(process.endpoint, wait_for_ready=True) as client:
            await client.generate("a", SamplingParams(max_tokens=1)).token_ids()

    def drain(self, host: str) -> None:
        self._running[host].signal(signal.SIGTERM)

    def address(self, host: str) -> str:
        return self._running[host].endpoint

    def is_running(self, host: str) -> bool:
        return self._running[host].is_running

    def stop(self) -> None:
        for process in self._running.values():
            process.signal(signal.SIGKILL)


@pytest.fixture
async def routers(cluster, tmp_path):
    running = Routers(cluster, tmp_path)
    yield running
    running.stop()


async def test_client_of_name_loses_no_request_as_routers_roll(routers):
    await routers.start("127.0.0.2")
    async with dns_server("127.0.0.2") as dns, running_client(dns, routers.port) as told:
        await told.more(3)
        for former, host in (("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.4")):
            await routers.start(host)
            dns.addresses = [host]
            routers.drain(former)
            await until(lambda former=former: not routers.is_running(former), within=30.0)
            await told.more(10)
        print(f"slowest: {max(seconds for _, seconds in told.ends):.2f} s of {len(told.ends)}")
        assert told.failures == []


async def test_client_of_name_leaves_router_that_drains(routers):
    """The connection to it stays, since its last streams take their time."""
    await routers.start("127.0.0.2")
    async with (
        dns_server("127.0.0.2") as dns,
        running_client(dns, routers.port) as told,
        AsyncClient(routers.address("127.0.0.2")) as client,
    ):
        long = SamplingParams(max_tokens=1900, ignore_eos=True)
        async with client.generate("def main(", long) as stream:
            await anext(stream)
            await told.more(3)
            await routers.start("127.0.0.3")
            dns.addresses = ["127.0.0.3"]
            routers.drain("127.0.0.2")
            await told.more(10)
            assert routers.is_running("127.0.0.2")
        assert told.failures == []
