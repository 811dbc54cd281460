"""A decode worker that computes a prompt itself says what it would have said after a handoff."""

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client
from baton.errors import UnavailableError
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import listed
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
BLOCK = 16


@pytest.fixture(scope="module")
def usual(single_shape: LocalCluster) -> Iterator[SecondRouter]:
    """A router with every setting as it is by default."""
    with second_router(single_shape) as running:
        yield running


async def test_long_prompts_use_prefill_workers_while_there_are_any(usual, cluster):
    """While there is no prefill worker, decode workers compute what comes."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with AsyncClient(usual.address) as client:
        long = client.generate(prompt_of(1200, seed=80), params)
        assert is_greedy(TINY, prompt_of(1200, seed=80), await long.token_ids())
        assert (await long.wait_accepted()).placement.prefill_worker != ""
        cluster.kill("prefill-0")
        other = client.generate(prompt_of(300, seed=81), params)
        assert is_greedy(TINY, prompt_of(300, seed=81), await other.token_ids())
        assert (await other.wait_accepted()).placement.prefill_worker == ""
        rejected = client.generate("import os", SamplingParams(max_tokens=2, prompt_logprobs=0))
        with pytest.raises(UnavailableError, match="no prefill worker"):
            await rejected.text()
    await until_nothing_is_held(usual)
    cluster.restart("prefill-0")


# Without a prefill worker.


@pytest.fixture(scope="module")
def alone(usual: SecondRouter, single_shape: LocalCluster) -> Iterator[SecondRouter]:
    """The same, while there is only a decode worker."""
    single_shape.kill("prefill-0")
    yield usual
    single_shape.restart("prefill-0")


@pytest.fixture
async def only(alone: SecondRouter) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(alone.address) as open_client:
        yield open_client


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 100])
async def test_decode_only_tokens_equal_those_of_transformers(only, usual, length):
    prompt = prompt_of(length)
    generation = only.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    assert is_greedy(TINY, prompt, await generation.token_ids())
    placement = (await generation.wait_accepted()).placement
    assert placement.prefill_worker == ""
    assert generation.finished.usage.num_transferred_blocks == 0
    assert generation.finished.timings.exposed_transfer is None
    assert generation.finished.timings.prefill_queue > 0
    await until_nothing_is_held(usual)


async def test_next_turn_hits_the_prefix_cache_of_the_decode_worker(alone):
    """The decode worker holds the prompt and the answer."""
    prompt = prompt_of(96, seed=70)
    async with AsyncClient(alone.address) as client:
        params = SamplingParams(max_tokens=240, ignore_eos=True)
        first = client.generate(prompt, params)
        answer = await first.token_ids()

        def is_known() -> bool:
            with Client(alone.admin_address) as admin:
                candidates = admin.explain([*prompt, *answer]).placement.candidates
            return max(c.num_cached_tokens for c in candidates) > 300

        await until_observed(is_known, what="the decode worker's blocks in the index")
        following = [*prompt, *answer, *prompt_of(7, seed=71)]
        second = client.generate(following, SamplingParams(max_tokens=20, ignore_eos=True))
        assert is_greedy(TINY, following, await second.token_ids())
        assert (await second.wait_accepted()).placement.prefill_worker == ""
        assert second.finished.usage.num_cached_prompt_tokens >= 20 * BLOCK
        assert second.finished.usage.num_transferred_blocks == 0
    await until_nothing_is_held(alone)
    assert {w.num_requests for w in listed(alone).values()} == {0}
