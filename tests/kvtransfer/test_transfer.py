import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
import xxhash

from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, LayerLayout, plan_layout
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import (
    DataLossError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from baton.v1 import prefill_pb2
from baton.worker.pairing import Pairing
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import (
    BLOCK_SIZE,
    CLAIMANT,
    EPOCH,
    HYBRID,
    LAYOUT,
    LEASE,
    MODEL,
    PLAIN,
    TOKEN,
    VERSION,
    WINDOW,
    WINDOWED,
    Tables,
    allocation,
    contents,
    layout_of,
    nothing,
    payload_request,
    transfer,
    untouched,
)
from tests.support.waiting import until

PAIRING = Pairing(VERSION, MODEL, PLAIN)
TIMEOUT = 10.0


async def test_lease_breaks_when_fetch_deadline_passes():
    async with transfer() as ends:
        with ends.lease(2) as lease:
            lease.advance(((1, 2),), 1)
            fetch = ends.fetcher.fetch(ends.handle(2), allocation((2, 3)), 0.1)
            await failure_of(fetch)
            with pytest.raises(UnavailableError):
                async with asyncio.timeout(1.0):
                    await lease.over()


async def test_lease_that_ends_during_a_transfer_gives_its_own_reason():
    class EndingConnector(GrpcConnector):
        async def send(self, *arguments, **options):
            async with aclosing(super().send(*arguments, **options)) as batches:
                async for batch in batches:
                    if batch.first_block == 3:
                        lease.end(NotFoundError("its time is over"))
                    yield batch

    def connectors(pools):
        return [EndingConnector(pools, message_bytes=LAYOUT.block_bytes)]

    async with transfer(8, connectors=connectors) as ends:
        with ends.lease(8) as lease:
            lease.advance((tuple(range(1, 9)),), 8)
            lease.complete(None, nothing)
            fetch = ends.fetcher.fetch(ends.handle(8), allocation(tuple(range(1, 9))), TIMEOUT)
            assert "its time is over" in str(await failure_of(fetch))
        assert not ends.fetcher.meter.num_failures.get("damaged")


async def test_fetch_is_unavailable_when_source_is_unreachable():
    async with transfer() as ends:
        handle = replace(ends.handle(2), source_endpoint="127.0.0.1:1")
        failure = await failure_of(ends.fetcher.fetch(handle, allocation((2, 3)), TIMEOUT))
        assert isinstance(failure, UnavailableError)


async def test_fetch_refuses_handle_of_earlier_epoch():
    async with transfer() as ends:
        with ends.computed_lease((1,)) as lease:
            handle = ends.handle(1, source_epoch=EPOCH - 1)
            failure = await failure_of(ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT))
            assert not lease.is_claimed
        assert isinstance(failure, FailedPreconditionError)
        assert f"epoch is {EPOCH}" in str(failure)
        assert f"is {EPOCH - 1}" in str(failure)


async def refusal_before_anything_moves(ends) -> FailedPreconditionError:
    """Returns the source's refusal, where the claimant has not checked."""
    with ends.lease(1) as lease:
        lease.advance(((1,),), 1)
        failure = await failure_of(ends.fetcher.fetch(ends.handle(1), allocation((2,)), TIMEOUT))
        assert not lease.is_claimed
    assert isinstance(failure, FailedPreconditionError)
    return failure


async def test_pairing_refuses_other_model_naming_both():
    async with transfer(pairing=Pairing(VERSION, b"model-b!", PLAIN)) as ends:
        with pytest.raises(FailedPreconditionError) as caught:
            ends.fetcher.check(ends.handle(1))
        assert b"model-a!".hex() in str(caught.value)
        assert b"model-b!".hex() in str(caught.value)
        failure = await refusal_before_anything_moves(ends)
        assert b"model-a!".hex() in str(failure)
        assert b"model-b!".hex() in str(failure)


async def test_pairing_refuses_other_dtype_naming_both():
    """The fingerprints differ, too, as they do for weights of unlike dtypes."""
    narrow = (plan_layout(SHAPES, torch.bfloat16, 4),)
    async with transfer(pairing=Pairing(VERSION, b"model-b!", narrow)) as ends:
        named = "their KV is of bfloat16 and float32; start both with the same --dtype"
        with pytest.raises(FailedPreconditionError, match=named):
            ends.fetcher.check(ends.handle(1))
        failure = await refusal_before_anything_moves(ends)
        assert "their KV is of float32 and bfloat16" in str(failure)


async def test_pairing_refuses_other_version_naming_both():
    """Whatever else is alike, and before anything moves: here, and at the source."""
    newer = Pairing("1.3.0", MODEL, PLAIN)
    async with transfer(pairing=newer) as ends:
        with pytest.raises(FailedPreconditionError, match=r"is 1\.3\.0, .* prefill-0 is 1\.2\.3"):
            ends.fetcher.check(ends.handle(1))
        failure = await refusal_before_anything_moves(ends)
        assert "is 1.2.3, that of decode-0 is 1.3.0" in str(failure)
        assert "finish the upgrade" in str(failure)


async def test_source_refuses_claimant_without_version():
    async with transfer() as ends:
        request = payload_request(ends.handle(1), CLAIMANT, replace(PAIRING, version=""))
        stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
        with ends.lease(1) as lease:
            failure = await failure_of(stub.Fetch(request, timeout=TIMEOUT).read())
            assert not lease.is_claimed
        assert isinstance(failure, FailedPreconditionError)
        assert "that of decode-0 is not said" in str(failure)


async def test_pairing_accepts_handle_without_version():
    async with transfer() as ends:
        unsaid = ends.handle(1, pairing=replace(PAIRING, version=""))
        ends.fetcher.check(unsaid)
        other = replace(unsaid, pairing=replace(unsaid.pairing, fingerprint=b"model-b!"))
        with pytest.raises(FailedPreconditionError, match="fingerprint"):
            ends.fetcher.check(other)
        with ends.computed_lease((1,)):
            await ends.fetcher.fetch(unsaid, allocation((2,)), TIMEOUT)


SHAPES = [KvShape(2, 8, 8)] * 2


@pytest.mark.parametrize(
    ("layouts", "named"),
    [
        ([plan_layout(SHAPES, torch.bfloat16, 4)], "bfloat16"),
        ([plan_layout(SHAPES, torch.float8_e4m3fn, 4)], "float8_e4m3fn"),
        ([plan_layout(SHAPES, torch.float32, 8)], "block size 8"),
        ([plan_layout([*SHAPES, SHAPES[0]], torch.float32, 4)], "3 layers"),
        ([plan_layout(SHAPES, torch.float32, 4, window=99)], "window 99"),
        (HYBRID, f"window {WINDOW}"),
    ],
    ids=["dtype", "fp8", "block size", "layers", "window", "groups"],
)
async def test_pairing_refuses_other_layouts_naming_both(layouts, named):
    async with transfer(pairing=Pairing(VERSION, MODEL, tuple(layouts))) as ends:
        with pytest.raises(FailedPreconditionError) as caught:
            ends.fetcher.check(ends.handle())
        assert named in str(caught.value)
        assert "float32, block size 4" in str(caught.value)
        request = payload_request(ends.handle(), CLAIMANT, Pairing(VERSION, MODEL, tuple(layouts)))
        stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
        failure = await failure_of(stub.Fetch(request, timeout=TIMEOUT).read())
        assert isinstance(failure, FailedPreconditionError)
        assert named in str(failure)


def test_pairing_refuses_handle_without_layouts():
    with pytest.raises(FailedPreconditionError, match="no cache group"):
        PAIRING.check(Pairing(VERSION, MODEL, ()), "prefill-0")


def test_pairing_refusal_is_short_for_huge_claims():
    layout = layout_of(1)
    many = tuple(replace(layout, window=i) for i in range(1, 1000))
    shapes = tuple(LayerLayout(0, 16, 32, heads, 1, 1) for heads in range(1000))
    for other in (many, (replace(layout, layers=shapes),)):
        with pytest.raises(FailedPreconditionError, match=r"99\d more") as caught:
            PAIRING.check(Pairing(VERSION, MODEL, other), "prefill-0")
        assert len(str(caught.value)) < 1000
    with pytest.raises(FailedPreconditionError) as caught:
        PAIRING.check(Pairing("9" * 10**5, MODEL, PLAIN), "prefill-0")
    assert len(str(caught.value)) < 1000


def test_pairing_tells_equal_sized_layouts_apart_by_heads():
    ours = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 4)
    theirs = plan_layout([KvShape(4, 4, 4)] * 2, torch.float32, 4)
    assert ours.block_bytes == theirs.block_bytes
    with pytest.raises(FailedPreconditionError) as caught:
        Pairing(VERSION, b"m", (ours,)).check(Pairing(VERSION, b"m", (theirs,)), "prefill-0")
    mine, other = str(caught.value).split(", that of prefill-0 is ")
    assert mine.removeprefix("this worker's KV layout is ") != other.split(":")[0]


async def test_handle_is_good_for_one_fetch_and_confirmation():
    async with transfer() as ends:
        stub, handle = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint)), ends.handle(1)

        async def check_replays(generation: int) -> None:
            again = pb.ConfirmRequest(lease_id=LEASE, generation=generation, claimant=CLAIMANT)
            fetching = ends.fetcher.fetch(handle, allocation((3,)), TIMEOUT)
            for call in (stub.Confirm(again), fetching):
                assert isinstance(await failure_of(call), NotFoundError)

        with ends.computed_lease((1,)) as lease:
            await ends.fetcher.fetch(handle, allocation((2,)), TIMEOUT)
            await check_replays(lease.generation)
        await check_replays(lease.generation)


@pytest.mark.parametrize(
    ("lease_id", "claimant", "problem"),
    [
        *((bytes(n), CLAIMANT, f"lease_id: has {n} bytes; must have 16") for n in (0, 15, 17)),
        (LEASE, "", "claimant: "),
    ],
)
async def test_kv_transfer_refuses_malformed_lease_id(lease_id, claimant, problem):
    async with transfer() as ends:
        stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
        request = payload_request(ends.handle(lease_id=lease_id), claimant, PAIRING)
        confirmed = pb.ConfirmRequest(lease_id=lease_id, generation=1, claimant=claimant)
        for call in (stub.Confirm(confirmed), stub.Fetch(request, timeout=TIMEOUT).read()):
            failure = await failure_of(call)
            assert isinstance(failure, InvalidArgumentError)
            assert str(failure).startswith(problem)


async def test_fetch_refuses_more_held_blocks_than_lease_has():
    async with transfer() as ends:
        with ends.lease(1) as lease:
            lease.advance(((1,),), 1)
            stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
            request = payload_request(ends.handle(1), CLAIMANT, PAIRING, 2)
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


def payload_of(layout: KvLayout, num_blocks: int) -> bytes:
    return bytes(range(1, 129)) * (num_blocks * layout.block_bytes // 128)


def checksums_in(payload: bytes, layout: KvLayout) -> list[int]:
    size = layout.block_bytes
    return [xxhash.xxh3_64_intdigest(payload[i : i + size]) for i in range(0, len(payload), size)]


def flipped(payload: bytes, layout: KvLayout = LAYOUT) -> list[int]:
    """The checksums of a payload of which the last block has changed on the way."""
    *before, last = checksums_in(payload, layout)
    return [*before, last ^ 1]


def manifest(num_blocks: int = 2) -> pb.FetchResponse:
    return pb.FetchResponse(manifest=pb.Manifest(generation=1, num_blocks=num_blocks))


def blocks(
    first: int, payload: bytes, checksums: list[int] | None = None, *, group: int = 0
) -> pb.FetchResponse:
    if checksums is None:
        checksums = checksums_in(payload, HYBRID[group % 2])
    run = pb.BlockRun(group=group, first_block=first, payload=payload, checksums=checksums)
    return pb.FetchResponse(blocks=run)


def result() -> pb.FetchResponse:
    token = prefill_pb2.FirstToken(token_id=42)
    return pb.FetchResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))


ONE, TWO, THREE = (payload_of(LAYOUT, n) for n in (1, 2, 3))
DAMAGE = {
    "a flipped bit": [manifest(), blocks(0, TWO, flipped(TWO)), result()],
    "a checksum too few": [manifest(), blocks(0, TWO, checksums_in(ONE, LAYOUT)), result()],
    "no checksums": [manifest(), blocks(0, TWO, []), result()],
    "places where a payload should be": [
        manifest(),
        pb.FetchResponse(blocks=pb.BlockRun(source_blocks=[1, 2])),
        result(),
    ],
    "out of order": [manifest(), blocks(1, ONE), blocks(0, ONE), result()],
    "a block twice": [manifest(), blocks(0, ONE), blocks(0, ONE), result()],
    "all of it twice": [manifest(), blocks(0, TWO), blocks(0, TWO), result()],
    "too many blocks": [manifest(), blocks(0, THREE), result()],
    "one more block": [manifest(), blocks(0, TWO), blocks(2, ONE), result()],
    "half a block": [manifest(), blocks(0, ONE[: len(ONE) // 2]), result()],
    "a block and a half": [manifest(), blocks(0, TWO[: len(ONE) * 3 // 2]), result()],
    "an empty run": [manifest(), blocks(0, b""), result()],
    "a short stream": [manifest(), blocks(0, ONE), result()],
    "no result": [manifest(), blocks(0, TWO)],
    "no manifest": [blocks(0, TWO), result()],
    "two manifests": [manifest(), manifest(), blocks(0, TWO), result()],
    "a result alone": [result()],
    "another number of blocks": [manifest(3), blocks(0, TWO), result()],
    "an unknown group": [manifest(), blocks(0, TWO), blocks(0, TWO, group=1), result()],
    "nothing": [],
}


@pytest.mark.parametrize("script", DAMAGE.values(), ids=DAMAGE)
async def test_fetch_of_damaged_transfer_is_data_loss_and_unconfirmed(script):
    source = ScriptedSource(script)
    async with transfer(servicer=source) as ends:
        channel = ends.channels.get(ends.endpoint)
        fetch = ends.fetcher.fetch(ends.handle(2), allocation((1, 2)), TIMEOUT)
        assert isinstance(await failure_of(fetch), DataLossError)
        assert ends.channels.get(ends.endpoint) is not channel
        assert untouched(ends.target, (NULL_BLOCK, *range(3, 9)))
    assert not source.confirmed


async def test_fetch_without_manifest_is_data_loss_and_unconfirmed():
    source = ScriptedSource([result()])
    async with transfer(servicer=source) as ends:
        fetch = ends.fetcher.fetch(ends.handle(1), allocation((1,), num_hits=1), TIMEOUT)
        assert isinstance(await failure_of(fetch), DataLossError)
    assert not source.confirmed


# Several cache groups. The last token of 15 sees the tokens from 9 on, so blocks 2 and 3.

NUM_TOKENS = 15
FULL, SEEN = payload_of(LAYOUT, 4), payload_of(WINDOWED, 2)
ONE_SEEN = payload_of(WINDOWED, 1)
FULL_RUN = blocks(0, FULL)
HYBRID_GOOD = [manifest(4), FULL_RUN, blocks(2, SEEN, group=1), result()]
HYBRID_DAMAGE = {
    "a group is missing": [manifest(4), FULL_RUN, result()],
    "the group without a window is missing": [manifest(4), blocks(2, SEEN, group=1), result()],
    "a group comes to an end too soon": [
        manifest(4), FULL_RUN, blocks(2, ONE_SEEN, group=1), result(),
    ],
    "a block that the window has passed": [
        manifest(4), FULL_RUN, blocks(1, ONE_SEEN, group=1), blocks(2, SEEN, group=1), result(),
    ],
    "blocks of the window out of order": [
        manifest(4), FULL_RUN, blocks(3, ONE_SEEN, group=1), blocks(2, ONE_SEEN, group=1), result(),
    ],
    "beyond the table": [
        manifest(4), FULL_RUN, blocks(2, payload_of(WINDOWED, 3), group=1), result(),
    ],
    "a block of the other group's size": [
        manifest(4), FULL_RUN, blocks(2, payload_of(LAYOUT, 1), group=1), result(),
    ],
    "groups exchanged": [
        manifest(4), blocks(0, FULL, group=1), blocks(2, SEEN, group=0), result(),
    ],
    "a flipped bit": [
        manifest(4), FULL_RUN, blocks(2, SEEN, flipped(SEEN, WINDOWED), group=1),
        result(),
    ],
    "a third group": [
        manifest(4), FULL_RUN, blocks(2, SEEN, group=1), blocks(0, ONE, group=2), result(),
    ],
    "an enormous group": [manifest(4), FULL_RUN, blocks(2, SEEN, group=2**32 - 1), result()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "places"),
    [
        *(pytest.param(script, (1, 2), id=name) for name, script in HYBRID_DAMAGE.items()),
        pytest.param(HYBRID_GOOD, (NULL_BLOCK, 2), id="a block that has no place here"),
    ],
)
async def test_fetch_of_damaged_group_is_data_loss_and_unconfirmed(script, places):
    source = ScriptedSource(script)
    async with transfer(servicer=source, layouts=HYBRID) as ends:
        into = allocation((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, *places))
        handle = ends.handle(num_tokens=NUM_TOKENS)
        assert isinstance(
            await failure_of(ends.fetcher.fetch(handle, into, TIMEOUT)), DataLossError
        )
        for pool in ends.targets:
            assert untouched(pool, (NULL_BLOCK, *range(5, 9)))
        assert NULL_BLOCK not in places or untouched(ends.targets[1], tuple(range(9)))
    assert not source.confirmed


async def test_fetch_takes_groups_in_any_mixture_if_each_is_in_order():
    script = [
        manifest(4),
        blocks(2, ONE_SEEN, group=1),
        blocks(0, payload_of(LAYOUT, 3)),
        blocks(3, ONE_SEEN, group=1),
        blocks(3, payload_of(LAYOUT, 1)),
        result(),
    ]
    source = ScriptedSource(script)
    async with transfer(servicer=source, layouts=HYBRID) as ends:
        into = allocation((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, 1, 2))
        handle = ends.handle(num_tokens=NUM_TOKENS)
        _, report = await ends.fetcher.fetch(handle, into, TIMEOUT)
    assert report.num_blocks == 6
    assert source.confirmed


def prefilling(num_tokens: int, chunk: int) -> Iterator[tuple[Tables, int]]:
    """The tables of a hybrid sequence after each chunk, and its filled blocks: they grow, and what
    the next chunk does not see behind the window is given back when that begins."""
    tables: list[list[int]] = [[], []]
    for start in range(0, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        passed = max(0, start - WINDOW + 1) // BLOCK_SIZE
        tables[1][:passed] = [NULL_BLOCK] * passed
        for block in range(len(tables[0]), -(-end // BLOCK_SIZE)):
            tables[0].append(1 + block)
            tables[1].append(20 - block)
        yield tuple(map(tuple, tables)), end // BLOCK_SIZE


@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 12, 15, 17, 20])
@pytest.mark.parametrize("chunk", [1, 4, 7, 32])
async def test_fetch_brings_blocks_last_token_sees_in_each_group(num_tokens, chunk):
    async with transfer(20, layouts=HYBRID) as ends:
        first = max(0, num_tokens - WINDOW) // BLOCK_SIZE
        count = -(-num_tokens // BLOCK_SIZE)
        full = tuple(range(20, 20 - count, -1))
        windowed = (NULL_BLOCK,) * first + tuple(range(1, 1 + count - first))
        handle = ends.handle(num_tokens=num_tokens)
        with ends.lease_of(num_tokens) as lease:
            fetching = asyncio.create_task(
                ends.fetcher.fetch(handle, allocation(full, windowed), TIMEOUT)
            )
            await until(lambda: lease.is_claimed, within=5.0)
            for tables, num_filled in prefilling(num_tokens, chunk):
                lease.advance(tables, num_filled)
                await asyncio.sleep(0.002)
            lease.complete(TOKEN, nothing)
            token, report = await fetching
        assert token == TOKEN
        assert report.num_blocks == 2 * count - first
        assert contents(ends.targets[0], full) == contents(ends.sources[0], tables[0])
        needed, sources = windowed[first:], tables[1][first:]
        assert contents(ends.targets[1], needed) == contents(ends.sources[1], sources)
        assert untouched(ends.targets[1], (NULL_BLOCK, *range(1 + count - first, 21)))


@pytest.mark.parametrize("num_hits", [1, 2, 3, 4])
async def test_fetch_skips_blocks_held_by_claimant_in_each_group(num_hits):
    async with transfer(layouts=HYBRID) as ends:
        with ends.computed_lease((1, 2, 3, 4), (NULL_BLOCK, 6, 7, 8)):
            into = allocation((5, 6, 7, 8), (NULL_BLOCK, NULL_BLOCK, 1, 2), num_hits=num_hits)
            handle = ends.handle(num_tokens=NUM_TOKENS + 1)
            _, report = await ends.fetcher.fetch(handle, into, TIMEOUT)
        assert report.num_blocks == 4 - num_hits + 4 - max(2, num_hits)
        held, sent = (5, 6, 7, 8)[:num_hits], (5, 6, 7, 8)[num_hits:]
        assert untouched(ends.targets[0], held)
        assert contents(ends.targets[0], sent) == contents(ends.sources[0], (1, 2, 3, 4)[num_hits:])
        wanted = range(max(2, num_hits), 4)
        assert untouched(ends.targets[1], tuple(b - 1 for b in range(2, 4) if b not in wanted))
        assert contents(ends.targets[1], tuple(b - 1 for b in wanted)) == contents(
            ends.sources[1], tuple(b + 5 for b in wanted)
        )


async def test_fetch_streams_chunk_of_all_groups_as_it_fills():
    async with transfer(layouts=HYBRID) as ends:
        with ends.lease_of(NUM_TOKENS) as lease:
            into = allocation((5, 6, 7, 8), (NULL_BLOCK, NULL_BLOCK, 5, 6))
            handle = ends.handle(num_tokens=NUM_TOKENS)
            fetching = asyncio.create_task(ends.fetcher.fetch(handle, into, TIMEOUT))
            lease.advance(((1, 2, 3), (1, 2, 3)), 3)
            await until(
                lambda: contents(ends.targets[1], (5,)) == contents(ends.sources[1], (3,)),
                within=5.0,
            )
            assert contents(ends.targets[0], (5, 6, 7)) == contents(ends.sources[0], (1, 2, 3))
            assert untouched(ends.targets[0], (8,))
            assert untouched(ends.targets[1], (6,))
            lease.advance(((1, 2, 3, 4), (NULL_BLOCK, 2, 3, 4)), 3)
            lease.complete(TOKEN, nothing)
            await fetching
        assert contents(ends.targets[1], (5, 6)) == contents(ends.sources[1], (3, 4))


async def test_fetch_messages_are_bounded_in_every_group():
    wide = layout_of(2, 64)
    num_blocks = 5 * 2**20 // wide.block_bytes
    window = layout_of(3, 64, window=10**6)
    async with transfer(num_blocks, layouts=(wide, window)) as ends:
        everything = tuple(range(1, num_blocks + 1))
        with ends.computed_lease(everything, everything):
            stub = pb_grpc.KvTransferStub(ends.channels.get(ends.endpoint))
            handle = ends.handle(num_blocks)
            request = payload_request(handle, CLAIMANT, handle.pairing)
            sizes: dict[int, list[int]] = {0: [], 1: []}
            async for response in stub.Fetch(request, timeout=TIMEOUT):
                if response.HasField("result"):
                    break
                if response.HasField("blocks"):
                    sizes[response.blocks.group].append(len(response.blocks.payload))
        assert max(map(max, sizes.values())) <= 4 * 2**20
        assert sum(sizes[0]) == num_blocks * wide.block_bytes
        assert sum(sizes[1]) == num_blocks * window.block_bytes


async def test_fetch_is_internal_error_when_source_lost_needed_block():
    async with transfer(layouts=HYBRID) as ends:
        with ends.lease_of(NUM_TOKENS) as lease:
            lease.advance(((1, 2, 3, 4), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 4)), 3)
            lease.complete(TOKEN, nothing)
            into = allocation((5, 6, 7, 8), (NULL_BLOCK, NULL_BLOCK, 5, 6))
            handle = ends.handle(num_tokens=NUM_TOKENS)
            failure = await failure_of(ends.fetcher.fetch(handle, into, TIMEOUT))
        assert isinstance(failure, InternalError)
        assert untouched(ends.targets[1], (5, 6))
