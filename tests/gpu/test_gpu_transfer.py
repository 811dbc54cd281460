"""Blocks between pools on a GPU: out of another process's memory, and over a wire."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import UnavailableError
from baton_kvtransfer.connector import Integrity, Offer
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector, IpcReceiver
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from tests.support.kernels.far_pool import NUM_BLOCKS, filled, layouts, offer_of, settle
from tests.support.repository import ROOT

SOURCES = tuple(range(NUM_BLOCKS, 0, -1))
TARGETS = tuple((7 * i) % NUM_BLOCKS + 1 for i in range(NUM_BLOCKS))


def empty(device: str) -> list[KvPool]:
    pools = [KvPool(layout, NUM_BLOCKS, torch.device(device)) for layout in layouts()]
    settle(device)
    return pools


def check_arrived(targets: list[KvPool], device: str) -> None:
    for target, source in zip(targets, filled(device), strict=True):
        assert torch.equal(target.content[list(TARGETS)], source.content[list(SOURCES)])
        assert not target.content[0].any()


@pytest.fixture
def far_pool() -> Iterator[tuple["subprocess.Popen[str]", Offer]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.kernels.far_pool"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        yield process, offer_of(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def receive_all(receiver: IpcReceiver, targets: list[KvPool], integrity: Integrity) -> None:
    expected = filled("cpu")
    for group, target in enumerate(targets):
        block_bytes, checksums = target.layout.block_bytes, ()
        if integrity is Integrity.CHECKSUMS:
            checksums = checksums_of(expected[group].read_blocks(SOURCES), block_bytes)
        run = BlockBatch(group, 0, checksums, source_blocks=SOURCES)
        await receiver.receive(run, target, TARGETS, integrity)


@pytest.mark.smoke
@pytest.mark.gpu  # the interpreter has no memory of a GPU for others to open
@pytest.mark.parametrize("integrity", [Integrity.FENCE, Integrity.CHECKSUMS])
def test_cuda_ipc_copies_blocks_from_another_process(device, far_pool, integrity):
    if integrity is Integrity.CHECKSUMS:
        pytest.importorskip("xxhash")
    _, offered = far_pool
    targets = empty(device)
    receiver = asyncio.run(CudaIpcConnector(targets).attach(offered))
    asyncio.run(receive_all(receiver, targets, integrity))
    check_arrived(targets, device)
    receiver.close()


@pytest.mark.gpu
def test_cuda_ipc_survives_a_killed_source(device, far_pool):
    """Its memory stays readable or it does not; either way this process goes on."""
    process, offered = far_pool
    targets = empty(device)
    receiver = asyncio.run(CudaIpcConnector(targets).attach(offered))
    asyncio.run(receive_all(receiver, targets, Integrity.FENCE))
    process.kill()
    process.wait()
    with suppress(UnavailableError):
        asyncio.run(receive_all(receiver, targets, Integrity.FENCE))
    receiver.close()
    probe = torch.ones(2**20, device=device)
    assert float(probe.sum()) == 2**20


def test_grpc_transport_copies_blocks_through_the_host(device):
    pytest.importorskip("xxhash")
    sources, targets = filled(device), empty(device)

    async def hand_over() -> None:
        connector = GrpcConnector()
        receiver = await connector.attach(Offer())
        for group, (source, target) in enumerate(zip(sources, targets, strict=True)):
            async for batch in connector.send(group, 0, SOURCES, source, Integrity.CHECKSUMS):
                arrived = memoryview(b"".join(batch.payload))
                copy = BlockBatch(group, batch.first_block, batch.checksums, (arrived,))
                into = TARGETS[batch.first_block : batch.first_block + len(batch.checksums)]
                await receiver.receive(copy, target, into, Integrity.CHECKSUMS)

    asyncio.run(hand_over())
    check_arrived(targets, device)
