"""Pools on a GPU that another process opens, with memory of this process in the GPU's place. What
CUDA itself does is tested in `tests/gpu`."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from baton.engine.executor.cache.cuda_ipc import CudaDriver, IpcPlace, MappedMemory, load_driver
from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import DataLossError, FailedPreconditionError, UnavailableError
from baton_kvtransfer.connector import Integrity, Offer, Region
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector, IpcReceiver
from baton_kvtransfer.connectors.host import host_id
from baton_kvtransfer.connectors.nixl.claimant import NixlReceiver
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.stream.places import checked_places
from baton_kvtransfer.stream.transfer_stream import TransferStream
from tests.support.kvtransfer.loopback import (
    HYBRID,
    allocation,
    contents,
    filled_pool,
    pool_of,
    transfer,
)

CPU = torch.device("cpu")
UUID = bytes(range(16))
OFFSET = 512


class Memory:
    """Allocations by handle, in this process. Opened ones are counted."""

    def __init__(self, pools: list[KvPool]) -> None:
        self.allocations = {}
        for number, pool in enumerate(pools):
            content = pool.content.view(-1)
            self.allocations[bytes([number]) * 64] = torch.cat((content[:OFFSET] + 1, content))
        self.opened: dict[int, torch.Tensor] = {}
        self.sees = {UUID: CPU}
        self.contexts: list[torch.device] = []

    def device_uuid(self, device):
        return UUID

    def visible(self):
        return self.sees

    def reaches(self, device, other):
        return device == other

    def export(self, memory):
        return IpcPlace(bytes(64), OFFSET)

    def open(self, handle, device):
        if handle not in self.allocations:
            raise RuntimeError("no such handle")
        self.contexts.append(device)
        address = 1_000_000 * (1 + len(self.opened))
        self.opened[address] = self.allocations[handle]
        return address

    def view(self, address, num_bytes, device):
        base = address // 1_000_000 * 1_000_000
        content = self.opened[base][address - base :]
        if num_bytes > len(content):
            raise RuntimeError("outside of the allocation")
        return content[:num_bytes]

    def close(self, address):
        del self.opened[address]


def region(handle: bytes = bytes(64), offset: int = OFFSET, uuid: bytes = UUID) -> Region:
    return Region(handle=handle, offset=offset, device_uuid=uuid)


def offer_of(pools: list[KvPool], **changes: Any) -> Offer:
    regions = tuple(region(bytes([number]) * 64) for number, _ in enumerate(pools))
    fields = {"num_blocks": tuple(pool.num_blocks for pool in pools), "regions": regions}
    return Offer(**{"host": host_id(), **fields, **changes})


async def attached(
    offer: Offer, pools: list[KvPool], memory: "Memory", stream: TransferStream | None = None
) -> IpcReceiver:
    return await CudaIpcConnector(pools, memory, stream).attach(offer)


def pool_with(copy_content: Any) -> KvPool:
    """A pool with another method to copy to it."""
    return pool_of(8, HYBRID[0], type("OtherPool", (KvPool,), {"copy_content": copy_content}))


@pytest.fixture
def sources():
    return [filled_pool(8, layout) for layout in HYBRID]


@pytest.fixture
def targets():
    return [pool_of(8, layout) for layout in HYBRID]


async def test_cuda_ipc_copies_blocks_and_closes_memory(sources, targets):
    memory = Memory(sources)
    receiver = await attached(offer_of(sources), targets, memory)
    for group in (0, 1):
        run = BlockBatch(group, 0, source_blocks=(5, 2, 7))
        await receiver.receive(run, targets[group], (1, 8, 3), Integrity.FENCE)
        assert contents(targets[group], (1, 8, 3)) == contents(sources[group], (5, 2, 7))
    assert len(memory.opened) == 2
    receiver.close()
    receiver.close()
    assert not memory.opened
    with pytest.raises(UnavailableError):
        await receiver.receive(run, targets[1], (1, 8, 3), Integrity.FENCE)


async def test_cuda_ipc_opens_pools_of_one_allocation(sources, targets):
    memory = Memory(sources[:1])
    offer = offer_of(sources[:1] * 2, regions=(region(),) * 2)
    receiver = await attached(offer, targets[:1] * 2, memory)
    run = BlockBatch(1, 0, source_blocks=(5,))
    await receiver.receive(run, targets[0], (1,), Integrity.FENCE)
    assert contents(targets[0], (1,)) == contents(sources[0], (5,))
    receiver.close()
    assert not memory.opened


async def test_cuda_ipc_source_offers_places_of_mapped_pools(sources):
    """The pools are another process's: this one could not export them."""
    memory = Memory(sources)
    content = memory.allocations[bytes(64)][OFFSET:]
    memory.export = None
    mapped = MappedMemory(IpcPlace(bytes(64), OFFSET), len(content), CPU, memory)
    pool = KvPool(HYBRID[0], 8, CPU, mapped=mapped)
    assert contents(pool, (1, 8)) == contents(sources[0], (1, 8))
    assert CudaIpcConnector([pool], memory).region_of(pool) == region()
    mapped.close()
    mapped.close()
    assert not memory.opened


async def test_cuda_ipc_opens_memory_in_own_context(sources, targets):
    """That of the source's GPU would take memory there, and copy by way of it."""
    memory = Memory(sources)
    memory.sees, memory.reaches = {UUID: torch.device("cuda", 1)}, lambda *_: True
    await attached(offer_of(sources), targets, memory)
    assert memory.contexts == [pool.device for pool in targets]


def test_cuda_driver_closes_memory_once_for_each_receiver():
    """The driver maps the memory at one address for both."""
    closed = []

    def open_at_one_address(address, _handle, _flags) -> int:
        address._obj.value = 4096
        return 0

    def close(address) -> int:
        closed.append(address.value)
        return 0

    driver = SimpleNamespace(cuIpcOpenMemHandle_v2=open_at_one_address, cuIpcCloseMemHandle=close)
    memory = CudaDriver(lambda: driver, lambda _device: nullcontext())
    for address in [memory.open(bytes(64), CPU), memory.open(bytes(64), CPU)]:
        memory.close(address)
    assert closed == [4096, 4096]
    assert not memory.num_opened


async def test_cuda_ipc_verifies_checksums_of_copy(sources, targets):
    receiver = await attached(offer_of(sources), targets, Memory(sources))
    wanted = checksums_of(sources[0].read_blocks((5, 2)), HYBRID[0].block_bytes)
    run = BlockBatch(0, 0, wanted, source_blocks=(5, 2))
    await receiver.receive(run, targets[0], (1, 2), Integrity.CHECKSUMS)
    wrong = replace(run, source_blocks=(5, 3))
    with pytest.raises(DataLossError, match="checksum of block 1"):
        await receiver.receive(wrong, targets[0], (1, 2), Integrity.CHECKSUMS)


@pytest.mark.parametrize("blocks", [(0, 1), (1, 9), (1,), (1, 2, 3)])
async def test_cuda_ipc_refuses_blocks_outside_pool_as_data_loss(sources, targets, blocks):
    receiver = await attached(offer_of(sources), targets, Memory(sources))
    run = BlockBatch(0, 0, source_blocks=blocks)
    with pytest.raises(DataLossError):
        await receiver.receive(run, targets[0], (1, 2), Integrity.FENCE)
    assert not targets[0].content.any()


async def test_cuda_ipc_waits_for_cancelled_copy_before_closing(sources, targets):
    memory, let_go = Memory(sources), threading.Event()
    receiver = await attached(offer_of(sources), targets, memory)
    target = pool_with(lambda *_: let_go.wait(10.0))
    run = BlockBatch(0, 0, source_blocks=(5, 2))
    receiving = asyncio.create_task(receiver.receive(run, target, (1, 2), Integrity.FENCE))
    await asyncio.sleep(0.01)
    for _ in range(3):
        receiving.cancel()
        await asyncio.sleep(0.01)
    receiver.close()
    assert memory.opened
    assert not receiving.done()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert not memory.opened


async def test_cuda_ipc_reports_unreadable_memory_as_unavailable(sources, targets):
    def fail(*_):
        raise RuntimeError("the cat")

    receiver = await attached(offer_of(sources), targets, Memory(sources))
    run = BlockBatch(0, 0, source_blocks=(5,))
    with pytest.raises(UnavailableError, match="the cat"):
        await receiver.receive(run, pool_with(fail), (1,), Integrity.FENCE)


CHANGES = {
    "another host": {"host": "elsewhere"},
    "1 pools": {"regions": (region(),)},
    "not visible": {"regions": (region(uuid=b"?" * 16),) * 2},
    "no such handle": {"regions": (region(b"?" * 64),) * 2},
    "outside of the allocation": {"num_blocks": (800, 8)},
}


@pytest.mark.parametrize("problem", CHANGES)
async def test_cuda_ipc_names_why_memory_cannot_be_opened(sources, targets, problem):
    memory = Memory(sources)
    with pytest.raises(UnavailableError, match=problem):
        await attached(offer_of(sources, **CHANGES[problem]), targets, memory)
    assert not memory.opened


async def test_cuda_ipc_source_says_why_it_offers_no_memory(sources):
    with pytest.raises(UnavailableError, match="not on a GPU"):
        await CudaIpcConnector(sources, Memory(sources)).offer()


async def test_cuda_ipc_refuses_pools_in_host_memory():
    async with transfer(connector="cuda-ipc") as ends:
        refusal = pytest.raises(FailedPreconditionError, match="are in host memory")
        with ends.computed_lease((1,)), refusal:
            await ends.fetcher.fetch(ends.handle(1), allocation((1,)), 10.0)


def test_cuda_driver_reports_missing_library():
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libmissing\.so\.1"):
        load_driver("libmissing.so.1")


class NotedStream(TransferStream):
    """Notes while it is the thread's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.is_current = False

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.is_current = True
        with super().on(device):
            yield
        self.is_current = False


class BoundPool(KvPool):
    """Asserts that it is read and copied to on `stream` alone."""

    stream: NotedStream

    def read_blocks(self, block_ids):
        assert self.stream.is_current, "read on the engine's stream"
        return super().read_blocks(block_ids)

    def copy_content(self, *arguments):
        assert self.stream.is_current, "copied on the engine's stream"
        super().copy_content(*arguments)


async def test_blocks_are_copied_on_the_transfer_stream(sources, targets):
    """By the sender and each receiver: on the engine's stream they would wait for its steps."""
    stream, into = NotedStream(), (1, 8, 3)
    source, target = (make(8, HYBRID[0], BoundPool) for make in (filled_pool, pool_of))
    source.stream = target.stream = stream
    (run,) = [batch async for batch in checked_places(stream, 0, 0, [5, 2, 7], source)]
    ipc = await attached(offer_of(sources), targets, Memory(sources), stream)
    await ipc.receive(run, target, into, Integrity.CHECKSUMS)
    ipc.close()
    read = AsyncMock()  # what it would read is there
    agent = SimpleNamespace(is_open=True)
    nixl = NixlReceiver(SimpleNamespace(read=read), agent, None, [8], stream)
    await nixl.receive(run, target, into, Integrity.CHECKSUMS)
    read.assert_awaited_once()
