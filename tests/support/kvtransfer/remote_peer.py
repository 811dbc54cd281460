"""One side of handoffs in a process of its own, to be killed: `remote_peer source|claimant SOCKET`.

To who listens on the socket it prints a line of JSON about itself, then obeys lines: the name of a
method below, then JSON arguments. Each is answered with a line when it is done, or has begun.
"""

import asyncio
import json
import socket
import sys
from contextlib import ExitStack
from typing import Any

import torch

from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.worker.pairing import Pairing
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken, Handle
from baton_kvtransfer.lease.lease import Claim, Lease
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.service import KvTransferService, ServedPools, add_to_server
from tests.support.kvtransfer.loopback import (
    CLAIMANT,
    EPOCH,
    HYBRID,
    MODEL,
    VERSION,
    allocation,
    connectors_of,
    filled_pool,
    pool_of,
)

NUM_BLOCKS = 600
PAIRING = Pairing(VERSION, MODEL, HYBRID)


class HoldingService(KvTransferService):
    """Lets confirmations wait."""

    holds = False

    async def Confirm(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.holds:
            print(json.dumps("held"), flush=True)
            await asyncio.sleep(60)
        return await super().Confirm(request, context)


class Source:
    """Computes what it is told to."""

    def __init__(self) -> None:
        self._pools = [filled_pool(NUM_BLOCKS, layout) for layout in HYBRID]
        self._leases = LeaseTable()
        self._stack = ExitStack()
        self._connectors = connectors_of(self._pools)
        self._offers = Offers(self._connectors)
        served = ServedPools(self._pools, PAIRING, EPOCH, self._offers)
        self._service = HoldingService(self._leases, lambda: served)
        self._server = Server(ServingSettings())
        self._lease: Lease | None = None

    async def start(self) -> Any:
        await self._offers.open()
        (shm,) = (each for each in self._connectors if isinstance(each, ShmConnector))
        assert shm.server is not None
        self._server.add(add_to_server, self._service)
        await self._server.start()
        return [self._server.endpoint, shm.server.offer.address]

    async def open(self, lease_id: str, num_tokens: int) -> None:
        claim = Claim(bytes.fromhex(lease_id), CLAIMANT)
        blocks = BlockRange(num_tokens, HYBRID[0].block_size)
        self._lease = self._stack.enter_context(self._leases.open(claim, blocks))

    async def advance(self, tables: list[list[int]], num_filled: int) -> None:
        assert self._lease is not None
        self._lease.advance(tuple(map(tuple, tables)), num_filled)

    async def complete(self) -> None:
        assert self._lease is not None
        self._lease.complete(FirstToken(0, 42), lambda: None)

    async def hold_confirmations(self) -> None:
        self._service.holds = True


class Claimant:
    """Fetches what it is told to, and says so when it is through."""

    def __init__(self) -> None:
        self._pools = [pool_of(NUM_BLOCKS, layout) for layout in HYBRID]
        self._channels = Channels()
        self._fetching: set[asyncio.Task[None]] = set()

    async def start(self) -> Any:
        return "ready"

    async def fetch(
        self, connector: Any, endpoint: str, lease_id: str, num_tokens: int, tables: list[list[int]]
    ) -> None:
        handle = Handle(
            "source", endpoint, EPOCH, bytes.fromhex(lease_id), PAIRING, num_tokens, (),
            Integrity.BY_CONNECTOR,
        )  # fmt: skip
        fetcher = KvFetcher(
            self._pools, PAIRING, CLAIMANT, self._channels, connectors_of(self._pools),
            connector=connector,
        )  # fmt: skip
        into = allocation(*map(tuple, tables))

        async def fetch() -> None:
            await fetcher.fetch(handle, into, 30.0)
            print(json.dumps("fetched"), flush=True)

        self._fetching.add(asyncio.create_task(fetch()))


async def main(role: str) -> None:
    torch.set_num_threads(1)
    side: Any = {"source": Source, "claimant": Claimant}[role]()
    print(json.dumps(await side.start()), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        await getattr(side, name)(*arguments)
        print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(sys.argv[2])
        sys.stdin, sys.stdout = line.makefile("r"), line.makefile("w")
        asyncio.run(main(sys.argv[1]))
