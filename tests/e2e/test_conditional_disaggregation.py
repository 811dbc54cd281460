"""A decode worker that computes a prompt itself says what it would have said after a handoff."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import AsyncClient, Client
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.ways import CODE, WAYS, answer_of, check_same
from tests.support.cluster.wide import listed, name_of
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
BLOCK = 16


@pytest.fixture(scope="module")
def alone_cluster() -> Iterator[LocalCluster]:
    """Two decode workers, and nobody else to compute a prompt."""
    flags = {"max_num_batched_tokens": 48, "max_num_seqs": 32, "num_blocks": 512}
    with LocalCluster(num_prefill=0, num_decode=2, worker_flags=flags) as running:
        yield running


@pytest.fixture
def alone(alone_cluster: LocalCluster) -> LocalCluster:
    """The same, whole."""
    for process in alone_cluster.processes:
        if not process.is_running:
            alone_cluster.restart(process.name)
    return alone_cluster


@pytest.fixture
async def only(alone: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(alone.address) as open_client:
        yield open_client


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 100])
async def test_its_tokens_are_those_of_transformers(only, alone, length):
    prompt = prompt_of(length)
    generation = only.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    assert is_greedy(TINY, prompt, await generation.token_ids())
    placement = (await generation.wait_accepted()).placement
    assert placement.prefill_worker == ""
    assert generation.finished.usage.num_transferred_blocks == 0
    assert generation.finished.timings.exposed_transfer is None
    assert generation.finished.timings.prefill_queue > 0
    await until_nothing_is_held(alone)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in WAYS])
async def test_each_way_of_choosing_tokens_gives_what_a_handoff_gives(only, alone, client, name):
    params = replace(WAYS[name], prompt_logprobs=None)
    handed_over = client.generate(CODE, params)
    expected = await answer_of(handed_over)
    assert handed_over.finished.usage.num_transferred_blocks > 0
    check_same(name, await answer_of(only.generate(CODE, params)), expected)
    await until_nothing_is_held(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "seeded", "several", "beams"])
async def test_one_that_is_killed_is_replaced_by_another(only, alone, name):
    undisturbed = await answer_of(only.generate(CODE, WAYS[name]))
    generation = only.generate(CODE, WAYS[name])
    placement = (await generation.wait_accepted()).placement
    if name != "beams":  # they come at their end
        await anext(generation)
    alone.kill(name_of(alone, placement.decode_worker))
    check_same(name, await answer_of(generation), undisturbed)
    assert generation.finished.usage.num_migrations == 1
    await until_nothing_is_held(alone, within=3.0)


async def test_what_only_a_prefill_worker_can_tell_is_refused_where_there_is_none(only):
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    with pytest.raises(Exception, match="no prefill worker is known"):
        await only.generate("import os", params).text()


@pytest.fixture(scope="module")
def usual() -> Iterator[LocalCluster]:
    """A worker of each role, and every setting as it is by default."""
    with LocalCluster(worker_flags={"num_blocks": 512}) as running:
        yield running


async def test_a_conversation_goes_on_where_its_last_answer_was_written(usual):
    """The decode worker holds the prompt and the answer, the prefill worker the prompt alone."""
    prompt = prompt_of(96, seed=70)
    async with AsyncClient(usual.address) as client:
        params = SamplingParams(max_tokens=240, ignore_eos=True)
        first = client.generate(prompt, params)
        answer = await first.token_ids()

        def is_known() -> bool:
            with Client(usual.admin_address) as asking:
                candidates = asking.explain([*prompt, *answer]).placement.candidates
            return max(c.num_cached_tokens for c in candidates) > 300

        await until_observed(is_known, what="the decode worker's blocks in the index")
        following = [*prompt, *answer, *prompt_of(7, seed=71)]
        second = client.generate(following, SamplingParams(max_tokens=20, ignore_eos=True))
        assert is_greedy(TINY, following, await second.token_ids())
        assert (await second.wait_accepted()).placement.prefill_worker == ""
        assert second.finished.usage.num_cached_prompt_tokens >= 20 * BLOCK
        assert second.finished.usage.num_transferred_blocks == 0
    await until_nothing_is_held(usual)
    assert {w.num_requests for w in listed(usual).values()} == {0}


async def test_a_long_prompt_is_handed_over_unless_there_is_no_prefill_worker(usual):
    """While there is no prefill worker, decode workers compute what comes."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    async with AsyncClient(usual.address) as client:
        long = client.generate(prompt_of(1200, seed=80), params)
        assert is_greedy(TINY, prompt_of(1200, seed=80), await long.token_ids())
        assert (await long.wait_accepted()).placement.prefill_worker != ""
        usual.kill("prefill-0")
        other = client.generate(prompt_of(300, seed=81), params)
        assert is_greedy(TINY, prompt_of(300, seed=81), await other.token_ids())
        assert (await other.wait_accepted()).placement.prefill_worker == ""
    await until_nothing_is_held(usual)
    usual.restart("prefill-0")
