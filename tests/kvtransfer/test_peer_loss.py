"""Either side is killed, as only SIGKILL kills, or stopped, at every step of a handoff."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import BatonError, NotFoundError, UnavailableError
from baton.serving.grpc.channels import Channels
from baton.v1.kv_transfer_pb2 import ConfirmRequest
from baton.v1.kv_transfer_pb2_grpc import KvTransferStub
from baton.worker.pairing import Pairing
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Connector
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.connectors.nixl.connector import NixlConnector
from baton_kvtransfer.lease.handle import FirstToken, Handle
from baton_kvtransfer.lease.machine import LeaseState
from tests.support.failures import failure_of
from tests.support.grids import grid
from tests.support.kvtransfer.held import (
    abstract_sockets,
    num_mapped,
    open_files,
    orphaned_segments,
    shared_files,
)
from tests.support.kvtransfer.loopback import (
    BLOCK_SIZE,
    CLAIMANT,
    EPOCH,
    HYBRID,
    MODEL,
    VERSION,
    WINDOW,
    ConnectorsOf,
    allocation,
    connectors_of,
    contents,
    filled_pool,
    pool_of,
    transfer,
)
from tests.support.kvtransfer.remote_peers import TIMEOUT, RemotePeer, RemotePeers
from tests.support.waiting import until

NUM_BLOCKS = 600
NUM_TOKENS = 2000
LEASE = bytes(range(16))
PAIRING = Pairing(VERSION, MODEL, HYBRID)
COUNT = -(-NUM_TOKENS // BLOCK_SIZE)
FIRST = (NUM_TOKENS - WINDOW) // BLOCK_SIZE
# A silent peer is noticed within 2 s, and what follows from it takes no second.
BOUND = 3.0


def tables(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    chance = random.Random(seed)
    full, windowed = (chance.sample(range(1, NUM_BLOCKS + 1), COUNT) for _ in HYBRID)
    return tuple(full), (NULL_BLOCK,) * FIRST + tuple(windowed[FIRST:])


THERE, HERE = tables(1), tables(2)


@asynccontextmanager
async def claimant_by(
    connector: Any, connectors_of: ConnectorsOf = connectors_of
) -> AsyncIterator[tuple[list[KvPool], Channels, KvFetcher]]:
    targets, channels = [pool_of(NUM_BLOCKS, layout) for layout in HYBRID], Channels()
    connectors = connectors_of(targets)
    fetcher = KvFetcher(targets, PAIRING, CLAIMANT, channels, connectors, connector=connector)
    yield targets, channels, fetcher
    fetcher.close()
    for each in connectors:
        await each.close()
    await channels.close()


def handle_to(source: RemotePeer, lease_id: bytes = LEASE) -> Handle:
    return Handle("source", source.about[0], EPOCH, lease_id, PAIRING, NUM_TOKENS, ())


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotePeers]:
    sides = RemotePeers(tmp_path_factory.mktemp("far"))
    yield sides
    sides.close()


async def failure_of_one_heard(call: Callable[[], Any]) -> BatonError:
    """Returns the failure of the first call that its peer has heard: a peer that stood still
    closes, as it resumes, the connection whose pings it has not answered."""
    async with asyncio.timeout(TIMEOUT):
        while isinstance(failure := await failure_of(call()), UnavailableError):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return failure


async def reach(stage: str, source: RemotePeer, targets: list[Any]) -> None:
    """Brings a fetch that has begun to a stage."""
    if stage == "before its prefill":
        return
    await source.call("open", LEASE.hex(), NUM_TOKENS)
    if stage == "before the first block":
        return
    await source.call("advance", THERE, COUNT // 2)
    half = filled_pool(NUM_BLOCKS, HYBRID[0])
    await until(
        lambda: (
            contents(targets[0], HERE[0][: COUNT // 2]) == contents(half, THERE[0][: COUNT // 2])
        ),
        TIMEOUT,
    )
    if stage == "amid the blocks":
        return
    await source.call("hold_confirmations")
    await source.call("advance", THERE, COUNT)
    await source.call("complete")
    assert await source.receive() == "held"


STAGES = [
    "before its prefill", "before the first block", "amid the blocks", "before the confirmation",
]  # fmt: skip


@grid(
    connector=["grpc", "shm", "nixl"],
    stage=STAGES,
    signum=[
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped"),
    ],
)
@pytest.mark.slow
async def test_fetch_ends_and_frees_all_when_source_is_lost(peers, connector, stage, signum):
    files, mapped, shared = len(open_files()), num_mapped(), shared_files()
    segments = orphaned_segments()
    await source_is_gone(peers, connector, stage, signum)
    await until(lambda: num_mapped() <= mapped, BOUND)
    await until(lambda: len(open_files()) <= files + 2, BOUND)  # what gRPC starts once and keeps
    await until(lambda: shared_files() <= shared, BOUND)  # those of other tests come and go
    assert orphaned_segments() <= segments


async def test_fetch_leaves_nothing_when_source_is_killed_mid_blocks(peers):
    mapped = num_mapped()
    await source_is_gone(peers, "shm", "amid the blocks", signal.SIGKILL)
    await until(lambda: num_mapped() <= mapped, BOUND)


async def source_is_gone(peers: RemotePeers, connector: Any, stage: str, signum: int) -> None:
    async with claimant_by(connector) as (targets, _, fetcher), peers("source") as source:
        own = num_mapped()
        address = source.about[1]
        fetching = asyncio.create_task(fetcher.fetch(handle_to(source), allocation(*HERE), 30.0))
        await reach(stage, source, targets)
        if connector == "shm":
            await until(lambda: num_mapped() == own + len(HYBRID), BOUND)
        source.signal(signum)
        started = asyncio.get_running_loop().time()
        failure = await failure_of(fetching)
        assert isinstance(failure, UnavailableError), failure
        assert asyncio.get_running_loop().time() - started < BOUND
        if signum == signal.SIGSTOP:
            source.signal(signal.SIGKILL)
        await source.end()
        # Its memory is let go of by itself, not because a peer asks.
        await until(lambda: num_mapped() == own, BOUND)
        assert not any(address in name for name in abstract_sockets())


@pytest.mark.parametrize("connector", ["grpc", "shm", pytest.param("nixl", marks=pytest.mark.slow)])
async def test_fetch_ends_when_source_stops_before_connecting(peers, connector):
    async with claimant_by(connector) as (_, _, fetcher), peers("source") as source:
        source.signal(signal.SIGSTOP)
        handle = handle_to(source)
        started = asyncio.get_running_loop().time()
        failure = await failure_of(fetcher.fetch(handle, allocation(*HERE), 30.0))
        assert isinstance(failure, UnavailableError), failure
        assert asyncio.get_running_loop().time() - started < BOUND


@pytest.mark.slow
async def test_fetch_resumes_when_source_stops_briefly(peers):
    async with claimant_by("auto") as (targets, _, fetcher), peers("source") as source:
        handle = handle_to(source)
        fetching = asyncio.create_task(fetcher.fetch(handle, allocation(*HERE), 30.0))
        await reach("amid the blocks", source, targets)
        source.signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        source.signal(signal.SIGCONT)
        await source.call("advance", THERE, COUNT)
        await source.call("complete")
        token, _ = await fetching
    assert token == FirstToken(0, 42)
    origin = filled_pool(NUM_BLOCKS, HYBRID[0])
    assert contents(targets[0], HERE[0]) == contents(origin, THERE[0])


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["grpc", "shm", "nixl"])
async def test_resumed_source_has_forgotten_lease(peers, connector):
    async with claimant_by(connector) as (targets, channels, fetcher), peers("source") as source:
        handle = handle_to(source)
        fetching = asyncio.create_task(fetcher.fetch(handle, allocation(*HERE), 30.0))
        await reach("amid the blocks", source, targets)
        source.signal(signal.SIGSTOP)
        assert isinstance(await failure_of(fetching), UnavailableError)
        source.signal(signal.SIGCONT)
        await source.call("advance", THERE, COUNT)
        await source.call("complete")
        late = ConfirmRequest(lease_id=LEASE, generation=1, claimant=CLAIMANT)
        stub = KvTransferStub(channels.get(source.about[0]))
        assert isinstance(
            await failure_of_one_heard(lambda: stub.Confirm(late, timeout=5.0)), NotFoundError
        )
        again = asyncio.create_task(fetcher.fetch(handle, allocation(*HERE), 5.0))
        assert isinstance(await failure_of(again), NotFoundError)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["before the first block", "amid the blocks"])
async def test_nixl_read_writes_nothing_when_stopped_source_resumes(peers, stage, monkeypatch):
    """Over TCP the source has a part in every read, and an answer of it comes however late."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    nixl: list[NixlConnector] = []

    def connectors(pools: Sequence[KvPool]) -> Sequence[Connector]:
        nixl.append(NixlConnector(pools, "lo"))
        return [*nixl, GrpcConnector(pools)]

    async with (
        claimant_by("nixl", connectors) as (targets, _, fetcher),
        peers("source") as source,
    ):
        handle, reader = handle_to(source), nixl[0].reader
        fetching = asyncio.create_task(fetcher.fetch(handle, allocation(*HERE), TIMEOUT))
        await reach(stage, source, targets)
        await until(lambda: reader.agent is not None, TIMEOUT)
        agent = reader.agent
        # The blocks are announced and the source stops before it can answer a read of them.
        begin, asked = agent.read, asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop_and_read(*arguments: Any) -> int:
            source.signal(signal.SIGSTOP)
            time.sleep(0.1)  # until all of its threads have
            loop.call_soon_threadsafe(asked.set)
            return begin(*arguments)

        agent.read = stop_and_read
        announced = asyncio.create_task(source.call("advance", THERE, COUNT))
        async with asyncio.timeout(TIMEOUT):
            await asked.wait()
        started = loop.time()
        assert isinstance(await failure_of(fetching), UnavailableError)
        assert loop.time() - started < BOUND
        for target in targets:
            target.content.fill_(7)
        source.signal(signal.SIGCONT)
        await asyncio.gather(announced, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert all(bool((target.content == 7).all()) for target in targets), (
            "written behind the end"
        )
        assert not agent.is_open
        # The same source is read again, by a new agent, once its old answers have reached no agent.
        assert source.is_running
        for target in targets:
            target.content.zero_()
        lease_id = bytes([9]) * 16
        await source.call("open", lease_id.hex(), NUM_TOKENS)
        await source.call("advance", THERE, COUNT)
        await source.call("complete")
        handle = handle_to(source, lease_id)
        await fetcher.fetch(handle, allocation(*HERE), TIMEOUT)
        for target in targets:
            target.content[0].fill_(7)
        read = [target.content.clone() for target in targets]
        fetcher.close()
        reader.close()
        await until(lambda: not reader.num_lingering, BOUND)
        assert source.is_running
    origin = filled_pool(NUM_BLOCKS, HYBRID[0])
    assert contents(targets[0], HERE[0]) == contents(origin, THERE[0])
    assert all(map(torch.equal, read, (target.content for target in targets)))


@pytest.mark.parametrize("stage", ["early", "amid the blocks", "at the last block"])
@pytest.mark.parametrize("connector", ["grpc", "shm", "nixl"])
@pytest.mark.slow
async def test_lease_ends_and_frees_all_when_claimant_is_killed(peers, connector, stage):
    await claimant_is_killed(peers, connector, stage)


async def test_lease_ends_when_claimant_is_killed_mid_blocks(peers):
    await claimant_is_killed(peers, "shm", "amid the blocks")


async def claimant_is_killed(peers: RemotePeers, connector: str, stage: str) -> None:
    async with transfer(NUM_BLOCKS, layouts=HYBRID) as ends, peers("claimant") as claimant:
        readers = 1 if connector == "shm" else 0
        if stage == "early":
            await tell_to_fetch(claimant, connector, ends.endpoint)
            await until(lambda: ends.leases.num_awaited, TIMEOUT)
            files = len(open_files())
            claimant.signal(signal.SIGKILL)
            await until(lambda: not ends.leases.num_awaited, BOUND)
            await until(lambda: not ends.num_readers, BOUND)
            # gRPC may close a connection behind the end of its calls.
            await until(lambda: len(open_files()) <= files, BOUND)
            return
        with ends.lease_of(NUM_TOKENS, LEASE) as lease:
            await tell_to_fetch(claimant, connector, ends.endpoint)
            await until(lambda: lease.is_claimed, TIMEOUT)
            assert ends.num_readers == readers
            lease.advance(THERE, COUNT // 2 if stage == "amid the blocks" else COUNT)
            await asyncio.sleep(0.05)
            claimant.signal(signal.SIGKILL)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(BOUND):
                    await lease.over()
            assert lease.state is LeaseState.FAILED
            await until(lambda: not ends.num_readers, BOUND)
        assert len(ends.leases) == 0


async def tell_to_fetch(claimant: RemotePeer, connector: str, endpoint: str) -> None:
    await claimant.call("fetch", connector, endpoint, LEASE.hex(), NUM_TOKENS, HERE)


@pytest.mark.parametrize(
    "connectors",
    [("grpc", "shm", "auto"), pytest.param(("nixl", "nixl"), marks=pytest.mark.slow)],
    ids=str,
)
async def test_handoff_works_between_two_processes(peers, connectors):
    """The whole of it, so that what the other tests kill is known to work."""
    async with peers("source") as source, peers("claimant") as claimant:
        for turn, connector in enumerate(connectors):
            lease_id = bytes([turn]).hex() * 16
            await source.call("open", lease_id, NUM_TOKENS)
            await source.call("advance", THERE, COUNT)
            await source.call("complete")
            await claimant.call("fetch", connector, source.about[0], lease_id, NUM_TOKENS, HERE)
            assert await claimant.receive() == "fetched"
