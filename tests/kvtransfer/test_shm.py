"""The door to a worker's pools: who is let in, and what a claimant makes of what it finds."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.engine.cache.kv_pool import KvPool
from baton.errors import DataLossError, FailedPreconditionError, UnavailableError
from baton.serving.channels import Channels
from baton.worker.pairing import Pairing
from baton_kvtransfer import sources
from baton_kvtransfer.block_batch import BlockBatch
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import GRPC, NIXL, SHM, Integrity
from baton_kvtransfer.connectors.nixl.claimant import NixlReader
from baton_kvtransfer.connectors.shm import claimant as shm_claimant
from baton_kvtransfer.connectors.shm import source as source_side
from baton_kvtransfer.connectors.shm.claimant import attach
from baton_kvtransfer.connectors.shm.source import HandleServer, PlaceSender
from baton_kvtransfer.connectors.shm.unix_peer import GREETING, HandleEndpoint, abstract
from baton_kvtransfer.offers import Description
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


async def attached(shm, layouts=HYBRID):
    return await asyncio.to_thread(attach, shm, layouts)


async def refusal(shm, layouts=HYBRID) -> str:
    with pytest.raises(UnavailableError) as caught:
        await attached(shm, layouts)
    return str(caught.value)


def two_pools() -> list[KvPool]:
    return [filled_pool(5, layout) for layout in HYBRID]


async def test_shm_reader_and_handle_server_notice_each_other_close():
    pools = two_pools()
    async with HandleServer(pools) as server:
        mapped = num_mapped()
        receiver = await attached(server.endpoint)
        gone = asyncio.Event()
        receiver.watch(gone.set)
        assert (len(server._readers), num_mapped()) == (1, mapped + 2)
        other = await attached(server.endpoint)
        assert len(server._readers) == 2
        other.close()
        await until(lambda: len(server._readers) == 1, within=2.0)
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
        assert not server._readers


@pytest.mark.parametrize("side", [source_side, shm_claimant], ids=["source", "claimant"])
async def test_shm_refuses_peer_of_other_user_on_either_side(side, monkeypatch):
    monkeypatch.setattr(side, "is_same_user", lambda _connection: False)
    async with HandleServer(two_pools()) as server:
        files = len(open_files())
        await refusal(server.endpoint)
        await asyncio.sleep(0.01)
        assert not server._readers
        assert len(open_files()) <= files


async def test_shm_attach_refuses_pools_of_wrong_number_or_size():
    async with HandleServer(two_pools()) as server:
        mapped = num_mapped()
        assert "2 pools" in await refusal(server.endpoint, HYBRID[:1])
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(5, 6)))
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(4, 5)))
        assert "bytes where" in await refusal(replace(server.endpoint, num_blocks=(5, 2**40)))
        assert num_mapped() == mapped


@pytest.mark.parametrize("greeting", [b"", b"somebody", GREETING])
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
    piece = shm_claimant._PIECE_BYTES
    cuts = [at for cut in range(piece, block_bytes, piece) for at in (cut - 1, cut)]
    async with HandleServer([source]) as server:
        receiver = await attached(server.endpoint, layouts)
        run = await anext(PlaceSender(Integrity.CHECKSUMS).send(0, 0, places, source))
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
async def test_shm_threads_share_blocks_of_batch(num_blocks, integrity, monkeypatch):
    layouts = (LAYOUT,)
    monkeypatch.setattr(shm_claimant, "_THREAD_BYTES", 3 * LAYOUT.block_bytes)
    monkeypatch.setattr(shm_claimant, "_MOST_THREADS", 4)
    source, target = filled_pool(20), pool_of(20, LAYOUT)
    places = tuple(range(num_blocks, 0, -1))
    into = tuple(range(21 - num_blocks, 21))
    async with HandleServer([source]) as server:
        receiver = await attached(server.endpoint, layouts)
        run = await anext(PlaceSender(integrity).send(0, 0, places, source))
        await receiver.receive(run, target, into, integrity)
        receiver.close()
    assert contents(target, into) == contents(source, places)


async def test_shm_waits_for_all_threads_when_one_fails(monkeypatch):
    monkeypatch.setattr(shm_claimant, "_THREAD_BYTES", 1)
    monkeypatch.setattr(shm_claimant, "_MOST_THREADS", 2)
    going_on, copy = threading.Event(), shm_claimant._copy_digested
    source, target = filled_pool(2), pool_of(2, LAYOUT)

    def slow_for_the_second(source, target):
        if target.ctypes.data != first:
            assert going_on.wait(TIMEOUT)
        return copy(source, target)

    first = target.content[1].data_ptr()
    monkeypatch.setattr(shm_claimant, "_copy_digested", slow_for_the_second)
    async with HandleServer([source]) as server:
        receiver = await attached(server.endpoint, (LAYOUT,))
        run = await anext(PlaceSender(Integrity.CHECKSUMS).send(0, 0, (1, 2), source))
        source.content[1, 0] ^= 1
        receiving = asyncio.create_task(receiver.receive(run, target, (1, 2), Integrity.CHECKSUMS))
        assert not (await asyncio.wait({receiving}, timeout=0.2))[0]
        receiving.cancel()
        assert not (await asyncio.wait({receiving}, timeout=0.2))[0]
        going_on.set()
        with pytest.raises((DataLossError, asyncio.CancelledError)):
            await receiving
        receiver.close()
    assert contents(target, (2,)) == contents(source, (2,))


@pytest.mark.parametrize(
    ("integrity", "num_layers", "num_blocks", "sizes"),
    [
        (Integrity.CHECKSUMS, 512, 600, [8, 8, 16, 32, 64, 128, 128, 128, 88]),
        (Integrity.CHECKSUMS, 2**17, 3, [1, 1, 1]),
        (Integrity.FENCE, 512, 1100, [1024, 76]),
    ],
)
async def test_place_batches_grow_only_with_checksums(
    integrity, num_layers, num_blocks, sizes, monkeypatch
):
    layout = layout_of(num_layers)
    monkeypatch.setattr(source_side, "checksums_of", lambda *_: ())
    pool = SimpleNamespace(layout=layout, device=torch.device("cpu"), read_blocks=list)
    batches = PlaceSender(integrity).send(0, 0, range(num_blocks), pool)
    assert [len(batch.source_blocks) async for batch in batches] == sizes


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
        assert len(ends.handle_server._readers) == 1
        assert caplog.text.count("fetching from") == 1


async def test_fetch_falls_back_to_grpc_and_says_why(monkeypatch):
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    monkeypatch.setattr(shm_claimant, "host_id", lambda: "elsewhere")
    async with transfer(connector="auto") as ends:
        report = await fetched(ends)
        assert report.connector is GRPC
        assert "not by shm: the other worker is on another host; not by nixl: " in report.reason


async def test_fetch_refuses_when_demanded_transport_is_missing(monkeypatch):
    monkeypatch.setattr(shm_claimant, "host_id", lambda: "elsewhere")
    async with transfer(connector="shm") as ends:
        with pytest.raises(FailedPreconditionError, match=r"only come by shm, .* another host"):
            await fetched(ends)


async def test_grpc_transport_requires_checksums():
    async with transfer(connector="grpc") as ends:
        with pytest.raises(FailedPreconditionError, match="grpc needs checksums"):
            await fetched(ends, integrity=Integrity.FENCE)


async def test_sources_ask_restarted_source_again(monkeypatch):
    async with transfer(connector="auto") as ends:
        assert (await fetched(ends)).connector is SHM
        for reader in tuple(ends.handle_server._readers):
            ends.handle_server._drop_reader(reader)
        await until(lambda: not ends.fetcher._sources._transports, within=2.0)
        assert (await fetched(ends, 1)).connector is SHM
        assert len(ends.handle_server._readers) == 1


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
            assert len(ends.fetcher._sources._transports) == 1


async def test_lost_call_of_a_source_harms_no_transfer_in_flight():
    async with transfer(8, connector="shm") as ends:
        table, sources = tuple(range(1, 9)), ends.fetcher._sources
        with ends.lease(8) as lease:
            lease.advance(((1, 2, 3, 4),), 4)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(table), TIMEOUT)
            in_flight = asyncio.create_task(fetch)
            await lease.claimed()
            sources.lost(ends.endpoint, EPOCH)
            await fetched_again(ends)
            assert len(ends.handle_server._readers) == 2
            lease.advance((table,), 8)
            lease.complete(None, lambda: None)
            await in_flight
        await until(lambda: len(ends.handle_server._readers) == 1, within=TIMEOUT)
        assert len(sources._transports) == 1


async def fetched_again(ends) -> None:
    with ends.computed_lease((3,), lease_id=bytes(16)):
        handle = ends.handle(1, lease_id=bytes(16))
        await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)


@pytest.mark.parametrize("leaves_openly", [True, False])
async def test_fetcher_forgets_sources_that_have_left(leaves_openly, monkeypatch):
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    if not leaves_openly:  # such as one of another host
        monkeypatch.setattr(shm_claimant, "host_id", lambda: "elsewhere")
        monkeypatch.setattr(sources, "_IDLE_SECONDS", 0.0)
    channels = Channels(idle_seconds=0.0)
    pairing = Pairing(VERSION, MODEL, PLAIN)
    fetcher = KvFetcher([pool_of(8)], pairing, CLAIMANT, channels, connector="auto")
    for _ in range(8):
        async with transfer(8) as ends:
            with ends.computed_lease((3,)):
                await fetcher.fetch(ends.handle(1), allocation((2,)), TIMEOUT)
        left = 0 if leaves_openly else 1
        await until(lambda left=left: len(fetcher._sources._transports) == left, within=TIMEOUT)
        assert len(fetcher._sources._last_used) == left
        assert len(channels._channels) == 1
    fetcher.close()
    await channels.close()


async def test_shm_is_tried_again_after_a_source_was_slow_once(monkeypatch):
    monkeypatch.setattr(shm_claimant, "_CONNECT_TIMEOUT", 0.1)
    monkeypatch.setattr(sources, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    async with transfer(connector="auto") as ends:
        admit, stalls = HandleServer._admit, [0.3]

        def slow_once(server, reader):
            if stalls:
                time.sleep(stalls.pop())
            admit(server, reader)

        monkeypatch.setattr(HandleServer, "_admit", slow_once)
        assert (await fetched(ends)).connector is GRPC
        assert (await fetched(ends, 1)).connector is SHM


async def test_shm_is_tried_again_although_nixl_attached(monkeypatch):
    monkeypatch.setattr(shm_claimant, "_CONNECT_TIMEOUT", 0.1)
    monkeypatch.setattr(sources, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(sources, "is_installed", lambda: True)
    admit, stalls = HandleServer._admit, [0.3]

    def slow_once(server, reader):
        if stalls:
            time.sleep(stalls.pop())
        admit(server, reader)

    async def attach_nixl(_reader, _offer):
        return SimpleNamespace(is_open=True, close=lambda: None)

    monkeypatch.setattr(HandleServer, "_admit", slow_once)
    monkeypatch.setattr(NixlReader, "attach", attach_nixl)
    async with HandleServer(two_pools()) as server:

        async def describe(_endpoint, _wanted):
            return Description(7, server.endpoint, nixl=object())

        ways = sources.Sources(two_pools(), "auto", describe, NixlReader(()))
        assert [(await ways.transport("source", 7)).connector for _ in range(2)] == [NIXL, SHM]
        ways.close()


@pytest.mark.parametrize("call", ["socket", "recv_fds"])
async def test_shm_is_tried_again_after_descriptors_ran_out(call, monkeypatch):
    monkeypatch.setattr(sources, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    done = {"socket": socket.socket, "recv_fds": socket.recv_fds}[call]
    failures = ["no descriptor is left"]

    def fail_once(*arguments):
        if not failures:
            return done(*arguments)
        failures.pop()
        if call == "socket":
            raise OSError(errno.EMFILE, "too many open files")
        return GREETING, [], socket.MSG_CTRUNC, None

    async with transfer(connector="auto") as ends:
        stub = SimpleNamespace(**{**vars(socket), call: fail_once})
        monkeypatch.setattr(shm_claimant, "socket", stub)
        assert (await fetched(ends)).connector is GRPC
        assert not failures
        assert (await fetched(ends, 1)).connector is SHM


async def test_sources_ask_again_after_failed_description(monkeypatch):
    monkeypatch.setattr(sources, "is_installed", lambda: False)
    answers = [UnavailableError("the cat"), None]

    async def describe(_endpoint, _wanted):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return Description(7, "nothing to offer", "nothing to offer")

    ways = sources.Sources(two_pools(), "auto", describe, NixlReader(()))
    first = asyncio.create_task(ways.transport("source", 7))
    await asyncio.sleep(0)
    first.cancel()  # whoever asked is gone before the answer
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.01)
    way = await ways.transport("source", 7)
    assert way.connector is GRPC
    assert "not by shm: nothing to offer" in way.reason
    assert not answers
    ways.close()


async def test_sources_unmap_pools_attached_after_close(monkeypatch):
    asked, going_on, receivers = threading.Event(), threading.Event(), []

    def attach_slowly(*arguments):
        asked.set()
        assert going_on.wait(TIMEOUT)
        receivers.append(attach(*arguments))
        return receivers[0]

    monkeypatch.setattr(shm_claimant, "attach", attach_slowly)
    pools = two_pools()
    async with HandleServer(two_pools()) as server:
        mapped = num_mapped()

        async def describe(_endpoint, _wanted):
            return Description(7, server.endpoint, "nothing to offer")

        ways = sources.Sources(pools, "shm", describe, NixlReader(()))
        asking = asyncio.create_task(ways.transport("source", 7))
        assert await asyncio.to_thread(asked.wait, TIMEOUT)
        ways.close()
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(
            lambda: receivers and not (receivers[0].is_open or server._readers), within=TIMEOUT
        )
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
        assert len(server._readers) == 1
        receiver.close()
        assert "cannot be read" in await refusal(server.endpoint)  # who has no folder finds nobody
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
