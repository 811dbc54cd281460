"""Leases that are not claimed at once."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from baton.engine.metering.step_times import TimeSpent
from baton.errors import CancelledError, UnavailableError
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.lease import Claim
from baton_kvtransfer.lease.table import LeaseTable
from baton_prefill_worker.lease_retention import LeaseRetention
from tests.support.worker.pair import TIMEOUT, Answer, Pair, pair_of, rest_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=True, prompt_logprobs=1)


async def until_idle(pair: Pair, num_waiting: int) -> None:
    """Waits until a prefill is computed and so many more wait for blocks."""
    while True:
        load = await pair.prefill_admin.GetLoad(admin_pb2.GetLoadRequest())
        if load.num_waiting == num_waiting and load.num_leases == num_waiting + 1:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_lease_reclaim_frees_workers_waiting_for_each_other(checkpoint, family):
    model = checkpoint(family)
    prompts = [prompt_of(100, seed=1), prompt_of(100, seed=2)]
    expected = alone(model, prompts, GREEDY)
    # Each pool has room for one of the two, and each begins with another.
    async with pair_of(model, num_blocks=10) as pair:
        prefills = [pair.prefill_request(p, GREEDY) for p in prompts]
        decodes = [
            pair.decode_request(prompt, GREEDY, r.lease_id)
            for prompt, r in zip(prompts, prefills, strict=True)
        ]
        decoding = []
        for request in decodes:
            call = pair.to_decode.Generate(request, timeout=TIMEOUT)
            assert (await call.read()).HasField("admitted")
            decoding.append(call)
        async with asyncio.timeout(5.0):
            second = pair.to_prefill.Prefill(prefills[1], timeout=TIMEOUT)
            while (await second.read()).WhichOneof("event") != "result":
                pass
            first = pair.to_prefill.Prefill(prefills[0], timeout=TIMEOUT)
            answers = [
                Answer(await rest_of(prefill), await rest_of(decode))
                for prefill, decode in zip((first, second), decoding, strict=True)
            ]
        assert [[o.token_ids for o in a.outputs] for a in answers] == expected
        assert [r.WhichOneof("event") for r in answers[1].prefill] == ["released"]


async def test_reclaimed_prompt_can_be_aborted(checkpoint):
    async with pair_of(checkpoint("llama"), num_blocks=10) as pair:
        first, second = (pair.prefill_request(prompt_of(100, seed=i), GREEDY) for i in (1, 2))
        awaited = pair.decode_request(prompt_of(100, seed=1), GREEDY, first.lease_id)
        decoding = pair.to_decode.Generate(awaited, timeout=TIMEOUT)
        await decoding.read()
        reclaimed = pair.to_prefill.Prefill(second, timeout=TIMEOUT)
        while (await reclaimed.read()).WhichOneof("event") != "result":
            pass
        await rest_of(pair.to_prefill.Prefill(first, timeout=TIMEOUT))
        await pair.prefill_admin.Abort(admin_pb2.AbortRequest(request_id=second.request_id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(reclaimed)
        assert isinstance(error_of(caught.value), CancelledError)
        await rest_of(decoding)


@pytest.mark.parametrize("num_turns", range(7))
async def test_claim_during_a_reclaim_gets_the_lease_or_waits(num_turns):
    """The claim comes so many turns of the event loop after the deadlock is found."""
    table, loop, claims = LeaseTable(60.0), asyncio.get_running_loop(), []
    others, own = (Claim(name * 16, "d0") for name in (b"o", b"m"))

    async def claim() -> None:
        async with table.claim(own, 5.0) as lease:
            lease.end(UnavailableError("claimed"))

    def after(turns: int) -> None:
        if turns:
            loop.call_soon(after, turns - 1)
        else:
            claims.append(loop.create_task(claim()))

    class Stuck:
        """An engine that stands still; the second look at it finds the deadlock."""

        num_looks = 0

        @property
        def reading(self) -> SimpleNamespace:
            self.num_looks += 1
            if self.num_looks == 2:
                after(num_turns)
            stats = SimpleNamespace(num_running=0, num_awaiting_kv=0, num_waiting=1)
            return SimpleNamespace(stats=stats, time_spent=TimeSpent(5))

        def close_stream(self, _request_id: str) -> None:
            pass

    engine = Stuck()
    stream = SimpleNamespace(failure=asyncio.Event().wait)
    request = SimpleNamespace(request_id="r", params=SamplingParams())
    with (
        table.open(others, BlockRange(4, 4)) as awaited,
        table.open(own, BlockRange(4, 4)) as lease,
    ):
        awaited.take()
        lease.advance(((1,),), 1)
        lease.complete(None, lambda: None)
        with pytest.raises(UnavailableError, match="claimed"):
            await LeaseRetention(table).until_released(engine, stream, request, lease, None)
    await asyncio.gather(*claims)


async def test_unclaimed_lease_keeps_blocks_when_no_claimant_waits(checkpoint):
    async with pair_of(checkpoint("llama"), num_blocks=10) as pair:
        call = pair.to_prefill.Prefill(
            pair.prefill_request(prompt_of(100), GREEDY), timeout=TIMEOUT
        )
        while (await call.read()).WhichOneof("event") != "result":
            pass
        waiting = pair.to_prefill.Prefill(
            pair.prefill_request(prompt_of(90), GREEDY), timeout=TIMEOUT
        )
        await waiting.read()
        await until_idle(pair, num_waiting=1)
        await asyncio.sleep(0.5)  # no worker has claimed either, so neither is worth more
        load = await pair.prefill_admin.GetLoad(admin_pb2.GetLoadRequest())
        assert (load.num_held_blocks, load.num_waiting) == (7, 1)
        call.cancel()
        waiting.cancel()


async def test_unclaimed_lease_ends_at_its_timeout(checkpoint):
    async with pair_of(checkpoint("llama"), prefill={"lease_timeout_s": 0.3}) as pair:
        call = pair.to_prefill.Prefill(pair.prefill_request(prompt_of(20), GREEDY), timeout=TIMEOUT)
        with pytest.raises(Exception) as caught:
            await rest_of(call)
        failure = error_of(caught.value)
        assert isinstance(failure, UnavailableError)
        assert "within 0.3 s" in str(failure)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_cancelled_call_frees_both_workers(checkpoint, role):
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    async with pair_of(checkpoint("gemma3")) as pair:
        request = pair.prefill_request(prompt_of(30), long)
        decoding = pair.to_decode.Generate(
            pair.decode_request(prompt_of(30), long, request.lease_id), timeout=TIMEOUT
        )
        prefilling = pair.to_prefill.Prefill(request, timeout=TIMEOUT)
        await prefilling.read()
        await decoding.read()
        (prefilling if role == "prefill" else decoding).cancel()
        await asyncio.sleep(0.05)
        prefilling.cancel()
        decoding.cancel()
