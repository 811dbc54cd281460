"""The beginning of a prompt, from the cache of whichever worker has it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.metering.step_times import TimeSpent
from baton.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from baton.sampling import SamplingParams
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import kv_sharing_pb2
from baton.v1.admin_pb2 import FlushCacheRequest
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.exchange.exchange import KvExchange
from baton_kvtransfer.exchange.sharing import _until_released
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.lease import Claim
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.service import KvTransferService, ServedPools, add_to_server
from baton_prefill_worker.service import PrefillService
from tests.support.failures import failure_of
from tests.support.waiting import until
from tests.support.worker.crew import Crew, Member, crew_of, new_lease_id
from tests.support.worker.pair import TIMEOUT, rest_of
from tests.support.worker.reference import alone, prompt_of

ANSWER = SamplingParams(max_tokens=40, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@asynccontextmanager
async def shared(
    holder: Member, tokens: list[int], claimant: str, **fields: Any
) -> AsyncIterator[tuple[bytes, int]]:
    """A lease over what is cached of a text: its id, and how many blocks."""
    call, lease_id = holder.share(tokens, claimant, **fields)
    try:
        yield lease_id, (await call.read()).shared.num_blocks
    finally:
        call.cancel()


async def flush(member: Member) -> None:
    await member.admin.FlushCache(FlushCacheRequest())


@pytest.mark.parametrize(
    ("family", "connector"),
    [
        ("llama", "grpc"),
        ("mistral_short", "auto"),
        ("qwen2_hybrid", "auto"),
        ("gemma3", "auto"),
        ("gpt_oss", "grpc"),
        ("deepseek_v3", "auto"),
        *(pytest.param(f, "nixl", marks=pytest.mark.slow) for f in ("llama", "gemma3")),
    ],
)
async def test_prefix_fetch_leaves_only_new_tokens_to_compute(checkpoint, family, connector):
    model, prompt = checkpoint(family), prompt_of(50)
    settings = {"max_num_batched_tokens": 24, "kv_connector": connector}
    async with crew_of(model, "prefill", "decode", **settings) as crew:
        prefill, decode = crew.members
        turn = [*prompt, *await decode.answer(prompt, ANSWER), *prompt_of(7, seed=1)]
        (expected,), *_ = alone(model, [turn], ONE)
        async with shared(decode, turn[:-1], prefill.id) as (lease_id, num_blocks):
            assert num_blocks == 89 // 16  # the KV of the last token of an answer is not computed
            result = await prefill.first_token(turn, decode.source(lease_id, num_blocks))
        assert [t.token_id for t in result.first_tokens] == expected
        assert result.num_cached_tokens == prefill.num_pulled_tokens == 80
        assert prefill.num_computed_tokens == len(turn) - 80
        # It is found here from now on.
        again = await prefill.first_token(turn)
        assert again.num_cached_tokens >= 80


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_prefix_fetch_moves_only_missing_blocks(checkpoint, family):
    model, whole = checkpoint(family), prompt_of(120)
    async with crew_of(model, "prefill", "prefill", max_num_batched_tokens=16) as crew:
        holder, puller = crew.members
        await holder.first_token(whole)
        await puller.first_token(whole[:40])
        async with shared(holder, whole[:-1], puller.id) as (lease_id, num_blocks):
            result = await puller.first_token(whole, holder.source(lease_id, num_blocks))
        assert result.num_cached_tokens == num_blocks * 16 == 112
        assert puller.num_pulled_tokens in (112, 112 - 32)
        assert [[t.token_id for t in result.first_tokens]] == alone(model, [whole], ONE)[0]


async def test_prefix_fetch_moves_nothing_already_cached(checkpoint):
    model, whole = checkpoint("llama"), prompt_of(100)
    async with crew_of(model, "prefill", "prefill") as crew:
        holder, puller = crew.members
        for member in crew.members:
            await member.first_token(whole)
        async with shared(holder, whole[:-1], puller.id) as (lease_id, num_blocks):
            result = await puller.first_token(whole, holder.source(lease_id, num_blocks))
        assert result.num_cached_tokens == 96
        assert puller.num_pulled_tokens == 0


async def test_prefix_lease_keeps_blocks_and_covers_only_cached_ones(checkpoint):
    model, whole = checkpoint("llama"), prompt_of(240)
    async with crew_of(model, "prefill", "prefill", num_blocks=30) as crew:
        holder, puller = crew.members
        await holder.first_token(whole)
        async with shared(holder, whole[:160], puller.id) as (lease_id, num_blocks):
            for seed in (1, 2):  # takes all other blocks
                await holder.first_token(prompt_of(240, seed=seed))
            async with shared(holder, whole, puller.id) as (_, num_left):
                assert num_left == num_blocks == 10
            await flush(holder)  # no request finds them any more, and they are what they were
            result = await puller.first_token(whole, holder.source(lease_id, num_blocks))
        assert result.num_cached_tokens == puller.num_pulled_tokens == 160
        assert [[t.token_id for t in result.first_tokens]] == alone(model, [whole], ONE)[0]


async def check_computes(crew: Crew, prompt: list[int], source: Any, **fields: Any) -> None:
    """The prompt is computed by the second worker, with the right result."""
    model = crew.members[0].worker.settings.model
    before = crew.members[1].num_computed_tokens
    result = await crew.members[1].first_token(prompt, source, **fields)
    assert [[t.token_id for t in result.first_tokens]] == alone(model, [prompt], ONE)[0]
    assert crew.members[1].num_computed_tokens - before == len(prompt)
    assert (result.num_cached_tokens, crew.members[1].num_pulled_tokens) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": b"short"},
        {"num_blocks": 0},
        {"num_blocks": 7},  # more than the prompt has behind its last token
        {"num_blocks": 5},  # fewer than the lease has
        {"num_blocks": 2**31},
        {"epoch": 1},
        {"endpoint": "127.0.0.1:1"},
    ],
    ids=str,
)
async def test_prefill_worker_computes_when_prefix_source_is_invalid(checkpoint, changes):
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        async with shared(holder, prompt[:-1], puller.id) as (lease_id, num_blocks):
            source = holder.source(**{"lease_id": lease_id, "num_blocks": num_blocks, **changes})
            await check_computes(crew, prompt, source)


async def test_prefix_lease_serves_one_worker_tenant_and_fetch(checkpoint):
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        puller.worker.component(PrefillService).prefix_timeout = 0.3
        await holder.answer(prompt, ONE)
        async with shared(holder, prompt[:-1], "another worker") as (lease_id, count):
            await check_computes(crew, prompt, holder.source(lease_id, count))
        await flush(puller)
        async with shared(holder, prompt[:-1], puller.id, tenant="acme") as (lease_id, count):
            await check_computes(crew, prompt, holder.source(lease_id, count), tenant="globex")
        await flush(puller)
        await check_computes(crew, prompt, holder.source(new_lease_id(), 6))  # made up
        await flush(puller)
        async with shared(holder, prompt[:-1], puller.id, tenant="acme") as (lease_id, count):
            source = holder.source(lease_id, count)
            await puller.first_token(prompt, source, tenant="acme")
            assert puller.num_pulled_tokens == 96
            await flush(puller)
            again = await puller.first_token(prompt, source, tenant="acme")
            assert (again.num_cached_tokens, puller.num_pulled_tokens) == (0, 96)


async def test_prefix_lease_ends_with_its_call_or_timeout(checkpoint):
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill", lease_timeout_s=0.2) as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        call, lease_id = holder.share(prompt[:-1], puller.id)
        assert (await call.read()).shared.num_blocks == 6
        failure = await failure_of(call)
        assert isinstance(failure, NotFoundError)
        assert "after its 0.2 s" in str(failure)
        await check_computes(crew, prompt, holder.source(lease_id, 6))
        await flush(puller)
        async with shared(holder, prompt[:-1], puller.id) as (lease_id, _):
            pass
        await check_computes(crew, prompt, holder.source(lease_id, 6))


@asynccontextmanager
async def served_apart(holder: Member) -> AsyncIterator[tuple[Server, LeaseTable]]:
    """A worker's pools behind a server that hands blocks over under the test's own leases."""
    worker, leases, server = holder.worker, LeaseTable(), Server(ServingSettings())
    offers = Offers([GrpcConnector()])
    await offers.open()
    pairing = worker.component(KvExchange).pairing
    served = ServedPools(holder.model.engine.pools, pairing, holder.membership.epoch, offers)
    server.add(add_to_server, KvTransferService(leases, lambda: served))
    await server.start()
    try:
        yield server, leases
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize("ending", ["the lease breaks", "the source is gone"])
async def test_prefill_worker_computes_when_prefix_source_is_lost(checkpoint, ending):
    """Half of the blocks have come by then; no request finds them."""
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill", kv_connector="grpc") as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        claim = Claim(new_lease_id(), puller.id)
        hashes = [holder.hashes(prompt)[i : i + 16] for i in range(0, 96, 16)]
        async with (
            served_apart(holder) as (server, leases),
            holder.model.engine.pinned("test", hashes) as tables,
        ):
            with leases.open(claim, BlockRange(96, 16)) as lease:
                lease.advance(tables, 3)
                source = holder.source(claim.lease_id, 6, endpoint=server.endpoint)
                computing = asyncio.create_task(check_computes(crew, prompt, source))
                await lease.claimed()
                await asyncio.sleep(0.05)
                assert not computing.done()
                assert puller.model.engine.reading.stats.num_awaiting_kv == 1
                if ending == "the lease breaks":
                    lease.end(NotFoundError("gone"))
                else:
                    await server.stop(0.0)
                await computing


async def test_prefix_fetch_holds_nothing_when_cancelled(checkpoint):
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        # It is early, and its lease never comes.
        pulling = asyncio.create_task(puller.first_token(prompt, holder.source(new_lease_id(), 6)))
        await until(lambda: puller.model.engine.reading.stats.num_awaiting_kv)
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)


async def test_prompt_logprobs_are_computed_despite_prefix_lease(checkpoint):
    prompt = prompt_of(100)
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        async with shared(holder, prompt[:-1], puller.id) as (lease_id, count):
            request = puller.prefill_request(prompt, holder.source(lease_id, count))
            request.sampling.prompt_logprobs = 0
            events = await rest_of(puller.prefill.Prefill(request, timeout=TIMEOUT))
        scored = [e.prompt_logprobs for e in events if e.HasField("prompt_logprobs")]
        assert sum(len(m.logprobs) for m in scored) == 99
        assert puller.num_computed_tokens == 100


async def test_prefix_lease_is_refused_for_uncached_prompt(checkpoint):
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        call, _ = holder.share(prompt_of(100), puller.id)
        assert isinstance(await failure_of(call), NotFoundError)
        await holder.answer(prompt_of(15), ONE)  # no whole block
        call, _ = holder.share(prompt_of(15), puller.id)
        assert isinstance(await failure_of(call), NotFoundError)


async def test_prefix_lease_is_refused_for_invalid_request(checkpoint):
    prompt = prompt_of(40)
    async with crew_of(checkpoint("llama"), "decode", "prefill") as crew:
        holder, puller = crew.members
        await holder.answer(prompt, ONE)
        good = kv_sharing_pb2.ShareRequest(
            lease_id=new_lease_id(), block_hashes=holder.hashes(prompt), claimant=puller.id
        )
        for field, value in (
            ("lease_id", b"short"),
            ("block_hashes", b"no whole hash"),
            ("claimant", ""),
        ):
            request = kv_sharing_pb2.ShareRequest()
            request.CopyFrom(good)
            setattr(request, field, value)
            failure = await failure_of(holder.sharing.Share(request, timeout=TIMEOUT))
            assert isinstance(failure, InvalidArgumentError)
            assert failure.field == field
        holding = holder.sharing.Share(good, timeout=TIMEOUT)
        await holding.read()
        failure = await failure_of(holder.sharing.Share(good, timeout=TIMEOUT))
        assert isinstance(failure, AlreadyExistsError)
        holding.cancel()
        await holder.membership.drain()
        late, _ = holder.share(prompt, puller.id)
        assert isinstance(await failure_of(late), UnavailableError)


async def test_unclaimed_prefix_lease_is_reclaimed_for_waiting_prompt(checkpoint):
    """Its claimant may itself be waiting for blocks that a request here has."""
    prompt = prompt_of(150)
    async with crew_of(checkpoint("llama"), "prefill", "decode", num_blocks=12) as crew:
        holder, other = crew.members
        await holder.first_token(prompt)
        call, _ = holder.share(prompt, other.id)
        assert (await call.read()).shared.num_blocks == 9
        waiting = asyncio.create_task(holder.first_token(prompt_of(170, seed=1)))
        failure = await failure_of(call)
        assert isinstance(failure, NotFoundError)
        assert "needed here" in str(failure)
        await waiting


@pytest.mark.parametrize("num_looks", [1, 2])
async def test_claim_during_a_prefix_reclaim_gets_its_blocks(num_looks):
    """The claim comes while the last wait before a look for a deadlock times out."""
    table, own, waits = LeaseTable(60.0), Claim(b"m" * 16, "d0"), []
    stats = SimpleNamespace(num_running=0, num_awaiting_kv=0, num_waiting=1)
    reading = SimpleNamespace(stats=stats, time_spent=TimeSpent(5))
    engine = SimpleNamespace(reading=reading)

    class LateClaim:
        """The lease, which is claimed as the wait for it ends."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lease, name)

        async def claimed(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                waits.append(1)
                if len(waits) == num_looks:
                    lease.take()
                    lease.end(UnavailableError("the claimant is here"))

    with table.open(own, BlockRange(4, 4)) as lease:
        lease.advance(((1,),), 1)
        lease.complete(None, lambda: None)
        with pytest.raises(UnavailableError, match="the claimant is here"):
            await _until_released(LateClaim(), engine)


async def test_prefix_lease_is_kept_while_a_sequence_awaits_its_kv():
    table, own = LeaseTable(60.0), Claim(b"m" * 16, "d0")
    stats = SimpleNamespace(num_running=0, num_awaiting_kv=1, num_waiting=1)
    reading = SimpleNamespace(stats=stats, time_spent=TimeSpent(5))
    engine = SimpleNamespace(reading=reading)
    with table.open(own, BlockRange(4, 4)) as lease:
        lease.advance(((1,),), 1)
        lease.complete(None, lambda: None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_until_released(lease, engine), 0.5)
