"""Workers of unlike sizes in one pool: each request is served where it fits, and refused as the
client's fault only if it fits nowhere."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import ContextLengthError, EngineLimitError
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import beams, is_greedy, prompt_of
from tests.support.cluster.worker_beside import worker_beside

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
NUM_REQUESTS = 12


# What makes a prefill worker one of 160 tokens and a decode worker one of 960.
SMALL = {
    "pools": ({"num_blocks": 10}, {"num_blocks": 60}),
    "lengths": ({"max_model_len": 160}, {"max_model_len": 960}),
}


@pytest.fixture(scope="module", params=SMALL)
def unlike(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The shape `single`, whose workers take what the model can, beside a prefill worker of 160
    tokens and a decode worker of 960 tokens and 2 sequences."""
    of_prefill, of_decode = SMALL[request.param]
    with (
        worker_beside(cluster, "prefill", **of_prefill),
        worker_beside(cluster, "decode", **of_decode, max_num_seqs=2),
    ):
        yield cluster


async def served(client: AsyncClient, prompt: list[int]) -> None:
    generations = [client.generate(prompt, SHORT) for _ in range(NUM_REQUESTS)]
    answers = {tuple(await generation.token_ids()) for generation in generations}
    assert [is_greedy(TINY, prompt, list(answer)) for answer in answers] == [True]


def length_of_model(cluster: LocalCluster) -> int:
    """Returns the length that `/v1/models` shows."""
    with urllib.request.urlopen(f"{cluster.http_address}/v1/models") as response:
        (model,) = json.load(response)["data"]
    return int(model["max_model_len"])


def refused(cluster: LocalCluster, body: dict[str, object]) -> dict[str, str]:
    """Returns the error of a completion that is refused with status 400."""
    address, data = f"{cluster.http_address}/v1/completions", json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    return json.load(caught.value)["error"]


async def test_prompts_are_served_beside_small_prefill_worker(unlike, client):
    await served(client, prompt_of(400, seed=1))


async def test_long_prompts_are_served_beside_small_decode_worker(unlike, client):
    await served(client, prompt_of(1200, seed=2))
    assert length_of_model(unlike) == 2048


async def test_sequences_are_served_beside_narrow_decode_worker(unlike, client):
    prompt = prompt_of(40, seed=3)
    sampled = SamplingParams(max_tokens=6, n=8, temperature=1.0, ignore_eos=True)
    searched = SamplingParams(max_tokens=6, n=4, beam_width=4, ignore_eos=True)
    expected = [tokens for tokens, _ in beams(TINY, prompt, searched)]
    for _ in range(NUM_REQUESTS // 2):
        assert len(await client.generate(prompt, sampled).completions()) == 8
        found = await client.generate(prompt, searched).completions()
        assert [tuple(one.token_ids) for one in found] == expected


async def test_request_too_large_for_all_is_refused_with_numbers(unlike, client):
    wide = SamplingParams(max_tokens=600, beam_width=4)
    largest = "takes 512 in each of 4 sequences"
    with pytest.raises(EngineLimitError, match=largest):
        await client.generate(prompt_of(40), wide).completions()
    body = {"model": "tiny", "prompt": prompt_of(40), "max_tokens": 600, "n": 4}
    error = refused(unlike, {**body, "use_beam_search": True})
    assert largest in error["message"]
    with pytest.raises(ContextLengthError, match="2048"):
        await client.generate(prompt_of(2045), SHORT).token_ids()


async def test_decode_worker_computes_what_small_prefill_cannot(unlike, client):
    """The only other prefill worker is away; the router's settings leave prompts to them."""
    prompt = prompt_of(400, seed=4)
    unlike.kill("prefill-0")
    try:
        generation = client.generate(prompt, SHORT)
        assert is_greedy(TINY, prompt, await generation.token_ids())
        assert (await generation.wait_accepted()).placement.prefill_worker == ""
        short = client.generate(prompt_of(100, seed=5), SHORT)
        await short.token_ids()
        assert (await short.wait_accepted()).placement.prefill_worker != ""
    finally:
        unlike.restart("prefill-0")
