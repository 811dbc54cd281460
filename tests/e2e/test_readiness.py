"""A router without workers is not ready, and its requests wait for the first ones."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import DeadlineExceededError, OverloadedError, UnavailableError
from baton.sampling import SamplingParams
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FEW = SamplingParams(max_tokens=4)
NONE = "no decode worker is known"


class Started:
    """A cluster of which a test starts the workers when it wants, with none at first."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder

    def start(self, *names: str) -> None:
        for name in names:
            self.cluster.process(name).start(self._folder)

    def health(self, service: str = "readiness") -> int:
        with grpc.insecure_channel(self.cluster.address) as channel:
            asked = health_pb2.HealthCheckRequest(service=service)
            return health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5.0).status

    def page(self, path: str, *, of_metrics: bool = False) -> httpx.Response:
        cluster = self.cluster
        metrics = f"http://{cluster.metrics_endpoints['router']}"
        return httpx.get(f"{metrics if of_metrics else cluster.http_address}{path}")

    def num_waiting(self) -> float:
        line = next(
            line
            for line in self.page("/metrics", of_metrics=True).text.splitlines()
            if line.startswith("baton_requests_waiting_for_workers{")
        )
        return float(line.split()[1])


def router_first(**router_flags: object) -> Iterator[Started]:
    cluster = LocalCluster(http_port=0, router_flags=router_flags)
    assert cluster.redis is not None
    with TemporaryDirectory(prefix="baton-ready-") as name:
        started = Started(cluster, Path(name))
        cluster.redis.start()
        try:
            started.start("router")
            yield started
        finally:
            cluster.stop(0.0)


@pytest.fixture(scope="module")
def alone() -> Iterator[Started]:
    """A router without workers, in whose queue two requests may wait."""
    for started in router_first(max_waiting=2):
        wait_answers(started)
        yield started


async def observed(condition: Callable[[], object], what: str) -> None:
    """Waits until the condition holds, for as long as a start takes on a busy machine."""
    await until_observed(condition, within=120.0, what=what)


def wait_answers(started: Started) -> None:
    asyncio.run(observed(lambda: answers(started), "the router's answer"))


def answers(started: Started) -> bool:
    try:
        return started.page("/health").status_code in (200, 503)
    except httpx.TransportError:
        return False


@asynccontextmanager
async def client_of(started: Started, timeout: float = 60.0) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(started.cluster.address, timeout=timeout, wait_for_ready=True) as client:
        yield client


def completion(started: Started, timeout_s: float) -> httpx.Response:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "baton": {"timeout_s": timeout_s}}
    return httpx.post(f"{started.cluster.http_address}/v1/completions", json=body, timeout=60.0)


def test_router_without_workers_is_alive_and_not_ready(alone):
    assert alone.page("/health").status_code == 503
    assert alone.page("/health").json()["error"]["message"] == NONE
    assert alone.health() == alone.health("") == NOT_SERVING
    assert alone.page("/readyz", of_metrics=True).status_code == 503
    # Which Kubernetes restarts a pod by.
    assert alone.health("liveness") == SERVING
    assert alone.page("/livez", of_metrics=True).status_code == 200


def test_deadline_without_workers_names_missing_role(alone):
    late = completion(alone, 0.5)
    assert late.status_code == 504
    assert late.json()["error"]["message"].endswith(f"waited for the first workers: {NONE}")


async def test_requests_beyond_queue_of_router_alone_are_rejected(alone):
    async with client_of(alone, timeout=5.0) as client:
        waiting = [asyncio.create_task(client.generate("a", FEW).text()) for _ in range(2)]
        await observed(lambda: alone.num_waiting() == 2, "two that wait")
        with pytest.raises(OverloadedError, match="2 requests wait at this router already") as full:
            await client.generate("a", FEW).text()
        assert full.value.retry_after > 0
        ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, DeadlineExceededError) for error in ended)
    assert alone.num_waiting() == 0


@pytest.mark.slow
async def test_requests_before_first_workers_are_answered():
    for started in router_first():
        await observed(lambda s=started: answers(s), "the router's answer")
        async with client_of(started) as client:
            asked = asyncio.create_task(client.generate("def main(", FEW).text())
            posted = asyncio.create_task(asyncio.to_thread(completion, started, 60.0))
            await observed(lambda s=started: s.num_waiting() == 2, "two that wait")
            assert started.page("/health").status_code == 503
            await asyncio.to_thread(started.start, "prefill-0", "decode-0")
            assert await asked
            assert (await posted).status_code == 200
        assert started.page("/health").status_code == 200
        assert started.health() == started.health("") == SERVING


@pytest.mark.slow
async def test_router_that_lost_all_workers_is_ready_for_a_while():
    """Errors name the reason meanwhile, where a Service without endpoints refuses connections."""
    for started in router_first(unready_after_s=4.0):
        await asyncio.to_thread(started.start, "prefill-0", "decode-0")
        await asyncio.to_thread(started.cluster.wait_ready)
        assert started.page("/health").status_code == 200  # `wait_ready` says no less
        async with client_of(started) as client:
            assert await client.generate("def main(", FEW).text()
            for name in ("prefill-0", "decode-0"):
                started.cluster.kill(name)
            with pytest.raises(UnavailableError):
                await client.generate("def main(", FEW).text()
            assert started.page("/health").status_code == 200
            await observed(lambda s=started: s.health() == NOT_SERVING, "unreadiness")
            assert started.page("/health").status_code == 503
            assert started.health("liveness") == SERVING
            with pytest.raises(UnavailableError, match="no decode worker"):
                await client.generate("def main(", FEW).text()
            await asyncio.to_thread(started.start, "prefill-0", "decode-0")
            await observed(lambda s=started: s.health() == SERVING, "readiness")


@pytest.mark.slow
async def test_router_told_to_be_ready_without_workers_is_ready():
    for started in router_first(ready_without_workers=True):
        await observed(lambda s=started: answers(s), "the router's answer")
        assert started.page("/health").json() == {"status": "ok"}
        await observed(lambda s=started: s.health() == SERVING, "readiness")
        assert completion(started, 0.5).status_code == 504


@pytest.mark.slow
async def test_draining_router_ends_requests_that_wait_for_workers():
    for started in router_first():
        await observed(lambda s=started: answers(s), "the router's answer")
        async with client_of(started) as client:
            asked = asyncio.create_task(client.generate("a", FEW).text())
            await observed(lambda s=started: s.num_waiting() == 1, "one that waits")
            started.cluster.kill("router", signal.SIGTERM)
            with pytest.raises(UnavailableError, match="draining"):
                await asked
        router = started.cluster.process("router")
        await observed(lambda r=router: not r.is_running, "its end")
