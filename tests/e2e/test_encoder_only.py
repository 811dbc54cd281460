"""Encode worker process that has loaded the encoder alone: its images, its end and its role."""

import asyncio
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Image
from baton.errors import FailedPreconditionError
from baton.sampling import SamplingParams
from tests.support.cluster.scraped import scrape
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.cluster.wide import listed
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.router.images import encoded, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
INPUTS = "baton_encoder_inputs_total"

_seeds = count(21)  # of images whose answers have no toss-up


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("llava")
    return str(save_checkpoint("llava_clip", folder))


@pytest.fixture(scope="module")
def cluster(llava: str) -> Iterator[LocalCluster]:
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
    # A prompt takes many steps, so that prompts queue, and the pool encodes images of those.
    slow = {"max_num_batched_tokens": 2}
    with LocalCluster(
        llava,
        num_encode=1,
        worker_flags=flags,
        encode_flags={"encoder_only": True},
        prefill_flags=slow,
        router_flags={"admission": "none", "conditional_disaggregation": False},
    ) as started:
        yield started


def num_encoded(cluster: LocalCluster) -> float:
    """Images that the encode pool has computed for this router."""
    return scrape(cluster.metrics_endpoints["router"])[INPUTS].total(INPUTS, source="encode")


async def check_answers(client: AsyncClient, path: str) -> None:
    """Asks about images that no worker has cached, all at once, and compares each token."""

    async def answer(seed: int) -> tuple[int, ...]:
        images = [Image(encoded(image(seed)))]
        return tuple(await client.generate(prompts[seed], PARAMS, images=images).token_ids())

    seeds = list(islice(_seeds, 8))
    prompts = {seed: f"{words(60, seed)} {IMAGE_TOKEN} {words(5, -seed)}" for seed in seeds}
    answers = await asyncio.gather(*map(answer, seeds))
    for seed, tokens in zip(seeds, answers, strict=True):
        assert tokens == tuple(greedy(path, prompts[seed], (image(seed),), PARAMS.max_tokens))


async def test_encoder_only_worker_is_killed_and_replaced(cluster, llava):
    async with AsyncClient(cluster.address) as client:
        before = num_encoded(cluster)
        await check_answers(client, llava)
        assert num_encoded(cluster) > before
        cluster.kill("encode-0")
        await check_answers(client, llava)
        cluster.restart("encode-0")
        before = num_encoded(cluster)
        await check_answers(client, llava)
        assert num_encoded(cluster) > before
    await until_nothing_is_held(cluster)
    worker = load_of(cluster.process("encode-0").admin_endpoint)
    assert (worker.num_blocks, worker.num_computed_tokens) == (1, 0)


async def test_encoder_only_worker_keeps_its_role(cluster, llava):
    worker = cluster.process("encode-0").worker_id
    async with AsyncClient(cluster.address) as client, AsyncClient(cluster.admin_address) as admin:
        for role in ("prefill", "decode"):
            with pytest.raises(FailedPreconditionError, match="loaded the encoder alone"):
                await admin.set_role(worker, role)
        assert listed(cluster)["encode-0"].role == "encode"
        await check_answers(client, llava)
