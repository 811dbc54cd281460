"""Encode pool of real processes: prompts with images whose outputs other workers compute, and what
becomes of them when those workers die, leave or change their role."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest
from PIL.Image import Image as PillowImage

from baton.cli.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client, Image
from baton.cluster.redis import connect
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster.image_requests import (
    GREEDY,
    NUM_TOKENS,
    Asked,
    Given,
    Model,
    Running,
    asking,
    prompts_of,
    router_of,
)
from tests.support.cluster.scraped import scrape
from tests.support.cluster.traces import check_tree, named, share_told
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import restored, stopped
from tests.support.engine.images import IMAGE_TOKEN, TOKENS_PER_IMAGE, greedy, image, words
from tests.support.router.images import encoded, save_checkpoint
from tests.support.serving.otlp_receiver import Collector, ReceivedSpan, collecting
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

ENCODERS = ("encode-0", "encode-1")
INPUTS = "baton_encoder_inputs_total"
ENCODED_ELSEWHERE = ("generate", "encode", "encode.call", "encoder.transfer", "encoder.send")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("llava")
    return Model(save_checkpoint("llava_clip", folder))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def environment(collector: Collector) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }


@pytest.fixture(scope="module")
def started(llava: Model, environment: dict[str, str]) -> Iterator[LocalCluster]:
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
    slow = {"max_num_batched_tokens": 2}  # a prompt takes more than fifty steps
    router = {"admission": "none"}
    cluster = LocalCluster(
        llava.path, num_encode=2, worker_flags=flags, prefill_flags=slow, router_flags=router
    )
    try:
        with patch.dict(os.environ, environment):
            cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(started: LocalCluster, environment: dict[str, str]) -> LocalCluster:
    with patch.dict(os.environ, environment):
        return restored(started)


@pytest.fixture
def asked(request: pytest.FixtureRequest, llava: Model) -> Asked:
    return Asked(llava, request.param)


def ids_of(cluster: LocalCluster, *names: str) -> list[str]:
    return [cluster.process(name).worker_id for name in names]


def ways(running: list[Running]) -> list[str]:
    """Where the inputs of all requests were encoded. A failure that the router has not noticed when
    the prompt is computed is not among them."""
    accounts = [each.lifecycle.account for each in running]
    return [encoded.way for account in accounts for encoded in account.encoded_inputs]


def num_fetched(cluster: LocalCluster, name: str) -> float:
    """Encoder outputs that a worker has fetched from others."""
    family = scrape(cluster.metrics_endpoints[name])["baton_encoder_transfer_seconds"]
    return family.total("baton_encoder_transfer_seconds_count")


async def drain(cluster: LocalCluster, name: str) -> None:
    endpoint = cluster.process(name).admin_endpoint
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)


TEXTS: list[Given] = [(words(50, seed), ()) for seed in (1, 2)]


@asking(prompts_of(1) + TEXTS)
async def test_encode_workers_encode_images_of_prompts(cluster, llava, asked):
    before = num_fetched(cluster, "prefill-0")
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, *ENCODERS))
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert ways(running) == ["encode"] * 8
    assert num_fetched(cluster, "prefill-0") - before == 8


SHOWN_TWICE: list[Given] = [(f"{words(9, seed)} {IMAGE_TOKEN}", (image(311),)) for seed in (1, 2)]


@asking(SHOWN_TWICE)
async def test_workers_share_cached_outputs(cluster, llava, asked):
    first, second = asked.requests
    async with router_of(cluster, llava) as router:
        running = [Running(router.lifecycle(first, ids_of(cluster, "encode-0")))]
        await running[0].task
        for name, is_alone in (("encode-0", False), ("prefill-0", True)):
            source = ids_of(cluster, name)
            how = {"only_cached": True, "is_alone": is_alone}
            running.append(Running(router.lifecycle(second, source, **how)))
            await running[-1].task
        await until_nothing_is_held(cluster)
    await asked.check(running[:2])
    assert running[1].tokens == running[2].tokens
    assert ways(running) == ["encode", "cached_remote", "cached_remote"]


@asking(prompts_of(10))
async def test_decode_worker_alone_fetches_outputs_of_encode_workers(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        before = await asyncio.to_thread(num_fetched, cluster, "decode-0")
        running = asked.begin(router, ids_of(cluster, *ENCODERS), is_alone=True)
        await asked.check(running)
        await until_nothing_is_held(cluster)
        assert await asyncio.to_thread(num_fetched, cluster, "decode-0") == before + 8
    assert ways(running) == ["encode"] * 8


@asking(prompts_of(2))
async def test_dead_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        ids = ids_of(cluster, *ENCODERS)
        cluster.kill("encode-0")
        running = asked.begin(router, ids)
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert ways(running).count("encode") == 4
    assert set(ways(running)) == {"encode", "failed"}


@asking(prompts_of(3))
async def test_encode_worker_killed_in_its_calls_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        with stopped(cluster, "encode-0"):
            running = asked.begin(router, ids_of(cluster, "encode-0"))
            await until(lambda: any(each.is_accepted for each in running))
            cluster.kill("encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert set(ways(running)) == {"failed"}


@asking(prompts_of(4))
async def test_silent_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        with stopped(cluster, "encode-0"):
            running = asked.begin(router, ids_of(cluster, "encode-0"))
            await asked.check(running)
    assert set(ways(running)) <= {"failed"}


@asking(prompts_of(5))
async def test_encode_worker_killed_after_encoding_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, "encode-0"))
        await until(lambda: "encode" in ways(running))
        cluster.kill("encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)


@asking(prompts_of(6))
async def test_draining_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        ids = ids_of(cluster, *ENCODERS)
        running = asked.begin(router, ids)
        await until(lambda: "encode" in ways(running))
        await drain(cluster, "encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)


@asking(prompts_of(7))
async def test_encode_worker_that_changes_its_role_costs_no_request(cluster, llava, asked):
    (worker,) = ids_of(cluster, "encode-0")
    early, late = asked.requests[:2], asked.requests[2:]
    async with router_of(cluster, llava) as router, AsyncClient(cluster.admin_address) as admin:
        running = [Running(router.lifecycle(each, [worker])) for each in early]
        await until(lambda: "encode" in ways(running))
        await admin.set_role(worker, "prefill")
        await until(lambda: router.fleet.member(worker).record.role == "prefill")
        running += [Running(router.lifecycle(each, [worker])) for each in late]
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert set(ways(running[2:])) == {"failed"}


@asking(prompts_of(8))
async def test_prefill_worker_encodes_without_encode_workers(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        for name in ENCODERS:
            cluster.kill(name)
        running = asked.begin(router)
        await asked.check(running)
        await until_nothing_is_held(cluster)


@asking(prompts_of(9))
async def test_flushed_redis_costs_no_request(cluster, llava, asked):
    redis = connect(cluster.redis_url)
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, *ENCODERS))
        await redis.flushall()
        await asked.check(running)
        await until_nothing_is_held(cluster)
    await redis.aclose()


# The router's process, which places requests itself.


@dataclass(frozen=True)
class Question:
    """Prompt of words before and after an image, with transformers' answer."""

    text: str
    image: PillowImage
    expected: tuple[int, ...]

    def ask(self, client: Client, request_id: str) -> tuple[int, ...]:
        images = [Image(encoded(self.image))]
        generation = client.generate(self.text, GREEDY, request_id=request_id, images=images)
        return tuple(generation.token_ids())


def question_of(model: Model, seed: int) -> Question:
    text, picture = f"{words(60, seed)} {IMAGE_TOKEN} {words(5, -seed)}", image(seed)
    return Question(text, picture, greedy(model.path, text, [picture], NUM_TOKENS))


def num_inputs(cluster: LocalCluster, way: str) -> float:
    return scrape(cluster.metrics_endpoints["router"])[INPUTS].total(INPUTS, way=way)


def trace_root(collector: Collector, request_id: str) -> ReceivedSpan:
    return collector.trace_of(request_id, "generate")[0]


def test_router_encodes_images_of_queued_prompts_elsewhere(cluster, llava, collector):
    questions = [question_of(llava, seed) for seed in range(200, 208)]
    before = num_inputs(cluster, "encode")
    ids = [f"queued-{index}" for index in range(len(questions))]
    with Client(cluster.address) as client, ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(Question.ask, questions, repeat(client), ids))
    assert answers == [question.expected for question in questions]
    assert num_inputs(cluster, "encode") > before
    roots = [trace_root(collector, request_id) for request_id in ids]
    traced = {span.trace_id for span in named(collector.spans, "encode")}
    # The client, in threads of the test's process, delays the end of each answer.
    longest = max((root for root in roots if root.trace_id in traced), key=lambda s: s.seconds)
    spans = collector.trace_of(longest["baton.request.id"], *ENCODED_ELSEWHERE)
    check_tree(spans)
    assert share_told(spans) >= 0.98
    (call,) = named(spans, "encode.call")
    (encoding,) = named(spans, "encode")
    assert call.service == "baton-encode"
    assert encoding["baton.worker"] == call["baton.worker"] in ids_of(cluster, *ENCODERS)
    assert encoding["baton.encode.num_tokens"] == TOKENS_PER_IMAGE
    assert encoding["baton.encode.num_bytes"] > 0
    assert not encoding["baton.encode.was_cached"]
