"""Tokens that went through router, prefill and decode equal those of transformers, every one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.types import FinishReason
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import (
    FAMILIES,
    MAX_LEN,
    beams,
    greedy,
    is_greedy,
    prompt_of,
    save_checkpoint,
)
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
BLOCK = 16


def params(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


async def generated(client: AsyncClient, prompt: list[int], max_tokens: int = 20) -> list[int]:
    return await client.generate(prompt, params(max_tokens)).token_ids()


LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100]


@pytest.mark.parametrize("length", LENGTHS)
async def test_tiny_model_tokens_equal_those_of_transformers(client, cluster, length):
    prompt = prompt_of(length)
    tokens = await generated(client, prompt)
    assert len(tokens) == 20
    assert is_greedy(TINY, prompt, tokens)
    await until_nothing_is_held(cluster)


async def test_prompt_near_the_model_length_is_served_to_the_end(client):
    prompt = prompt_of(2040)
    tokens = await generated(client, prompt, 8)
    assert len(tokens) == 8
    assert is_greedy(TINY, prompt, tokens)


async def test_concurrent_requests_equal_requests_run_alone(client, cluster):
    async def leave(seed: int) -> None:
        async with client.generate(prompt_of(5, seed=seed), params(400)) as generation:
            await anext(generation)

    # Admission expects short answers then, and admits more requests than the decode pool holds;
    # half of them fill it, so that it is full also where some end before others arrive.
    await asyncio.gather(*map(leave, range(40)))
    prompts = [prompt_of(5 + 7 * i, seed=i) for i in range(24)]
    at_once = await asyncio.gather(*(generated(client, prompt, 120) for prompt in prompts))
    for prompt, tokens in zip(prompts, at_once, strict=True):
        assert len(tokens) == 120
        assert is_greedy(TINY, prompt, tokens)
    # The decode pool is too small for all of them, so some were computed twice.
    assert load_of(cluster.process("decode-0").admin_endpoint).num_preemptions > 0
    await until_nothing_is_held(cluster)


async def test_repeated_prompt_hits_both_caches_with_equal_tokens(client):
    prompt = prompt_of(5 * BLOCK + 3, seed=42)
    first = client.generate(prompt, params(12))
    tokens = await first.token_ids()
    again = client.generate(prompt, params(12))
    assert await again.token_ids() == tokens
    assert is_greedy(TINY, prompt, tokens)
    usage, repeated = first.finished.usage, again.finished.usage
    assert (usage.num_cached_prompt_tokens, usage.num_transferred_blocks) == (0, 6)
    assert repeated.num_cached_prompt_tokens == 5 * BLOCK
    assert repeated.num_reused_decode_blocks == 5
    assert repeated.num_transferred_blocks == 1


async def test_shared_prefix_is_reused_and_the_rest_computed(client):
    shared = prompt_of(3 * BLOCK, seed=43)
    await generated(client, shared + prompt_of(20, seed=44), 2)
    other = shared + prompt_of(30, seed=45)
    generation = client.generate(other, params(12))
    assert is_greedy(TINY, other, await generation.token_ids())
    assert generation.finished.usage.num_cached_prompt_tokens == 3 * BLOCK
    assert generation.finished.usage.num_reused_decode_blocks == 3


async def test_prompt_of_whole_cached_blocks_transfers_nothing(client):
    prompt = prompt_of(4 * BLOCK, seed=46)
    expected = await generated(client, prompt, 12)
    assert is_greedy(TINY, prompt, expected)
    again = client.generate(prompt, params(12))
    assert await again.token_ids() == expected
    assert again.finished.usage.num_transferred_blocks == 0
    assert again.finished.usage.num_reused_decode_blocks == 4


async def test_text_equals_the_decoded_tokens(client):
    generation = client.generate("def fibonacci(n):\n    ", params(40))
    tokens = await generation.token_ids()
    tokenizer = Tokenizer.from_file(str(Path(TINY) / "tokenizer.json"))
    assert await generation.text() == tokenizer.decode(tokens)


# Other families.


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / request.param
    save_checkpoint(request.param, folder)
    return str(folder)


@pytest.fixture(scope="module")
def family(checkpoint: str) -> Iterator[tuple[LocalCluster, str]]:
    flags = {"max_num_batched_tokens": 40, "max_num_seqs": 16, "num_blocks": 40}
    with LocalCluster(checkpoint, worker_flags=flags, router_flags=HANDOFFS) as running:
        yield running, checkpoint


PER_COMMIT = "qwen2-two-groups"  # the others: tests/worker/test_handoff.py


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(name, marks=pytest.mark.slow if name == PER_COMMIT else pytest.mark.nightly)
        for name in FAMILIES
    ],
    indirect=True,
)
async def test_model_family_tokens_equal_those_of_transformers(family):
    cluster, model = family
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 70, MAX_LEN - 24]
    async with AsyncClient(cluster.address) as client:
        for length in lengths:
            prompt = prompt_of(length)
            tokens = await generated(client, prompt, 24)
            assert len(tokens) == 24
            assert is_greedy(model, prompt, tokens), length
        assert await generated(client, prompt_of(30), 8) == greedy(model, prompt_of(30), 8)
        prompts = [prompt_of(5 + 4 * i, seed=i) for i in range(16)]
        at_once = await asyncio.gather(*(generated(client, prompt, 24) for prompt in prompts))
        for prompt, tokens in zip(prompts, at_once, strict=True):
            assert is_greedy(model, prompt, tokens)
        await until_nothing_is_held(cluster)
        await check_endings(client, cluster)
        await check_beams(client, model)
        await until_nothing_is_held(cluster)


async def check_beams(client: AsyncClient, model: str) -> None:
    """Sequences that share a prompt, windows or not, are those of transformers too."""
    prompt = prompt_of(45)
    searched = params(12, n=2, beam_width=3)
    completions = await client.generate(prompt, searched).completions()
    expected = beams(model, prompt, searched)
    assert [completion.token_ids for completion in completions] == [ids for ids, _ in expected]


async def check_endings(client: AsyncClient, cluster: LocalCluster) -> None:
    """The end-of-sequence token ends a request and is part of it, be it the first or a later one;
    unless the request does not mind it."""
    prompt = prompt_of(9)
    plain = await generated(client, prompt, 12)
    end = plain.index(plain[5])
    for known in range(end + 1):
        generation = client.generate(prompt + plain[:known], SamplingParams(max_tokens=12 - known))
        assert await generation.token_ids() == plain[known : end + 1]
        assert generation.finished.reason is FinishReason.END_OF_SEQUENCE
    assert len(plain) == 12
    await until_nothing_is_held(cluster)
