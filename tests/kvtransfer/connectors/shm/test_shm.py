"""The door to a worker's pools: who is let in, and what a claimant makes of what it finds."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import DataLossError, FailedPreconditionError, UnavailableError
from baton.serving.grpc.channels import Channels
from baton.worker.pairing import Pairing
from baton_kvtransfer import sources
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import GRPC, NIXL, SHM, Integrity
from baton_kvtransfer.connectors.shm.claimant import PIECE_BYTES, CopyThreads, attach
from baton_kvtransfer.connectors.shm.source import HandleServer, PlaceSender
from baton_kvtransfer.connectors.shm.unix_peer import GREETING, HandleEndpoint, abstract, host_id
from baton_kvtransfer.offers import Description
from baton_kvtransfer.sources import Sources, TransportTimes
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.stream.send_ahead import PartSizes
from baton_kvtransfer.stream.transfer_stream import TransferStream
from tests.support.descriptors import descriptors_left
from tests.support.kvtransfer.held import abstract_sockets, num_mapped, open_files
from tests.support.kvtransfer.loopback import (
    CLAIMANT,
    EPOCH,
    HYBRID,
    LAYOUT,
    MODEL,
    PLAIN,
    VERSION,
    allocation,
    contents,
    filled_pool,
    layout_of,
    pool_of,
    transfer,
)
from tests.support.repository import ROOT
from tests.support.waiting import until

TIMEOUT = 10.0


async def attached(shm, layouts=HYBRID, **options):
    return await asyncio.to_thread(attach, shm, layouts, **options)


async def refusal(shm, layouts=HYBRID, **options) -> str:
    with pytest.raises(UnavailableError) as caught:
        await attached(shm, layouts, **options)
    return str(caught.value)


def sender(integrity: Integrity) -> PlaceSender:
    return PlaceSender(integrity, TransferStream())


def two_pools() -> list[KvPool]:
    return [filled_pool(5, layout) for layout in HYBRID]


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)


async def test_shm_reader_and_handle_server_notice_each_other_close():
    pools = two_pools()
    async with HandleServer(pools) as server:
        mapped = num_mapped()
        receiver = await attached(server.endpoint)
        gone = asyncio.Event()
        receiver.watch(gone.set)
        assert (server.num_readers, num_mapped()) == (1, mapped + 2)
        other = await attached(server.endpoint)
        assert server.num_readers == 2
        other.close()
        await until(lambda: server.num_readers == 1, within=2.0)
    async with asyncio.timeout(2.0):
        await gone.wait()
    receiver.close()
    receiver.close()
    assert num_mapped() == mapped
    with pytest.raises(UnavailableError):
        await receiver.receive(
            BlockBatch(0, 0, source_blocks=(1,)), pools[0], (1,), Integrity.FENCE
        )


async def test_handle_server_removes_its_endpoint_when_closed():
    async with HandleServer(two_pools()) as server:
        assert any(server.endpoint.address in name for name in abstract_sockets())
    assert not any(server.endpoint.address in name for name in abstract_sockets())
    assert "refused" in await refusal(server.endpoint)


async def test_handle_server_refuses_pools_without_shared_memory():
    pool = KvPool(LAYOUT, 2, two_pools()[0].device)
    with pytest.raises(ValueError, match="not in shared memory"):
        HandleServer([pool])


async def test_shm_attach_refuses_endpoint_of_other_host():
    async with HandleServer(two_pools()) as server:
        assert "another host" in await refusal(replace(server.endpoint, host="elsewhere"))
        assert not server.num_readers


@pytest.mark.parametrize("side", ["source", "claimant"])
async def test_shm_refuses_peer_of_other_user_on_either_side(side):
    users = {side: os.geteuid() + 1}
    async with HandleServer(two_pools(), user=users.get("source")) as server:
        files = len(open_files())
        await refusal(server.endpoint, user=users.get("claimant"))
        await asyncio.sleep(0.01)
        assert not server.num_readers
        assert len(open_files()) <= files


async def test_shm_attach_refuses_pools_of_wrong_number_or_size():
    async with HandleServer(two_pools()) as server:
        mapped = num_mapped()
        assert "2 pools" in await refusal(server.endpoint, HYBRID[:1])
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(5, 6)))
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(4, 5)))
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(5, 2**40)))
        assert num_mapped() == mapped


@pytest.mark.parametrize("greeting", [b"", b"stranger", GREETING])
async def test_shm_attach_refuses_stranger_at_endpoint(greeting):
    name = f"baton-kv-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(abstract(name))
        stranger.listen()

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(greeting)

        async with HandleServer(two_pools()) as server:
            answering = asyncio.create_task(asyncio.to_thread(answer))
            assert "0 descriptors for 2" in await refusal(replace(server.endpoint, address=name))
            await answering


@pytest.mark.parametrize("blocks", [(0, 1), (1, 6), (2**31, 1), (1,), (1, 2, 3), ()])
async def test_shm_refuses_blocks_outside_pool_as_data_loss(blocks):
    pools, target = two_pools(), filled_pool(5, HYBRID[0])
    before = contents(target, (1, 2, 3, 4, 5))
    async with HandleServer(pools) as server:
        receiver = await attached(server.endpoint)
        for integrity in (Integrity.FENCE, Integrity.CHECKSUMS):
            with pytest.raises(DataLossError):
                await receiver.receive(
                    BlockBatch(0, 0, source_blocks=blocks), target, (1, 2), integrity
                )
        receiver.close()
    assert contents(target, (1, 2, 3, 4, 5)) == before


async def test_shm_refuses_blocks_without_required_checksums():
    async with HandleServer(two_pools()) as server:
        receiver = await attached(server.endpoint)
        run, target = BlockBatch(0, 0, source_blocks=(1, 2)), filled_pool(5, HYBRID[0])
        with pytest.raises(DataLossError, match="checksum of block 0"):
            await receiver.receive(run, target, (1, 2), Integrity.CHECKSUMS)
        receiver.close()


# A block that is copied in one piece, one in several, and one whose last piece is short.
BLOCK_BYTES = {layers * 512: layers for layers in (3, 512, 700)}


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
async def test_shm_checksums_find_one_wrong_byte_anywhere(block_bytes):
    layouts = (layout_of(BLOCK_BYTES[block_bytes]),)
    assert layouts[0].block_bytes == block_bytes
    source, target = filled_pool(6, layouts[0]), pool_of(6, layouts[0])
    places, into = (2, 5, 1, 6), (3, 4, 6, 1)
    pieces = range(PIECE_BYTES, block_bytes, PIECE_BYTES)
    cuts = [at for cut in pieces for at in (cut - 1, cut)]
    async with HandleServer([source]) as server:
        receiver = await attached(server.endpoint, layouts)
        run = await anext(sender(Integrity.CHECKSUMS).send(0, 0, places, source))
        await receiver.receive(run, target, into, Integrity.CHECKSUMS)
        assert contents(target, into) == contents(source, places)
        for index, place in enumerate(places):
            for at in (0, *cuts, block_bytes - 1):
                source.content[place, at] ^= 1
                with pytest.raises(DataLossError, match=f"checksum of block {index} of group 0"):
                    await receiver.receive(run, target, into, Integrity.CHECKSUMS)
                source.content[place, at] ^= 1
        receiver.close()


@pytest.mark.parametrize("integrity", Integrity)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 16])
async def test_shm_threads_share_blocks_of_batch(num_blocks, integrity):
    threads = CopyThreads(max_threads=4, min_bytes=3 * LAYOUT.block_bytes)
    source, target = filled_pool(20), pool_of(20, LAYOUT)
    places = tuple(range(num_blocks, 0, -1))
    into = tuple(range(21 - num_blocks, 21))
    async with HandleServer([source]) as server:
        receiver = await attached(server.endpoint, PLAIN, threads=threads)
        run = await anext(sender(integrity).send(0, 0, places, source))
        await receiver.receive(run, target, into, integrity)
        receiver.close()
    assert contents(target, into) == contents(source, places)


class SlowBlocks:
    """Content of a pool whose block `slow` cannot be written before `going_on` is set."""

    def __init__(self, content: torch.Tensor, slow: int, going_on: threading.Event) -> None:
        self._content, self._slow, self._going_on = content, slow, going_on

    def numpy(self) -> "SlowBlocks":
        return self

    def __getitem__(self, block: int) -> Any:
        assert block != self._slow or self._going_on.wait(TIMEOUT)
        return self._content.numpy()[block]


async def test_shm_waits_for_all_threads_when_one_fails():
    going_on = threading.Event()
    source, target = filled_pool(2), pool_of(2, LAYOUT)
    slow: Any = SimpleNamespace(content=SlowBlocks(target.content, 2, going_on))
    async with HandleServer([source]) as server:
        threads = CopyThreads(max_threads=2, min_bytes=1)
        receiver = await attached(server.endpoint, PLAIN, threads=threads)
        run = await anext(sender(Integrity.CHECKSUMS).send(0, 0, (1, 2), source))
        source.content[1, 0] ^= 1
        receiving = asyncio.create_task(receiver.receive(run, slow, (1, 2), Integrity.CHECKSUMS))
        assert not (await asyncio.wait({receiving}, timeout=0.2))[0]
        receiving.cancel()
        assert not (await asyncio.wait({receiving}, timeout=0.2))[0]
        going_on.set()
        with pytest.raises((DataLossError, asyncio.CancelledError)):
            await receiving
        receiver.close()
    assert contents(target, (2,)) == contents(source, (2,))


@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "sizes"),
    [(512, 600, [8, 8, 16, 32, 64, 128, 128, 128, 88]), (2**17, 3, [1, 1, 1])],
)
def test_part_sizes_grow_up_to_their_limit(num_layers, num_blocks, sizes):
    parts = PartSizes().parts(num_blocks, layout_of(num_layers).block_bytes)
    assert [len(part) for part in parts] == sizes


@pytest.mark.parametrize(
    ("integrity", "sizes"), [(Integrity.CHECKSUMS, [8, 8, 4]), (Integrity.FENCE, [20])]
)
async def test_place_batches_grow_only_with_checksums(integrity, sizes):
    pool = filled_pool(20, layout_of(512))
    batches = sender(integrity).send(0, 0, range(1, 21), pool)
    assert [len(batch.source_blocks) async for batch in batches] == sizes


async def test_place_batches_without_checksums_are_of_limited_size():
    pool: Any = SimpleNamespace(layout=layout_of(512))  # which nothing reads
    batches = sender(Integrity.FENCE).send(0, 0, range(1100), pool)
    assert [len(batch.source_blocks) async for batch in batches] == [1024, 76]


async def fetched(ends, turn: int = 0, **changes):
    lease_id = bytes([turn]) * 16
    with ends.computed_lease((3,), lease_id=lease_id):
        handle = ends.handle(1, lease_id=lease_id, **changes)
        _, report = await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)
    assert contents(ends.target, (2,)) == contents(ends.source, (3,))
    return report


async def test_fetch_takes_fastest_common_transport_and_logs_it(caplog):
    caplog.set_level("INFO", logger=sources.__name__)
    async with transfer(connector="auto") as ends:
        report = await fetched(ends)
        assert report.connector is SHM
        assert report.reason.startswith("both are on one host and of one user; not by cuda-ipc: ")
        assert f"fetching from {ends.endpoint} by shm" in caplog.text
        await fetched(ends, 1)
        assert ends.handle_server.num_readers == 1
        assert caplog.text.count("fetching from") == 1


async def test_fetch_falls_back_to_grpc_and_says_why(without_nixl):
    async with transfer(connector="auto", host="elsewhere") as ends:
        report = await fetched(ends)
        assert report.connector is GRPC
        assert "not by shm: the other worker is on another host; not by nixl: " in report.reason


async def test_fetch_refuses_when_demanded_transport_is_missing():
    async with transfer(connector="shm", host="elsewhere") as ends:
        with pytest.raises(FailedPreconditionError, match=r"only come by shm, .* another host"):
            await fetched(ends)


async def test_grpc_transport_requires_checksums():
    async with transfer(connector="grpc") as ends:
        with pytest.raises(FailedPreconditionError, match="grpc needs checksums"):
            await fetched(ends, integrity=Integrity.FENCE)


async def test_sources_ask_restarted_source_again():
    async with transfer(connector="auto") as ends:
        assert (await fetched(ends)).connector is SHM
        ends.handle_server.disconnect()
        await until(lambda: not ends.fetcher.sources.num_known, within=2.0)
        assert (await fetched(ends, 1)).connector is SHM
        assert ends.handle_server.num_readers == 1


async def test_handle_of_an_earlier_epoch_harms_no_transfer_in_flight():
    async with transfer(8, connector="auto") as ends:
        with ends.lease(8) as lease:
            lease.advance(((1, 2, 3, 4),), 4)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(tuple(range(1, 9))), TIMEOUT)
            in_flight = asyncio.create_task(fetch)
            await lease.claimed()
            late = ends.handle(8, source_epoch=EPOCH - 1)
            with pytest.raises(FailedPreconditionError, match=f"is {EPOCH - 1}: it has restarted"):
                await ends.fetcher.fetch(late, allocation(tuple(range(1, 9))), TIMEOUT)
            lease.advance((tuple(range(1, 9)),), 8)
            lease.complete(None, lambda: None)
            assert (await in_flight)[1].connector is SHM
            assert ends.fetcher.sources.num_known == 1


async def test_lost_call_of_a_source_harms_no_transfer_in_flight():
    async with transfer(8, connector="shm") as ends:
        table, sources = tuple(range(1, 9)), ends.fetcher.sources
        with ends.lease(8) as lease:
            lease.advance(((1, 2, 3, 4),), 4)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(table), TIMEOUT)
            in_flight = asyncio.create_task(fetch)
            await lease.claimed()
            sources.lost(ends.endpoint, EPOCH)
            await fetched_again(ends)
            assert ends.handle_server.num_readers == 2
            lease.advance((table,), 8)
            lease.complete(None, lambda: None)
            await in_flight
        await until(lambda: ends.handle_server.num_readers == 1, within=TIMEOUT)
        assert sources.num_known == 1


async def fetched_again(ends) -> None:
    with ends.computed_lease((3,), lease_id=bytes(16)):
        handle = ends.handle(1, lease_id=bytes(16))
        await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)


@pytest.mark.parametrize("leaves_openly", [True, False])
async def test_fetcher_forgets_sources_that_have_left(leaves_openly, without_nixl):
    host, times = None, None
    if not leaves_openly:  # such as one of another host
        host, times = "elsewhere", TransportTimes(idle=0.0)
    channels = Channels(idle_seconds=0.0)
    pairing = Pairing(VERSION, MODEL, PLAIN)
    fetcher = KvFetcher([pool_of(8)], pairing, CLAIMANT, channels, times=times)
    for _ in range(8):
        async with transfer(8, host=host) as ends:
            with ends.computed_lease((3,)):
                await fetcher.fetch(ends.handle(1), allocation((2,)), TIMEOUT)
        left = 0 if leaves_openly else 1
        await until(lambda left=left: fetcher.sources.num_known == left, within=TIMEOUT)
        assert len(channels.endpoints) == 1
    fetcher.close()
    await channels.close()


class ReaderStub:
    """NIXL, by which every source can be read."""

    async def attach(self, _offer):
        return SimpleNamespace(is_open=True, close=lambda: None)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("fallback", [GRPC, NIXL])
async def test_shm_is_tried_again_after_a_source_was_slow(fallback):
    """It accepts a connection later than it may, once, as it runs on the loop that stands still."""
    async with HandleServer(two_pools()) as server:
        stalls = [0.3]

        async def describe(_endpoint, wanted):
            if stalls and not wanted:
                asyncio.get_running_loop().call_soon(time.sleep, stalls.pop())
            return Description(7, server.endpoint, nixl=object())

        ways = Sources(
            two_pools(),
            "auto",
            describe,
            ReaderStub(),
            nixl_problem="" if fallback is NIXL else "none",
            times=TransportTimes(connect=0.1, retry=0.0),
        )
        assert [(await ways.transport("source", 7)).connector for _ in range(2)] == [fallback, SHM]
        ways.close()


async def test_shm_is_not_tried_again_in_another_namespace():
    """Pods without a common folder do not try again every ten seconds."""
    described = []

    async def describe(_endpoint, wanted):
        described.append(wanted)
        return Description(7, HandleEndpoint("baton-kv-absent", host_id(), (8, 8)))

    times = TransportTimes(retry=0.0)
    ways = Sources(two_pools(), "auto", describe, ReaderStub(), times=times)
    chosen = [await ways.transport("source", 7) for _ in range(2)]
    ways.close()
    assert len(described) == len({*described})  # each transport once
    assert "not in this network namespace or --socket-dir" in chosen[0].reason


@pytest.mark.parametrize(("num_left", "reason"), [(0, "open files"), (2, "no descriptor left")])
async def test_shm_is_tried_again_after_descriptors_ran_out(num_left, reason):
    """Two are those of the connection's ends; the pools need two more."""
    async with HandleServer(two_pools()) as server:

        async def describe(_endpoint, _wanted):
            return Description(7, server.endpoint, "nothing to offer")

        times = TransportTimes(retry=0.0)
        ways = Sources(two_pools(), "auto", describe, ReaderStub(), times=times)
        with descriptors_left(os.getpid(), num_left):
            way = await ways.transport("source", 7)
        assert way.connector is GRPC
        assert reason in way.reason
        assert (await ways.transport("source", 7)).connector is SHM
        ways.close()


async def test_sources_ask_again_after_failed_description():
    answers = [UnavailableError("the cat"), None]

    async def describe(_endpoint, _wanted):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return Description(7, "nothing to offer", "nothing to offer")

    ways = Sources(two_pools(), "auto", describe, ReaderStub(), nixl_problem="none")
    first = asyncio.create_task(ways.transport("source", 7))
    await asyncio.sleep(0)
    first.cancel()  # the caller is gone before the answer
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.01)
    way = await ways.transport("source", 7)
    assert way.connector is GRPC
    assert "not by shm: nothing to offer" in way.reason
    assert not answers
    ways.close()


async def test_sources_unmap_pools_attached_after_close():
    """The only thread, in which pools are attached, is busy until then."""
    loop, going_on = asyncio.get_running_loop(), threading.Event()
    thread = ThreadPoolExecutor(1)
    async with HandleServer(two_pools()) as server:
        described = asyncio.Event()

        async def describe(_endpoint, _wanted):
            described.set()
            return Description(7, server.endpoint, "nothing to offer")

        ways = Sources(two_pools(), "shm", describe, ReaderStub())
        mapped = num_mapped()
        loop.set_default_executor(thread)
        busy = loop.run_in_executor(None, going_on.wait, TIMEOUT)
        choosing = asyncio.create_task(ways.transport("source", 7))
        await described.wait()
        ways.close()
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await choosing
        await busy
        await loop.run_in_executor(None, time.sleep, 0)  # it has attached by then
        await until(lambda: not server.num_readers, within=TIMEOUT)
        assert num_mapped() == mapped


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket, which has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield Path(folder)


async def test_handle_server_can_listen_in_folder(short_path):
    folder = str(short_path)
    async with HandleServer(two_pools(), folder) as server:
        assert [path.name for path in short_path.iterdir()] == [server.endpoint.address]
        assert not any(server.endpoint.address in name for name in abstract_sockets())
        receiver = await asyncio.to_thread(attach, server.endpoint, HYBRID, folder)
        assert server.num_readers == 1
        receiver.close()
        assert "cannot be read" in await refusal(server.endpoint)  # without the folder
    assert list(short_path.iterdir()) == []


# Attaches as a process of another network namespace; argv: the door's address and host, the folder.
ELSEWHERE = """
import sys
from tests.support.kvtransfer.loopback import HYBRID
from baton_kvtransfer.connectors.shm.claimant import attach
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint

address, host, *folder = sys.argv[1:]
attach(HandleEndpoint(address, host, (5, 5)), HYBRID, *folder)
"""


APART = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.system
async def test_shm_finds_pools_by_folder_across_network_namespaces(short_path):
    """Needs `unshare` (util-linux) and a kernel that gives its users namespaces."""
    python = [sys.executable, "-c", ELSEWHERE]

    async def outcome(shm: HandleEndpoint, *folder: str) -> tuple[int, str]:
        command = [*APART, *python, shm.address, shm.host, *folder]
        ran = await asyncio.to_thread(
            subprocess.run,
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return ran.returncode, ran.stderr

    async with HandleServer(two_pools()) as without:
        code, said = await outcome(without.endpoint)
        assert code != 0
        assert "refused" in said
    async with HandleServer(two_pools(), str(short_path)) as server:
        code, said = await outcome(server.endpoint, str(short_path))
        assert code == 0, said


async def test_handle_server_removes_only_stale_sockets_in_folder(short_path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(short_path / "baton-kv-killed"))
    (short_path / "other").touch()
    first, second = (HandleServer(two_pools(), str(short_path)) for _ in range(2))
    async with first, second:
        names = {path.name for path in short_path.iterdir()}
        assert names == {"other", first.endpoint.address, second.endpoint.address}
        receiver = await asyncio.to_thread(attach, first.endpoint, HYBRID, str(short_path))
        receiver.close()


@pytest.mark.parametrize("name", ["", "..", "../baton-kv-1", "/tmp/baton-kv-1", "baton-kv-/../1"])
async def test_shm_attach_refuses_socket_name_outside_folder(name, short_path):
    async with HandleServer(two_pools(), str(short_path)) as server:
        shm = replace(server.endpoint, address=name)
        with pytest.raises(UnavailableError, match="no name of a socket"):
            await asyncio.to_thread(attach, shm, HYBRID, str(short_path))


async def test_handle_server_fails_when_folder_cannot_hold_socket(short_path):
    for folder in (short_path / "missing", short_path / ("long" * 30)):
        server = HandleServer(two_pools(), str(folder))
        with pytest.raises(OSError, match=r"No such file|too long"):
            async with server:
                raise AssertionError("it has a socket")
