"""Encode pool of a running cluster, as operators see it: workers move in and out of it, by command
and by load, and every image is answered as transformers does."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from baton.client.client import AsyncClient, Client, Image
from baton.errors import FailedPreconditionError
from baton.sampling import SamplingParams
from tests.support.cluster.scraped import scrape
from tests.support.cluster.wide import listed
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.router.images import encoded, save_checkpoint
from tests.support.waiting import until_observed, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

FLAGS = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
TIMEOUT = 60.0

_seeds = itertools.count(900)  # of images that no other test shows


@pytest.fixture
def cluster(pictured: LocalCluster) -> LocalCluster:
    return pictured


def roles(cluster: LocalCluster) -> dict[str, str]:
    """Returns the roles of the workers that take work, by name."""
    return {name: w.role for name, w in listed(cluster).items() if w.state == "ready"}


async def answer(client: AsyncClient, seed: int) -> tuple[int, ...]:
    generation = client.generate(prompt_of(seed), PARAMS, images=[Image(encoded(image(seed)))])
    return tuple(await generation.token_ids())


def prompt_of(seed: int) -> str:
    return f"{words(40, seed)} {IMAGE_TOKEN} {words(9, -seed)}"


def expected(path: str, seed: int) -> tuple[int, ...]:
    return tuple(greedy(path, prompt_of(seed), (image(seed),), PARAMS.max_tokens))


def command(cluster: LocalCluster, *arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--admin", cluster.admin_address])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[LocalCluster]:
    """One whose encode worker may help with prompts, which its prefill worker computes slowly."""
    router = {
        "elastic": True,
        "elastic_dwell_s": 1.0,
        "elastic_cooldown_s": 2.0,
        "elastic_min_encode_workers": 0,
        "slo_ttft_ms": 50.0,
        "slo_itl_ms": 10_000.0,
        "conditional_disaggregation": False,
        "admission": "none",
    }
    slow = {"max_num_batched_tokens": 4}
    llava = save_checkpoint("llava_clip", tmp_path)
    with LocalCluster(
        llava, num_encode=1, worker_flags=FLAGS, prefill_flags=slow, router_flags=router
    ) as started:
        yield started


@pytest.mark.slow
async def test_idle_encode_worker_becomes_prefill_worker_by_load(elastic):
    async def ask(client: AsyncClient, number: int) -> None:
        for seed in itertools.count(1000 * number):
            await client.generate(words(200, seed), PARAMS).text()

    async with AsyncClient(elastic.address) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(8)]
        try:
            await until_observed(lambda: roles(elastic).get("encode-0") == "prefill", TIMEOUT)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        assert set(roles(elastic).values()) == {"prefill", "decode"}
        seed = next(_seeds)
        assert await answer(client, seed) == expected(elastic.model, seed)


async def test_worker_moves_into_and_out_of_encode_pool(cluster):
    async with AsyncClient(cluster.address) as client, AsyncClient(cluster.admin_address) as admin:
        worker = cluster.process("decode-1").worker_id
        for role in ("encode", "prefill", "encode", "decode"):
            await admin.set_role(worker, role)
            await until_observed(lambda role=role: roles(cluster).get("decode-1") == role)
            seed = next(_seeds)
            assert await answer(client, seed) == expected(cluster.model, seed)


def test_operators_see_encode_workers(cluster):
    with Client(cluster.admin_address) as admin:
        admin.set_role(cluster.process("decode-1").worker_id, "encode")
    wait_until(lambda: roles(cluster).get("decode-1") == "encode", TIMEOUT)
    assert "pressure: encode 0.00" in command(cluster, "role")
    rows = [json.loads(line) for line in command(cluster, "workers", "--json").splitlines()]
    assert {row["id"]: row["role"] for row in rows}["decode-1"] == "encode"
    found = [json.loads(line) for line in command(cluster, "doctor", "--json").splitlines()]
    assert {"subject": "encode workers", "level": "ok", "text": "3 of 3 are ready"}.items() <= next(
        finding for finding in found if finding["subject"] == "encode workers"
    ).items()
    exposed = scrape(cluster.metrics_endpoints["router"])["baton_workers"]
    assert exposed.total("baton_workers", role="encode", state="ready") == 3


def test_model_without_images_gets_no_encode_worker(single_shape):
    with (
        Client(single_shape.admin_address) as admin,
        pytest.raises(FailedPreconditionError, match="takes no images"),
    ):
        admin.set_role(single_shape.process("decode-0").worker_id, "encode")
