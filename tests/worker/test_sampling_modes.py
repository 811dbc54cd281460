"""Every way of choosing tokens, crossed with every disturbance, in one process.

The request lifecycle and the workers are real; there is no Redis and no other process. Three of the
ways meet the same disturbances end to end, in tests/e2e.
"""

import asyncio
from dataclasses import replace

import pytest

from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton_router.routing.placement.decision import DEFAULT_RULES, Rules
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.sampling_modes import (
    CODE,
    SEEDED,
    Answer,
    check_same,
    with_late_stop_string,
)
from tests.support.router.scripted import HANDOFFS
from tests.support.waiting import until
from tests.support.worker.fleet import SECONDS, Request, WorkerFleet, fleet_of_workers

MAX_TOKENS = 60
CROWD = {"num_blocks": 512, "max_num_seqs": 32, "max_num_batched_tokens": 64}
# Of these nothing is told before the end, so that they are generated again from the beginning.
RANKED = {"best", "beams"}
# Requests of several sequences are not handed over.
FORKING = {"several", *RANKED}


def shortened(params: SamplingParams) -> SamplingParams:
    """The same in fewer tokens, by a grammar that is compiled in less time."""
    if params.grammar is not None:
        params = replace(params, grammar=Grammar(GrammarKind.REGEX, "([a-z]{3,9} ){20}"))
    return replace(params, max_tokens=MAX_TOKENS, min_tokens=min(params.min_tokens, MAX_TOKENS))


async def answers_of(
    fleet: WorkerFleet, ways: dict[str, SamplingParams], rules: Rules = HANDOFFS
) -> dict[str, Answer]:
    """The answers of a fleet that nothing disturbs."""
    requests = {name: Request(fleet, CODE, params, rules) for name, params in ways.items()}
    await asyncio.gather(*(request.run() for request in requests.values()))
    return {name: request.answer for name, request in requests.items()}


@pytest.fixture(scope="module")
def undisturbed(checkpoint) -> tuple[dict[str, SamplingParams], dict[str, Answer]]:
    """The ten ways, and what follows the prompt in each."""

    async def generate() -> tuple[dict[str, SamplingParams], dict[str, Answer]]:
        async with fleet_of_workers(checkpoint("tiny"), "prefill", "decode", **CROWD) as fleet:
            seeded = await answers_of(fleet, {"seeded": shortened(SEEDED)})
            text = seeded["seeded"][0][0].text
            ways = {n: shortened(p) for n, p in with_late_stop_string(text).items()}
            return ways, await answers_of(fleet, ways)

    return asyncio.run(generate())


def check_all(requests: dict[str, Request], expected: dict[str, Answer]) -> None:
    for name, request in requests.items():
        check_same(name, request.answer, expected[name])


def started(
    fleet: WorkerFleet, ways: dict[str, SamplingParams]
) -> tuple[dict[str, Request], list[asyncio.Task[None]]]:
    """All ways at once, and the tasks that run them."""
    requests = {name: Request(fleet, CODE, params) for name, params in ways.items()}
    return requests, [asyncio.create_task(request.run()) for request in requests.values()]


async def amid_all(requests: dict[str, Request]) -> None:
    """Returns when every request is being decoded; those that are not ranked have told tokens."""
    told = [r.progress for name, r in requests.items() if name not in RANKED]
    await until(lambda: all(p.num_received >= 5 for p in told), what="ten answers")
    assert all(r.progress.is_accepted and not r.progress.finished for r in requests.values())


async def test_sampling_modes_survive_loss_of_decode_worker(checkpoint, undisturbed):
    ways, expected = undisturbed
    roles = "prefill", "decode", "decode"
    async with fleet_of_workers(checkpoint("tiny"), *roles, **CROWD) as fleet:
        decode = fleet.member("decode-0")
        with decode.slowed():
            requests, tasks = started(fleet, ways)
            await amid_all(requests)
            await decode.kill()
        await asyncio.gather(*tasks)
        check_all(requests, expected)
        assert {name: r.num_migrations for name, r in requests.items()} == dict.fromkeys(ways, 1)


async def test_sampling_modes_survive_loss_of_prefill_worker(checkpoint, undisturbed):
    """All ten prompts wait for a long one when it is lost."""
    ways, expected = undisturbed
    roles = "prefill", "prefill", "decode"
    settings = {**CROWD, "max_num_batched_tokens": 4, "max_num_seqs": 1}
    async with fleet_of_workers(checkpoint("tiny"), *roles, **CROWD, prefill=settings) as fleet:
        prefill = fleet.member("prefill-0")
        with prefill.slowed():
            long = Request(fleet, prompt_of(400), SamplingParams(max_tokens=1))
            first = asyncio.create_task(long.run())
            await until(lambda: prefill.stats.num_running == 1, what="the long prompt")
            requests, tasks = started(fleet, ways)
            await until(lambda: prefill.stats.num_waiting == len(ways), what="ten prompts")
            await prefill.kill()
        await asyncio.gather(first, *tasks)
        check_all(requests, expected)
        assert {name: r.num_migrations for name, r in requests.items()} == dict.fromkeys(ways, 1)


async def test_sampling_modes_migrate_when_decode_worker_drains(checkpoint, undisturbed):
    """Requests that can migrate compute no prompt again; the others end where they are."""
    ways, expected = undisturbed
    roles = "prefill", "decode", "decode"
    async with fleet_of_workers(checkpoint("tiny"), *roles, **CROWD) as fleet:
        decode, prefill = fleet.member("decode-0"), fleet.member("prefill-0")
        with decode.slowed():
            requests, tasks = started(fleet, ways)
            await amid_all(requests)
            before = prefill.stats.num_computed_tokens
            await decode.drain()
            moving = [r.progress for name, r in requests.items() if name not in FORKING]
            await until(lambda: all(p.finished for p in moving), within=SECONDS, what="answers")
        await asyncio.gather(*tasks)
        check_all(requests, expected)
        migrated = {name: r.num_migrations for name, r in requests.items()}
        assert migrated == {name: int(name not in FORKING) for name in ways}
        assert prefill.stats.num_computed_tokens == before


async def test_sampling_modes_survive_return_by_preemption(checkpoint, undisturbed):
    """The decode worker has room for a few of them."""
    ways, expected = undisturbed
    roles = "prefill", "decode", "decode"
    tight = {**CROWD, "num_blocks": 16, "preemption": "return"}
    async with fleet_of_workers(checkpoint("tiny"), *roles, **tight) as fleet:
        requests, tasks = started(fleet, ways)
        await asyncio.gather(*tasks)
        check_all(requests, expected)
        num_returns = sum(m.stats.num_returns for m in fleet.members)
        # A request that has met its stop string may be returned before its worker hears of it.
        num_met = sum(bool(params.stop) for params in ways.values())
        num_migrations = sum(r.num_migrations for r in requests.values())
        assert 0 < num_migrations <= num_returns <= num_migrations + num_met


async def test_sampling_modes_resume_at_other_router(checkpoint, undisturbed):
    """A second lifecycle goes on behind the tokens that the client has."""
    ways, expected = undisturbed
    async with fleet_of_workers(checkpoint("tiny"), "prefill", "decode", **CROWD) as fleet:
        with fleet.member("decode-0").slowed():
            requests, tasks = started(fleet, ways)
            await amid_all(requests)
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in requests.values():
            request.resume()
        await asyncio.gather(*(request.run() for request in requests.values()))
        check_all(requests, expected)


async def test_sampling_modes_are_same_when_decode_worker_prefills(checkpoint, undisturbed):
    ways, expected = undisturbed
    ways = {name: params for name, params in ways.items() if params.prompt_logprobs is None}
    async with fleet_of_workers(checkpoint("tiny"), "decode", **CROWD) as fleet:
        answers = await answers_of(fleet, ways, DEFAULT_RULES)
        for name, answer in answers.items():
            check_same(name, answer, expected[name])


async def test_sampling_modes_are_same_with_speculation(checkpoint, undisturbed):
    ways, expected = undisturbed
    settings = {**CROWD, "max_drafts": 4}
    async with fleet_of_workers(checkpoint("tiny"), "prefill", "decode", **settings) as fleet:
        answers = await answers_of(fleet, ways)
        for name, answer in answers.items():
            check_same(name, answer, expected[name])
        assert fleet.member("decode-0").stats.num_accepted_tokens > 0
