"""Encode pool of real processes: prompts with images whose outputs other workers compute, and what
becomes of them when those workers die, leave or change their role."""

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client
from baton.cluster.redis.client import connect
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from baton_router.call.prompt import Prompt
from tests.support.cluster.image_questions import Question, num_inputs, question_of
from tests.support.cluster.image_requests import (
    Asked,
    Given,
    Model,
    Router,
    Running,
    prompts_of,
    requests_of,
    router_of,
)
from tests.support.cluster.named_clusters import Traced
from tests.support.cluster.scraped import scrape
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.traces import check_tree, named, share_told
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import name_of, stopped
from tests.support.engine.images import IMAGE_TOKEN, TOKENS_PER_IMAGE, image, words
from tests.support.serving.otlp_receiver import Collector, ReceivedSpan
from tests.support.waiting import until, until_observed

pytestmark = pytest.mark.e2e

ENCODERS = ("encode-0", "encode-1")
ENCODED_ELSEWHERE = ("generate", "encode", "encode.call", "encoder.transfer", "encoder.send")


@pytest.fixture(scope="module")
def llava(pictured_shape: Traced) -> Model:
    return Model(pictured_shape.cluster.model)


@pytest.fixture
def collector(pictured_shape: Traced) -> Collector:
    return pictured_shape.collector


@pytest.fixture
def cluster(pictured: LocalCluster) -> LocalCluster:
    return pictured


@pytest.fixture
def asked(request: pytest.FixtureRequest, llava: Model) -> Asked:
    return Asked(llava, request.param)


def ids_of(cluster: LocalCluster, *names: str) -> list[str]:
    return [cluster.process(name).worker_id for name in names]


def ways(running: list[Running]) -> list[str]:
    """Returns where the inputs of all requests were encoded. A failure that the router has not
    noticed when the prompt is computed is not among them."""
    accounts = [each.lifecycle.account for each in running]
    return [encoded.source for account in accounts for encoded in account.encoded_inputs]


def num_fetched(cluster: LocalCluster, role: str) -> float:
    """Encoder outputs that the workers of a role have fetched from others."""
    name = "baton_encoder_transfer_seconds"
    endpoints = [p.metrics_endpoint for p in cluster.processes if p.role == role]
    return sum(scrape(endpoint)[name].total(f"{name}_count") for endpoint in endpoints)


def num_fetched_by_all(cluster: LocalCluster) -> float:
    """Returns the outputs that prefill workers have fetched, and decode workers for prompts that
    they compute alone."""
    return num_fetched(cluster, "prefill") + num_fetched(cluster, "decode")


async def drain(cluster: LocalCluster, name: str) -> None:
    endpoint = cluster.process(name).admin_endpoint
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)


TEXTS: list[Given] = [(words(50, seed), ()) for seed in (1, 2)]


@requests_of(prompts_of(1) + TEXTS)
async def test_encode_workers_encode_images_of_prompts(cluster, llava, asked):
    before = num_fetched(cluster, "prefill")
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, *ENCODERS))
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert ways(running) == ["encode"] * 8
    assert num_fetched(cluster, "prefill") - before == 8


SHOWN_TWICE: list[Given] = [(f"{words(9, seed)} {IMAGE_TOKEN}", (image(311),)) for seed in (1, 2)]


@requests_of(SHOWN_TWICE)
async def test_workers_share_cached_outputs(cluster, llava, asked):
    first, second = asked.requests
    (encode,) = ids_of(cluster, "encode-0")
    async with router_of(cluster, llava) as router:
        running = [Running(router.lifecycle(first, [encode]))]
        await running[0].task
        prefill = running[0].lifecycle.placement.prefill
        for source, is_alone in ((encode, False), (prefill, True)):
            how = {"only_cached": True, "is_alone": is_alone}
            running.append(Running(router.lifecycle(second, [source], **how)))
            await running[-1].task
        await until_nothing_is_held(cluster)
    await asked.check(running[:2])
    assert running[1].tokens == running[2].tokens
    assert ways(running) == ["encode", "cached_remote", "cached_remote"]


@requests_of(prompts_of(10))
async def test_decode_worker_alone_fetches_outputs_of_encode_workers(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        before = await asyncio.to_thread(num_fetched, cluster, "decode")
        running = asked.begin(router, ids_of(cluster, *ENCODERS), is_alone=True)
        await asked.check(running)
        await until_nothing_is_held(cluster)
        assert await asyncio.to_thread(num_fetched, cluster, "decode") == before + 8
    assert ways(running) == ["encode"] * 8


@requests_of(prompts_of(2))
async def test_dead_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        ids = ids_of(cluster, *ENCODERS)
        cluster.kill("encode-0")
        running = asked.begin(router, ids)
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert ways(running).count("encode") == 4
    assert set(ways(running)) == {"encode", "failed"}


@requests_of(prompts_of(3))
async def test_encode_worker_killed_in_its_calls_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        with stopped(cluster, "encode-0"):
            running = asked.begin(router, ids_of(cluster, "encode-0"))
            await until(lambda: any(each.is_accepted for each in running))
            cluster.kill("encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert set(ways(running)) == {"failed"}


@requests_of(prompts_of(4))
async def test_silent_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        with stopped(cluster, "encode-0"):
            running = asked.begin(router, ids_of(cluster, "encode-0"))
            await asked.check(running)
    assert set(ways(running)) <= {"failed"}


@requests_of(prompts_of(5))
async def test_encode_worker_killed_after_encoding_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, "encode-0"))
        await until(lambda: "encode" in ways(running))
        cluster.kill("encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)


@requests_of(prompts_of(6))
async def test_draining_encode_worker_costs_no_request(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        ids = ids_of(cluster, *ENCODERS)
        running = asked.begin(router, ids)
        await until(lambda: "encode" in ways(running))
        await drain(cluster, "encode-0")
        await asked.check(running)
        await until_nothing_is_held(cluster)


@requests_of(prompts_of(7))
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


@requests_of(prompts_of(8))
async def test_prefill_worker_encodes_without_encode_workers(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        for name in ENCODERS:
            cluster.kill(name)
        running = asked.begin(router)
        await asked.check(running)
        await until_nothing_is_held(cluster)


@requests_of(prompts_of(9))
async def test_flushed_redis_costs_no_request(cluster, llava, asked):
    redis = connect(cluster.redis_url)
    async with router_of(cluster, llava) as router:
        running = asked.begin(router, ids_of(cluster, *ENCODERS))
        await redis.flushall()
        await asked.check(running)
        await until_nothing_is_held(cluster)
    await redis.aclose()


def shown_again(seed: int) -> list[Given]:
    """Prompts that no worker has cached: with one image, and with it and another one."""
    known, texts = image(seed), [words(9, seed + i) for i in range(3)]
    return [
        (f"{texts[0]} {IMAGE_TOKEN}", (known,)),
        (f"{texts[1]} {IMAGE_TOKEN} {texts[2]} {IMAGE_TOKEN}", (known, image(seed + 1))),
    ]


@requests_of(prompts_of(14) + shown_again(430)[:1])
async def test_lost_redis_costs_no_request_and_no_output(cluster, llava, asked):
    assert cluster.redis is not None
    *requests, late = asked.requests
    ids = ids_of(cluster, *ENCODERS)
    async with router_of(cluster, llava) as router:
        running = [Running(router.lifecycle(each, ids)) for each in requests]
        await until(lambda: any(each.is_accepted for each in running))
        cluster.redis.stop()
        try:
            running.append(Running(router.lifecycle(late, ids)))
            await asked.check(running)
            await until_nothing_is_held(cluster)
        finally:
            cluster.redis.start()
    assert ways(running) == ["encode"] * 9
    prompts = [request.prompt for request in asked.requests]
    async with router_of(cluster, llava) as router:  # it knows what the new Redis tells it
        await until(lambda: all(holds_outputs(router, prompt, "encode") for prompt in prompts))
        await until(lambda: all(holds_outputs(router, prompt, "prefill") for prompt in prompts))


def holds_outputs(router: Router, prompt: Prompt, role: str) -> bool:
    """Returns whether the router knows workers of the role with all encoder outputs of a prompt."""
    found = [c.cached_inputs for c in router.fleet.candidates(prompt) if c.role == role]
    return {index for inputs in found for index in inputs} == set(range(len(prompt.images)))


@requests_of(shown_again(410))
async def test_drained_decode_worker_hands_over_encoded_images(cluster, llava, asked):
    await check_decode_worker_leaving(cluster, llava, asked, signal.SIGTERM)


@requests_of(shown_again(420))
async def test_encoded_images_survive_killed_decode_worker(cluster, llava, asked):
    await check_decode_worker_leaving(cluster, llava, asked, signal.SIGKILL)


async def check_decode_worker_leaving(
    cluster: LocalCluster, llava: Model, asked: Asked, signum: int
) -> None:
    """Signals the decode worker in the middle of an answer about a cached and a new image."""
    first, second = asked.requests
    ids = ids_of(cluster, "encode-0")
    async with router_of(cluster, llava) as router:
        running = [Running(router.lifecycle(first, ids))]
        await running[0].task
        running.append(Running(router.lifecycle(second, ids)))
        await until(lambda: len(running[1].tokens) > 3)
        cluster.kill(name_of(cluster, running[1].lifecycle.placement.decode), signum)
        await asked.check(running)
        await until_nothing_is_held(cluster)
    assert running[1].usage.num_migrations == 1
    assert set(ways(running[1:])) == {"cached_remote", "encode"}


# The router's process, which places requests itself.


@pytest.fixture
def other_router(cluster: LocalCluster, llava: Model) -> Iterator[SecondRouter]:
    with second_router(cluster, model=llava.path, admission="none") as other:
        yield other


@pytest.fixture
def questions(llava: Model) -> list[Question]:
    """Two images each, of which the first is the same."""
    return [question_of(llava.path, seed, image(500)) for seed in range(510, 520)]


async def test_encoded_images_survive_their_router(cluster, other_router, questions):
    async with AsyncClient([cluster.address, other_router.address]) as client:
        cached, *new = questions
        assert cached.is_answer(await cached.begin(client).token_ids())
        before = await asyncio.to_thread(num_fetched_by_all, cluster)
        generations = [question.begin(client) for question in new]
        answering = [asyncio.create_task(each.token_ids()) for each in generations]
        await until_observed(lambda: num_fetched_by_all(cluster) > before)
        cluster.kill("router")
        answers = await asyncio.gather(*answering)
    assert all(map(Question.is_answer, new, answers))
    assert any(each.num_resumed for each in generations)
    await until_nothing_is_held(cluster)


def trace_root(collector: Collector, request_id: str) -> ReceivedSpan:
    return collector.trace_of(request_id, "generate")[0]


def test_router_encodes_images_of_queued_prompts_elsewhere(cluster, llava, collector):
    questions = [question_of(llava.path, seed) for seed in range(200, 208)]
    before = num_inputs(cluster, "encode")
    ids = [f"queued-{index}" for index in range(len(questions))]
    with Client(cluster.address) as client, ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(Question.ask, questions, repeat(client), ids))
    assert all(map(Question.is_answer, questions, answers))
    assert num_inputs(cluster, "encode") > before
    roots = [trace_root(collector, request_id) for request_id in ids]
    traced = {span.trace_id for span in named(collector.spans, "encode")}
    # The client, in threads of the test's process, delays the end of each answer.
    longest = max((root for root in roots if root.trace_id in traced), key=lambda s: s.seconds)
    longest_id = longest["baton.request.id"]
    spans = collector.trace_of(longest_id, *ENCODED_ELSEWHERE, is_whole=True)
    check_tree(spans)
    assert share_told(spans) >= 0.98
    (call,) = named(spans, "encode.call")
    (encoding,) = named(spans, "encode")
    assert call.service == "baton-encode"
    assert encoding["baton.worker"] == call["baton.worker"] in ids_of(cluster, *ENCODERS)
    assert encoding["baton.encode.num_tokens"] == TOKENS_PER_IMAGE
    assert encoding["baton.encode.num_bytes"] > 0
    assert not encoding["baton.encode.was_cached"]
