import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
import xxhash
from loopback import (
    CLAIMANT,
    EPOCH,
    LAYOUT,
    LEASE,
    PAIRING,
    allocation,
    contents,
    transfer,
)

from baton.engine.kv_pool import KvShape, plan_layout
from baton.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.rpc_errors import error_of
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from baton.v1 import prefill_pb2
from kvtransfer.handle import FirstToken, Pairing
from kvtransfer.wire import fetch_request

TOKEN = FirstToken(0, 42, -1.5)
TIMEOUT = 10.0


async def until(condition: Callable[[], bool], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.005)


async def failure_of(awaitable: Any) -> Exception:
    """What it raises, as the type it left the other side as."""
    with pytest.raises(Exception) as caught:
        await awaitable
    error = caught.value
    return error_of(error) if isinstance(error, grpc.RpcError) else error


async def test_blocks_flow_as_they_are_filled_and_the_tokens_with_the_last():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            into = (7, 3, 5)
            fetching = asyncio.create_task(
                ends.fetcher.fetch(ends.handle(), allocation(into), TIMEOUT)
            )
            lease.advance((1, 2, 4), 1)
            await until(lambda: contents(ends.target, (7,)) == contents(ends.source, (1,)))
            assert contents(ends.target, (3,)) != contents(ends.source, (2,))
            lease.advance((1, 2, 4), 2)
            await until(lambda: contents(ends.target, (3,)) == contents(ends.source, (2,)))
            lease.complete(TOKEN)
            token, report = await fetching
            await lease.over()
        assert token == TOKEN
        assert (report.num_blocks, report.num_bytes) == (3, 3 * LAYOUT.block_bytes)
        assert contents(ends.target, into) == contents(ends.source, (1, 2, 4))


async def test_a_fetch_may_come_before_its_prefill():
    async with transfer() as ends:
        fetching = asyncio.create_task(ends.fetcher.fetch(ends.handle(), allocation((0,)), TIMEOUT))
        await until(lambda: bool(ends.leases._awaited))
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((6,), 0)
            lease.complete(TOKEN)
            await fetching
        assert contents(ends.target, (0,)) == contents(ends.source, (6,))


async def test_leading_blocks_that_the_claimant_holds_are_not_sent():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0, 1, 2), 3)
            lease.complete(TOKEN)
            _, report = await ends.fetcher.fetch(ends.handle(), allocation((4, 5, 6), 2), TIMEOUT)
        assert report.num_blocks == 1
        assert contents(ends.target, (6,)) == contents(ends.source, (2,))
        assert contents(ends.target, (4, 5)) == [bytes(LAYOUT.block_bytes)] * 2


async def test_a_claimant_that_holds_every_block_gets_the_token_alone():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0, 1), 1)
            fetching = asyncio.create_task(
                ends.fetcher.fetch(ends.handle(), allocation((4, 5), 2), TIMEOUT)
            )
            await until(lambda: lease.is_claimed)
            lease.complete(TOKEN)
            token, report = await fetching
            await lease.over()
        assert (token, report.num_blocks, report.num_bytes) == (TOKEN, 0, 0)


async def test_many_blocks_come_in_messages_of_bounded_size():
    num_blocks = 5 * 2**20 // LAYOUT.block_bytes
    async with transfer(num_blocks) as ends:
        everything = tuple(range(num_blocks))
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance(everything, num_blocks)
            lease.complete(TOKEN)
            stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
            request = fetch_request(ends.handle(), CLAIMANT, PAIRING, 0)
            sizes = []
            async for response in stub.Fetch(request, timeout=TIMEOUT):
                sizes.append(len(response.blocks.payload))
                if response.HasField("result"):
                    break
        assert max(sizes) <= 4 * 2**20
        assert sum(sizes) == num_blocks * LAYOUT.block_bytes


async def test_the_prefill_s_end_in_the_middle_ends_the_fetch_with_not_found():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0, 1), 1)
            fetching = asyncio.create_task(
                ends.fetcher.fetch(ends.handle(), allocation((2, 3)), TIMEOUT)
            )
            await until(lambda: contents(ends.target, (2,)) == contents(ends.source, (0,)))
        assert isinstance(await failure_of(fetching), NotFoundError)
        assert len(ends.leases) == 0


async def test_a_fetch_that_is_called_off_in_the_middle_breaks_the_lease():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0, 1), 1)
            fetching = asyncio.create_task(
                ends.fetcher.fetch(ends.handle(), allocation((2, 3)), TIMEOUT)
            )
            await until(lambda: lease.is_claimed)
            fetching.cancel()
            with pytest.raises(UnavailableError, match="stopped fetching"):
                async with asyncio.timeout(1.0):
                    await lease.over()


async def test_a_fetch_whose_deadline_passes_breaks_the_lease():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0, 1), 1)
            fetch = ends.fetcher.fetch(ends.handle(), allocation((2, 3)), 0.1)
            await failure_of(fetch)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(1.0):
                    await lease.over()


async def test_a_source_that_dies_ends_the_fetch_as_unavailable():
    async with transfer() as ends:
        handle = replace(ends.handle(), source_endpoint="127.0.0.1:1")
        failure = await failure_of(ends.fetcher.fetch(handle, allocation((2, 3)), TIMEOUT))
        assert isinstance(failure, UnavailableError)


async def test_a_handle_of_an_earlier_life_is_refused_before_anything_moves():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0,), 1)
            lease.complete(TOKEN)
            handle = ends.handle(source_epoch=EPOCH - 1)
            failure = await failure_of(ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT))
            assert not lease.is_claimed
        assert isinstance(failure, FailedPreconditionError)
        assert f"epoch is {EPOCH}" in str(failure)
        assert f"is {EPOCH - 1}" in str(failure)


async def test_a_worker_refuses_to_pair_with_another_model_and_names_both():
    async with transfer(pairing=Pairing(b"model-b!", LAYOUT)) as ends:
        with pytest.raises(FailedPreconditionError) as caught:
            ends.fetcher.check(ends.handle())
        assert b"model-a!".hex() in str(caught.value)
        assert b"model-b!".hex() in str(caught.value)
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0,), 1)
            failure = await failure_of(ends.fetcher.fetch(ends.handle(), allocation((2,)), TIMEOUT))
            assert not lease.is_claimed
        assert isinstance(failure, FailedPreconditionError)
        assert b"model-a!".hex() in str(failure)
        assert b"model-b!".hex() in str(failure)


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (plan_layout([KvShape(2, 8, 8)] * 2, torch.bfloat16, 4), "bfloat16"),
        (plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 8), "block size 8"),
        (plan_layout([KvShape(2, 8, 8)] * 3, torch.float32, 4), "3 layers"),
    ],
    ids=["dtype", "block size", "layers"],
)
async def test_a_worker_refuses_another_layout_and_names_both(layout, named):
    async with transfer(pairing=Pairing(PAIRING.fingerprint, layout)) as ends:
        with pytest.raises(FailedPreconditionError) as caught:
            ends.fetcher.check(ends.handle())
        assert named in str(caught.value)
        assert "float32, block size 4" in str(caught.value)
        failure = await failure_of(ends.fetcher.fetch(ends.handle(), allocation((2,)), TIMEOUT))
        assert isinstance(failure, FailedPreconditionError)
        assert named in str(failure)


def test_layouts_of_equal_size_that_place_their_heads_otherwise_are_told_apart():
    ours = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 4)
    theirs = plan_layout([KvShape(4, 4, 4)] * 2, torch.float32, 4)
    assert ours.block_bytes == theirs.block_bytes
    with pytest.raises(FailedPreconditionError) as caught:
        Pairing(b"m", ours).check(Pairing(b"m", theirs), "prefill-0")
    mine, other = str(caught.value).split(", that of prefill-0 is ")
    assert mine.removeprefix("this worker's KV layout is ") != other.split(":")[0]


async def test_a_confirmation_cannot_be_replayed():
    async with transfer() as ends:
        stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0,), 1)
            lease.complete(TOKEN)
            await ends.fetcher.fetch(ends.handle(), allocation((2,)), TIMEOUT)
            again = pb.ConfirmRequest(lease_id=LEASE, generation=lease.generation)
            assert isinstance(await failure_of(stub.Confirm(again)), NotFoundError)
        assert isinstance(await failure_of(stub.Confirm(again)), NotFoundError)


@pytest.mark.parametrize("size", [0, 15, 17])
async def test_a_malformed_lease_id_is_an_invalid_argument(size):
    async with transfer() as ends:
        stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
        request = fetch_request(ends.handle(lease_id=bytes(size)), CLAIMANT, PAIRING, 0)
        for call in (
            stub.Confirm(pb.ConfirmRequest(lease_id=bytes(size), generation=1)),
            stub.Fetch(request, timeout=TIMEOUT).read(),
        ):
            failure = await failure_of(call)
            assert isinstance(failure, InvalidArgumentError)
            assert (failure.field, failure.problem) == (
                "lease_id",
                f"has {size} bytes; must have 16",
            )


async def test_more_held_blocks_than_the_lease_has_are_refused():
    async with transfer() as ends:
        with ends.leases.open(LEASE, CLAIMANT) as lease:
            lease.advance((0,), 1)
            stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
            request = fetch_request(ends.handle(), CLAIMANT, PAIRING, 2)
            failure = await failure_of(stub.Fetch(request, timeout=TIMEOUT).read())
            assert isinstance(failure, NotFoundError)


class ScriptedSource(pb_grpc.KvTransferServicer):
    """Sends what the test gives, and notes whether it was confirmed."""

    def __init__(self, script: Iterable[pb.FetchResponse]) -> None:
        self._script = script
        self.confirmed = False

    async def Fetch(self, request, context) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        for response in self._script:
            yield response

    async def Confirm(self, request, context) -> pb.ConfirmResponse:  # noqa: N802
        self.confirmed = True
        return pb.ConfirmResponse()


PAYLOAD = bytes(range(256)) * (2 * LAYOUT.block_bytes // 256)


def manifest(num_blocks: int = 2) -> pb.FetchResponse:
    return pb.FetchResponse(manifest=pb.Manifest(generation=1, num_blocks=num_blocks))


def blocks(first: int, payload: bytes, checksum: int | None = None) -> pb.FetchResponse:
    checksum = xxhash.xxh3_64_intdigest(payload) if checksum is None else checksum
    run = pb.BlockRun(first_block=first, payload=payload, checksum=checksum)
    return pb.FetchResponse(blocks=run)


def result() -> pb.FetchResponse:
    token = prefill_pb2.FirstToken(token_id=42)
    return pb.FetchResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))


ONE = LAYOUT.block_bytes
DAMAGE = {
    "a flipped bit": [manifest(), blocks(0, PAYLOAD, xxhash.xxh3_64_intdigest(PAYLOAD) ^ 1)],
    "out of order": [manifest(), blocks(1, PAYLOAD[:ONE]), blocks(0, PAYLOAD[:ONE]), result()],
    "a block twice": [manifest(), blocks(0, PAYLOAD[:ONE]), blocks(0, PAYLOAD[:ONE]), result()],
    "too many blocks": [manifest(), blocks(0, PAYLOAD + PAYLOAD[:ONE]), result()],
    "half a block": [manifest(), blocks(0, PAYLOAD[: ONE // 2]), result()],
    "an empty run": [manifest(), blocks(0, b""), result()],
    "a short stream": [manifest(), blocks(0, PAYLOAD[:ONE]), result()],
    "no result": [manifest(), blocks(0, PAYLOAD)],
    "no manifest": [blocks(0, PAYLOAD), result()],
    "a result alone": [result()],
    "another number of blocks": [manifest(3), blocks(0, PAYLOAD), result()],
    "nothing": [],
}


@pytest.mark.parametrize("script", DAMAGE.values(), ids=DAMAGE)
async def test_a_damaged_transfer_is_data_loss_and_never_confirmed(script):
    source = ScriptedSource(script)
    async with transfer(servicer=source) as ends:
        fetch = ends.fetcher.fetch(ends.handle(), allocation((0, 1)), TIMEOUT)
        assert isinstance(await failure_of(fetch), DataLossError)
    assert not source.confirmed


async def test_a_result_without_a_manifest_is_data_loss_even_where_nothing_is_to_move():
    source = ScriptedSource([result()])
    async with transfer(servicer=source) as ends:
        fetch = ends.fetcher.fetch(ends.handle(), allocation(()), TIMEOUT)
        assert isinstance(await failure_of(fetch), DataLossError)
    assert not source.confirmed
