"""The door to a worker's pools: who is let in, and what a claimant makes of what it finds."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import DataLossError, UnavailableError
from baton_kvtransfer.connector import Integrity, Offer
from baton_kvtransfer.connectors.shm.claimant import PIECE_BYTES, CopyThreads, attach
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from baton_kvtransfer.connectors.shm.source import HandleServer
from baton_kvtransfer.connectors.shm.unix_peer import GREETING, abstract
from baton_kvtransfer.stream.block_batch import BlockBatch
from tests.support.kvtransfer.held import abstract_sockets, num_mapped, open_files
from tests.support.kvtransfer.loopback import (
    HYBRID,
    LAYOUT,
    PLAIN,
    contents,
    filled_pool,
    layout_of,
    pool_of,
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


def two_pools() -> list[KvPool]:
    return [filled_pool(5, layout) for layout in HYBRID]


async def test_shm_reader_and_handle_server_notice_each_other_close():
    pools = two_pools()
    async with HandleServer(pools) as server:
        mapped = num_mapped()
        receiver = await attached(server.offer)
        receiver.watch()
        assert (server.num_readers, num_mapped()) == (1, mapped + 2)
        other = await attached(server.offer)
        assert server.num_readers == 2
        other.close()
        await until(lambda: server.num_readers == 1, within=2.0)
    await until(lambda: not receiver.is_open, within=2.0)
    receiver.close()
    assert num_mapped() == mapped
    with pytest.raises(UnavailableError):
        await receiver.receive(
            BlockBatch(0, 0, source_blocks=(1,)), pools[0], (1,), Integrity.FENCE
        )


async def test_handle_server_removes_its_endpoint_when_closed():
    async with HandleServer(two_pools()) as server:
        assert any(server.offer.address in name for name in abstract_sockets())
    assert not any(server.offer.address in name for name in abstract_sockets())
    assert "refused" in await refusal(server.offer)


async def test_handle_server_refuses_pools_without_shared_memory():
    pool = KvPool(LAYOUT, 2, two_pools()[0].device)
    with pytest.raises(ValueError, match="not in shared memory"):
        HandleServer([pool])


async def test_shm_attach_refuses_endpoint_of_other_host():
    async with HandleServer(two_pools()) as server:
        assert "another host" in await refusal(replace(server.offer, host="elsewhere"))
        assert not server.num_readers


@pytest.mark.parametrize("side", ["source", "claimant"])
async def test_shm_refuses_peer_of_other_user_on_either_side(side):
    users = {side: os.geteuid() + 1}
    async with HandleServer(two_pools(), user=users.get("source")) as server:
        files = len(open_files())
        await refusal(server.offer, user=users.get("claimant"))
        await until(lambda: len(open_files()) <= files)
        assert not server.num_readers


async def test_shm_attach_refuses_pools_of_wrong_number_or_size():
    async with HandleServer(two_pools()) as server:
        mapped = num_mapped()
        assert "2 pools" in await refusal(server.offer, HYBRID[:1])
        assert "bytes where" in await refusal(replace(server.offer, num_blocks=(5, 6)))
        assert "bytes where" in await refusal(replace(server.offer, num_blocks=(4, 5)))
        assert "bytes where" in await refusal(replace(server.offer, num_blocks=(5, 2**40)))
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
            assert "0 descriptors for 2" in await refusal(replace(server.offer, address=name))
            await answering


@pytest.mark.parametrize("blocks", [(0, 1), (1, 6), (2**31, 1), (1,), (1, 2, 3), ()])
async def test_shm_refuses_blocks_outside_pool_as_data_loss(blocks):
    pools, target = two_pools(), filled_pool(5, HYBRID[0])
    before = contents(target, (1, 2, 3, 4, 5))
    async with HandleServer(pools) as server:
        receiver = await attached(server.offer)
        for integrity in (Integrity.FENCE, Integrity.CHECKSUMS):
            with pytest.raises(DataLossError):
                await receiver.receive(
                    BlockBatch(0, 0, source_blocks=blocks), target, (1, 2), integrity
                )
        receiver.close()
    assert contents(target, (1, 2, 3, 4, 5)) == before


async def test_shm_refuses_blocks_without_required_checksums():
    async with HandleServer(two_pools()) as server:
        receiver = await attached(server.offer)
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
        receiver = await attached(server.offer, layouts)
        run = await anext(ShmConnector([source]).send(0, 0, places, source, Integrity.CHECKSUMS))
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
        receiver = await attached(server.offer, PLAIN, threads=threads)
        run = await anext(ShmConnector([source]).send(0, 0, places, source, integrity))
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
        receiver = await attached(server.offer, PLAIN, threads=threads)
        run = await anext(ShmConnector([source]).send(0, 0, (1, 2), source, Integrity.CHECKSUMS))
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


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket, which has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield Path(folder)


async def test_handle_server_can_listen_in_folder(short_path):
    folder = str(short_path)
    async with HandleServer(two_pools(), folder) as server:
        assert [path.name for path in short_path.iterdir()] == [server.offer.address]
        assert not any(server.offer.address in name for name in abstract_sockets())
        receiver = await asyncio.to_thread(attach, server.offer, HYBRID, folder)
        assert server.num_readers == 1
        receiver.close()
        assert "cannot be read" in await refusal(server.offer)  # without the folder
    assert list(short_path.iterdir()) == []


# Attaches as a process of another network namespace; argv: the door's address and host, the folder.
ELSEWHERE = """
import sys
from tests.support.kvtransfer.loopback import HYBRID
from baton_kvtransfer.connectors.shm.claimant import attach
from baton_kvtransfer.connector import Offer

address, host, *folder = sys.argv[1:]
attach(Offer(address, host, num_blocks=(5, 5)), HYBRID, *folder)
"""


APART = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.system
async def test_shm_finds_pools_by_folder_across_network_namespaces(short_path):
    """Needs `unshare` (util-linux) and a kernel that gives its users namespaces."""
    python = [sys.executable, "-c", ELSEWHERE]

    async def outcome(shm: Offer, *folder: str) -> tuple[int, str]:
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
        code, said = await outcome(without.offer)
        assert code != 0
        assert "refused" in said
    async with HandleServer(two_pools(), str(short_path)) as server:
        code, said = await outcome(server.offer, str(short_path))
        assert code == 0, said


async def test_handle_server_removes_only_stale_sockets_in_folder(short_path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(short_path / "baton-kv-killed"))
    (short_path / "other").touch()
    first, second = (HandleServer(two_pools(), str(short_path)) for _ in range(2))
    async with first, second:
        names = {path.name for path in short_path.iterdir()}
        assert names == {"other", first.offer.address, second.offer.address}
        receiver = await asyncio.to_thread(attach, first.offer, HYBRID, str(short_path))
        receiver.close()


@pytest.mark.parametrize("name", ["", "..", "../baton-kv-1", "/tmp/baton-kv-1", "baton-kv-/../1"])
async def test_shm_attach_refuses_socket_name_outside_folder(name, short_path):
    async with HandleServer(two_pools(), str(short_path)) as server:
        shm = replace(server.offer, address=name)
        with pytest.raises(UnavailableError, match="no name of a socket"):
            await asyncio.to_thread(attach, shm, HYBRID, str(short_path))


async def test_handle_server_fails_when_folder_cannot_hold_socket(short_path):
    for folder in (short_path / "missing", short_path / ("long" * 30)):
        server = HandleServer(two_pools(), str(folder))
        with pytest.raises(OSError, match=r"No such file|too long"):
            async with server:
                raise AssertionError("it has a socket")
