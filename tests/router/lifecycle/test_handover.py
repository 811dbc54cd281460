"""Live migration from a draining decode worker, and remote prefixes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.errors import CancelledError, NotFoundError, OverloadedError
from baton.v1 import inference_pb2 as pb
from baton.v1 import kv_sharing_pb2, prefill_pb2
from baton_router.lifecycle.attempts.attempt import SOURCE_TIMEOUT
from tests.support.router.scripted import (
    ADMITTED,
    DRAINING,
    HANDED_OVER,
    PREFILL_ADMITTED,
    READY,
    RELEASED,
    Cue,
    Forever,
    Go,
    Scripts,
    Vanish,
    Worker,
    at,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    prefill,
    prefill_behind,
    run,
    run_on,
    seen_of,
    suspended,
    tokens,
)
from tests.support.waiting import until

# The prompt of `lifecycle_of` has three tokens.
BEFORE = [READY, tokens(0, 0, 1)]


def giver(*rest: Any) -> Worker:
    """A worker that drains behind its second token and stops behind the third, once it is told."""
    worker = decode(*BEFORE, DRAINING)
    worker.script += [worker.was_ordered, tokens(2, 2), suspended(5), *rest]
    return worker


async def test_live_migration_resumes_after_last_token_without_prefill():
    done = Cue()
    giving = giver(done, HANDED_OVER)
    taking = decode(READY, Go(done), tokens(2, 2, 3), tokens(4, 4), finished(), name="d1")
    async with fleet_of(prefill(first(), RELEASED), giving, taking) as fleet:
        seen = await run(fleet, temperature=0.5, seed=9)
        assert len(fleet.member("p0").requests) == 1
        assert not any(w.num_losses + w.num_failures for w in fleet.workers)
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")
    usage = seen.finished.usage
    assert (usage.num_migrations, usage.num_output_tokens, usage.num_prompt_tokens) == (1, 5, 3)
    ((order,), (begun,), (continued,)) = (giving.orders, giving.requests, taking.requests)
    assert (order.request_id, order.claimant) == (begun.request_id, "d1")
    assert order.lease_id == continued.handle.lease_id != begun.handle.lease_id
    handle = continued.handle
    assert (handle.source_worker, handle.num_tokens) == ("d0", 5)
    assert list(continued.token_ids) == [5, 6, 7, *letter_ids()[:2]]
    assert (continued.num_prompt_tokens, continued.sampling) == (3, begun.sampling)


async def test_draining_worker_finishes_request_without_alternative():
    alone = decode(*BEFORE, DRAINING, tokens(2, 2), DRAINING, tokens(3, 3, 4), finished())
    seen = await run_on(prefill(first(), RELEASED), alone)
    assert (seen.text, seen.finished.usage.num_migrations, alone.orders) == ("abcde", 0, [])


async def test_live_migration_is_dropped_when_request_ends_first():
    ending = decode(*BEFORE, DRAINING, name="d0")
    ending.script += [ending.was_ordered, tokens(2, 2, 3, 4), finished()]
    async with fleet_of(prefill(first(), RELEASED), ending, decode(name="d1")) as fleet:
        seen = await run(fleet)
        assert not fleet.member("d1").requests
    assert (seen.text, seen.finished.usage.num_migrations) == ("abcde", 0)


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param([OverloadedError("full", 0.1)], id="the taker is full"),
        pytest.param([ADMITTED, NotFoundError("no such lease")], id="the lease is over"),
        pytest.param([ADMITTED, Vanish(0.0)], id="the taker dies"),
    ],
)
async def test_live_migration_recomputes_when_it_fails(failure):
    giving, taking = giver(Forever()), Worker("d1", "decode", failure)
    third = decode(READY, tokens(3, 3, 4), finished(), name="d2")
    async with fleet_of(prefill_behind(0, 3), giving, taking, third) as fleet:
        seen = await run(fleet, source_timeout=0.1)
        assert fleet.member("p0").requests[1].token_ids[3:] == letter_ids()[:3]
    assert seen.text == "abcde"


async def test_live_migration_recomputes_when_source_dies():
    giving = giver(Vanish(0.02))
    scripts = Scripts([[ADMITTED, Forever()], [ADMITTED, READY, tokens(3, 3, 4), finished()]])
    taking = Worker("d1", "decode", scripts)
    seen = await run_on(prefill_behind(0, 3), giving, taking)
    assert giving.num_losses == 1
    assert seen.text == "abcde"


class Continuing(Worker):
    """A worker that computes whatever is left of the answer."""

    async def _play(self, request: Any, context: Any) -> AsyncIterator[Any]:
        done = len(request.token_ids) - 3
        if self.role == "prefill":
            self.script = [PREFILL_ADMITTED, at(done) if done else first(), RELEASED]
        else:
            self.script = [ADMITTED, READY, tokens(done, *range(done, 5)), finished()]
        async for message in super()._play(request, context):
            yield message


def dies(script: list[Any], at_step: int | None) -> list[Any]:
    return script if at_step is None else [*script[:at_step], Vanish(0.0)]


@pytest.mark.parametrize("giver_dies_at", [None, *range(1, 9)])
@pytest.mark.parametrize("taker_dies_at", [None, *range(6), "the lease is over"])
async def test_live_migration_survives_deaths_at_every_step(giver_dies_at, taker_dies_at):
    begun, done = decode(), Cue()
    begun.script += [READY, tokens(0, 0, 1), DRAINING, begun.was_ordered]
    begun.script += [tokens(2, 2), suspended(5), done, HANDED_OVER]
    begun.script = dies(begun.script, giver_dies_at)
    taking = [ADMITTED, READY, Go(done), tokens(2, 2, 3), tokens(4, 4), finished()]
    source_timeout = SOURCE_TIMEOUT
    if taker_dies_at == "the lease is over":
        source_timeout = 0.1
        taking, taker_dies_at = [ADMITTED, NotFoundError("no such lease")], None
    taker = Worker("d1", "decode", dies(taking, taker_dies_at))
    others = Continuing("p0", "prefill", []), Continuing("d2", "decode", [])
    async with fleet_of(others[0], begun, taker, others[1]) as fleet:
        seen = await run(fleet, source_timeout=source_timeout)
    assert (seen.token_ids, seen.text) == (letter_ids(), "abcde")
    assert seen.finished.usage.num_output_tokens == 5
    if giver_dies_at in (None, 8):  # after it was suspended
        assert taker.requests[0].handle.num_tokens == 5


async def test_live_migration_recomputes_when_suspended_unasked():
    giving = decode(*BEFORE, tokens(2, 2), suspended(5), Forever(), name="d0")
    taking = decode(READY, tokens(3, 3, 4), finished(), name="d1")
    assert (await run_on(prefill_behind(0, 3), giving, taking)).text == "abcde"


async def test_live_migration_recomputes_when_tokens_are_missing():
    giving = decode(*BEFORE, DRAINING, name="d0")
    giving.script += [giving.was_ordered, suspended(9), Forever()]
    taking = decode(READY, tokens(2, 2, 3, 4), finished(), name="d1")
    assert (await run_on(prefill_behind(0, 2), giving, taking)).text == "abcde"


async def test_live_migration_repeats_for_every_draining_worker():
    taken, taken_again = Cue(), Cue()
    first_giver = giver(taken, HANDED_OVER)
    second = decode(READY, Go(taken), tokens(2, 2, 3), DRAINING, name="d1")
    second.script += [second.was_ordered, suspended(6), taken_again, HANDED_OVER]
    last = decode(READY, Go(taken_again), tokens(3, 3, 4), finished(), name="d2")
    async with fleet_of(prefill(first(), RELEASED), first_giver, second, last) as fleet:
        seen = await run(fleet)
        assert len(fleet.member("p0").requests) == 1
    assert (seen.text, seen.finished.usage.num_migrations) == ("abcde", 2)
    assert last.requests[0].handle.source_worker == "d1"


async def test_lifecycle_names_current_decode_worker_after_migration():
    taken = Cue()
    giving, taking = giver(taken, HANDED_OVER), decode(READY, Go(taken), Forever(), name="d1")
    async with fleet_of(prefill(first(), RELEASED), giving, taking) as fleet:
        lifecycle = lifecycle_of(fleet)
        running = asyncio.create_task(seen_of(lifecycle))
        await until(lambda: taking.requests, within=5.0)
        assert lifecycle.placement.decode == "d1"
        lifecycle.abort()
        with pytest.raises(CancelledError):
            await running


def lender(*script: Any, name: str = "d0") -> Worker:
    worker = decode(READY, tokens(0, 0, 1, 2, 3, 4), finished(), name=name)
    worker.cached, worker.share_script = 4096, list(script)
    return worker


def blocks_shared(num_blocks: int) -> kv_sharing_pb2.ShareResponse:
    return kv_sharing_pb2.ShareResponse(shared=kv_sharing_pb2.BlocksShared(num_blocks=num_blocks))


def prefill_of_long() -> Worker:
    started = prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
    return prefill(started, Cue(), first(), RELEASED)


LONG = tuple(range(5, 105))


async def test_prefix_lease_lasts_until_prompt_is_begun():
    computing, holder = prefill_of_long(), lender(blocks_shared(5), Forever())
    async with fleet_of(computing, holder) as fleet:
        running = asyncio.create_task(seen_of(lifecycle_of(fleet, prompt=LONG)))
        # Admitted, begun, and the loan is over: what runs at the holder is the answer.
        await until(lambda: computing.num_sent_messages >= 2 and holder.num_running <= 1)
        computing.script[2].event.set()
        seen = await running
    (prefix_lease,), (asked,) = holder.share_requests, computing.requests
    assert (prefix_lease.claimant, len(prefix_lease.block_hashes)) == (
        "p0",
        6 * 16,
    )  # one token is left
    source = asked.source
    assert (source.worker, source.endpoint, source.epoch) == ("d0", holder.endpoint, 1)
    assert (source.lease_id, source.num_blocks) == (prefix_lease.lease_id, 5)
    assert source.lease_id != asked.lease_id
    assert (seen.text, seen.accepted.placement.prefix_source) == ("abcde", "d0")


@pytest.mark.parametrize("script", [[NotFoundError("nothing is cached")], [Forever()], []])
async def test_lifecycle_prefills_without_lease_when_holder_refuses(script):
    computing, holder = prefill(first(), RELEASED), lender(*script)
    async with fleet_of(computing, holder) as fleet:
        assert (await seen_of(lifecycle_of(fleet, prompt=LONG))).text == "abcde"
    assert not computing.requests[0].HasField("source")


async def test_lifecycle_takes_no_prefix_lease_for_prompt_logprobs():
    holder = lender(blocks_shared(6), Forever())
    scores = prefill_pb2.PrefillResponse(
        prompt_logprobs=pb.PromptLogprobs(position=1, logprobs=[-1.0] * 99)
    )
    async with fleet_of(prefill(scores, first(), RELEASED), holder) as fleet:
        assert (await seen_of(lifecycle_of(fleet, prompt=LONG, prompt_logprobs=0))).text == "abcde"
    assert not holder.share_requests
