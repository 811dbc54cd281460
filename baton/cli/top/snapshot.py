"""Snapshot of a cluster, read from the router and from each worker that it knows.

Independent of how it is shown.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from baton.client.client import AsyncClient, Load, RequestInfo, RoleBalance, Worker
from baton.errors import BatonError, UnauthenticatedError
from baton.rpc.tls import Tls
from baton.serving.grpc.access import WORKER_NAME

ANSWER_TIMEOUT = 1.0  # seconds; a worker that takes longer is shown without its load
NUM_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second since the last snapshot."""

    tokens: float = 0.0
    transferred_bytes: float = 0.0
    preemptions: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Worker in a snapshot. `load`: None if it does not answer; `rates`: zeros at first."""

    worker: Worker
    load: Load | None
    rates: Rates = Rates()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a cluster at one moment.

    Attributes:
        moment: in monotonic seconds.
        requests: the oldest first.
        hides_requests: they are listed with a tenant's token only.
    """

    moment: float
    router: Load
    balance: RoleBalance
    workers: tuple[WorkerSnapshot, ...]
    requests: tuple[RequestInfo, ...]
    hides_requests: bool = False


class SnapshotReader:
    """Reader of repeated snapshots of one cluster, by its router's admin service. Use it in
    `async with`."""

    def __init__(self, address: str, token: str = "", tls: Tls | None = None) -> None:
        self.address = address
        self._tls_to_workers = None if tls is None else replace(tls, server_name=WORKER_NAME)
        self._token = token or None
        self._router = AsyncClient(address, timeout=ANSWER_TIMEOUT, token=self._token, tls=tls)
        self._workers: dict[str, AsyncClient] = {}  # by endpoint
        self._last: Snapshot | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for client in (self._router, *self._workers.values()):
                stack.push_async_callback(client.close)

    async def read(self) -> Snapshot:
        """Returns the present state. Raises a `BatonError` if the router does not answer."""
        router, balance, workers, requests = await asyncio.gather(
            self._router.get_load(),
            self._router.role_balance(),
            self._router.list_workers(),
            self._requests(),
        )
        await self._close_all_but({worker.admin_endpoint for worker in workers})
        loads = await asyncio.gather(*map(self._load, workers))
        moment, before = time.monotonic(), self._last
        snapshots = tuple(
            WorkerSnapshot(worker, load, _rates(before, worker, load, moment))
            for worker, load in zip(workers, loads, strict=True)
        )
        listed = tuple(requests or ())
        self._last = Snapshot(moment, router, balance, snapshots, listed, requests is None)
        return self._last

    async def every(self, seconds: float) -> AsyncIterator[Snapshot]:
        """Yields a snapshot every `seconds`, without end; the first one once there are rates."""
        await self.read()
        while True:
            await asyncio.sleep(seconds)
            yield await self.read()

    async def _requests(self) -> list[RequestInfo] | None:
        """Returns the oldest requests; None if they need a token, and there is none."""
        try:
            return await self._router.list_requests(NUM_REQUESTS)
        except UnauthenticatedError:
            if self._token:
                raise
            return None

    async def _load(self, worker: Worker) -> Load | None:
        endpoint = worker.admin_endpoint
        client = self._workers.get(endpoint)
        if client is None:
            client = AsyncClient(
                endpoint, timeout=ANSWER_TIMEOUT, token=self._token, tls=self._tls_to_workers
            )
            self._workers[endpoint] = client
        try:
            return await client.get_load()
        except BatonError:
            return None

    async def _close_all_but(self, endpoints: set[str]) -> None:
        for endpoint in self._workers.keys() - endpoints:
            await self._workers.pop(endpoint).close()


def _rates(before: Snapshot | None, worker: Worker, load: Load | None, moment: float) -> Rates:
    """Returns the rates of a worker between two snapshots; zeros for a new incarnation."""
    known = {(s.worker.id, s.worker.epoch): s.load for s in before.workers} if before else {}
    last = known.get((worker.id, worker.epoch))
    if before is None or last is None or load is None:
        return Rates()
    seconds = moment - before.moment

    def rate(name: str) -> float:
        return float(getattr(load, name) - getattr(last, name)) / seconds

    return Rates(
        rate("num_computed_tokens"), rate("num_transferred_bytes"), rate("num_preemptions")
    )


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Returns plain data, for programs."""
    plain = asdict(snapshot)
    del plain["moment"]
    return plain
