"""Workers of unlike sizes whose limits the router does not know, as if their records were stale:
one that refuses by a limit of its own is passed over for a larger one."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import EngineLimitError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import beams, is_greedy, prompt_of
from tests.support.router.scripted import letter_ids
from tests.support.waiting import until
from tests.support.worker.fleet import SECONDS, Request, WorkerFleet, fleet_of_workers

ROLES: Any = "prefill", "prefill", "decode", "decode"
SMALL: dict[str, Any] = {"num_blocks": 10, "max_num_seqs": 2}
SHORTER: dict[str, Any] = {"num_blocks": 100, "max_model_len": 160}
LARGE: dict[str, Any] = {"num_blocks": 100, "max_num_seqs": 16}
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
SEVERAL = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=7, n=8)


async def tokens_of(fleet: WorkerFleet, prompt: list[int], params: SamplingParams) -> list[Any]:
    """Returns the tokens of each answer."""
    request = Request(fleet, prompt, params)
    await request.run()
    return [completion.token_ids for completion in request.answer[0]]


@pytest.mark.parametrize("small", [SMALL, SHORTER], ids=["pool", "length"])
async def test_prompt_goes_past_prefill_worker_that_is_too_small(checkpoint, small):
    model, prompt = checkpoint("tiny"), prompt_of(400)
    async with fleet_of_workers(model, *ROLES, own=(small, LARGE, LARGE, LARGE)) as fleet:
        (answer,) = await tokens_of(fleet, prompt, SHORT)
        assert is_greedy(model, prompt, list(answer))
        assert fleet.member("prefill-1").stats.num_computed_tokens == len(prompt)


@pytest.mark.parametrize("small", [SMALL, SHORTER], ids=["pool", "length"])
async def test_decode_worker_computes_what_no_prefill_worker_holds(checkpoint, small):
    model, prompt = checkpoint("tiny"), prompt_of(400, seed=1)
    async with fleet_of_workers(model, "prefill", "decode", own=(small, LARGE)) as fleet:
        (answer,) = await tokens_of(fleet, prompt, SHORT)
        assert is_greedy(model, prompt, list(answer))
        assert fleet.member("prefill-0").stats.num_computed_tokens == 0


async def test_prompt_goes_past_decode_worker_of_shorter_length(checkpoint):
    model, prompt = checkpoint("tiny"), prompt_of(400, seed=5)
    async with fleet_of_workers(model, *ROLES, own=(LARGE, LARGE, SHORTER, LARGE)) as fleet:
        (answer,) = await tokens_of(fleet, prompt, SHORT)
        assert is_greedy(model, prompt, list(answer))


async def test_sequences_go_past_decode_worker_that_runs_fewer(checkpoint):
    model, prompt = checkpoint("tiny"), prompt_of(40, seed=2)
    searched = SamplingParams(max_tokens=8, beam_width=4, n=4, ignore_eos=True)
    async with fleet_of_workers(model, *ROLES, own=(LARGE, LARGE, SMALL, LARGE)) as fleet:
        assert len(await tokens_of(fleet, prompt, SEVERAL)) == SEVERAL.n
        found = await tokens_of(fleet, prompt, searched)
    assert [tuple(each) for each in found] == [ids for ids, _ in beams(model, prompt, searched)]


async def test_running_sequences_resume_past_worker_too_small(checkpoint):
    model, prompt = checkpoint("tiny"), prompt_of(40, seed=3)
    roles: Any = "prefill", "decode", "decode", "decode"
    async with fleet_of_workers(model, *roles, own=(LARGE, LARGE, SMALL, LARGE)) as fleet:
        undisturbed = await tokens_of(fleet, prompt, SEVERAL)
        first, request = fleet.member("decode-0"), Request(fleet, prompt, SEVERAL)
        with first.slowed():
            running = asyncio.create_task(request.run())
            seen = request.progress
            await until(lambda: seen.num_received > SEVERAL.n, within=SECONDS, what="tokens")
            await first.kill()
        await running
        assert [c.token_ids for c in request.answer[0]] == undisturbed
        assert request.num_migrations == 1


async def test_request_too_large_for_all_workers_ends_with_limit(checkpoint):
    model = checkpoint("tiny")
    async with fleet_of_workers(model, *ROLES, own=(LARGE, LARGE, SMALL, SMALL)) as fleet:
        with pytest.raises(EngineLimitError, match="8 sequences; this engine runs 2") as caught:
            await tokens_of(fleet, letter_ids(), SEVERAL)
        assert caught.value.field == "sampling.n"
        best = replace(SEVERAL, n=1, best_of=3)
        with pytest.raises(EngineLimitError) as caught:
            await tokens_of(fleet, letter_ids(), best)
        assert caught.value.field == "sampling.best_of"
