"""Several routers over one Redis: under random load, with workers that die and come back, they come
to believe the same, which is what is the case."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.client.client import AsyncClient
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.parent_death import dying_with_parent
from baton.cluster.redis.client import connect
from baton.errors import OverloadedError, UnavailableError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.probed_router import contents
from tests.support.cluster.watch import held
from tests.support.cluster.wide import listed
from tests.support.repository import ROOT
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(600)]

NUM_EACH = 3
VICTIMS = ("prefill-0", "decode-2", "prefill-1", "decode-0")
NUM_CLIENTS = 6
NUM_PREFIXES = 8


class Router:
    """One of those that are compared."""

    def __init__(self, folder: Path, number: int, redis_url: str) -> None:
        self._probe = folder / f"router-{number}.json"
        self._log = folder / f"router-{number}.log"
        self.endpoint = f"127.0.0.1:{free_port(set())}"
        port = self.endpoint.partition(":")[2]
        line = [sys.executable, "-m", "tests.support.cluster.probed_router", "--port", port]
        line += ["--admin-port", "0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                dying_with_parent([*line, "--redis-url", redis_url]),
                cwd=ROOT,
                env={**os.environ, "PROBE_FILE": str(self._probe)},
                stdout=log,
                stderr=log,
            )

    def fleet_view(self) -> Any:
        """Returns the view that the router writes when it gets SIGUSR1."""
        self._probe.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10.0
        while not self._probe.exists():
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)
        return json.loads(self._probe.read_text())

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, list[Router]]]:
    """Three workers of each role, whose small pools drop blocks all the time, and two routers."""
    flags = {"max_num_batched_tokens": 64, "num_blocks": 160, "max_model_len": 512}
    with ExitStack() as stack:
        cluster = LocalCluster("tiny", NUM_EACH, NUM_EACH, worker_flags=flags)
        stack.callback(cluster.stop)
        cluster.start(timeout=300.0)
        folder = tmp_path_factory.mktemp("routers")
        routers = [Router(folder, number, cluster.redis_url) for number in range(2)]
        for router in routers:
            stack.callback(router.stop)
        yield cluster, routers


@asynccontextmanager
async def random_load(routers: list[Router], chance: random.Random) -> AsyncIterator[list[int]]:
    """Prompts that share beginnings, long and short, some of them given up half-way. Yields what is
    appended to for each that was answered."""
    answered: list[int] = []
    is_over = asyncio.Event()

    async def ask_again(client: AsyncClient) -> None:
        while not is_over.is_set():
            prefix = prompt_of(chance.randrange(16, 200), seed=chance.randrange(NUM_PREFIXES))
            prompt = prefix + prompt_of(chance.randrange(1, 60), seed=chance.randrange(1000))
            params = SamplingParams(max_tokens=chance.randrange(1, 40), ignore_eos=True)
            generation = client.generate(prompt, params, timeout=60.0)
            try:
                if chance.random() < 0.1:
                    await anext(generation, None)
                    generation.cancel()
                else:
                    answered.append(len(await generation.token_ids()))
            except (OverloadedError, UnavailableError):
                await asyncio.sleep(0.2)

    clients = [AsyncClient(r.endpoint, wait_for_ready=True) for r in routers]
    tasks = [
        asyncio.create_task(ask_again(clients[number % len(clients)]))
        for number in range(NUM_CLIENTS)
    ]
    try:
        yield answered
    finally:
        is_over.set()
        await asyncio.gather(*tasks)
        for client in clients:
            await client.close()


async def test_routers_converge_and_leak_no_counters(crowd):
    cluster, routers = crowd
    chance = random.Random(6)
    async with random_load(routers, chance) as answered:
        for name in VICTIMS:
            await asyncio.sleep(chance.uniform(0.5, 1.5))
            await replace(cluster, name, pause=chance.uniform(0.0, 1.5))
        await asyncio.sleep(2.0)
    assert len(answered) > 20
    await until_observed(lambda: not held(cluster), within=5.0, what="that nothing is held")

    epochs = {worker.id: worker.epoch for worker in listed(cluster).values()}
    reader = connect(cluster.redis_url)
    index = LocalityIndex()
    subscriber = EventSubscriber(reader, index)
    for worker, epoch in epochs.items():
        subscriber.follow(worker, epoch)
    subscriber.start()
    await until_observed(lambda: subscriber.is_warm, what="a third reader")

    def agree() -> bool:
        one, two = (router.fleet_view() for router in routers)
        return one == two and one["blocks"] == contents(index)

    try:
        await until_observed(agree, within=10.0, what="agreement")
    finally:
        await subscriber.stop()
        await reader.aclose()
    found = routers[0].fleet_view()
    assert found["epochs"] == epochs
    assert found["counters"] == {worker: [0, 0, 0] for worker in epochs}
    assert all(len(blocks) > 10 for blocks in found["blocks"].values()), "there is something to it"


async def replace(cluster: LocalCluster, name: str, pause: float) -> None:
    """Kills a worker and starts it again; returns once it takes work."""
    before, process = listed(cluster)[name].epoch, cluster.process(name)

    def is_back() -> bool:
        worker = listed(cluster).get(name)
        return worker is not None and worker.epoch > before and worker.state == "ready"

    cluster.kill(name)
    await asyncio.sleep(pause)
    process.start(process.log_path.parent)
    await until_observed(is_back, within=90.0, what=f"{name}'s return")
