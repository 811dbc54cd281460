"""Prompts with images on the processes of a cluster, by the parts of a router that place requests
and run them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from baton.cli.local_cluster import LocalCluster
from baton.cluster.redis import connect
from baton.engine import Engine, EngineConfig
from baton.sampling import SamplingParams
from baton.serving.channels import Channels
from baton.serving.deadline import Deadline
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from baton_router.fleet.fleet import Fleet
from baton_router.intake.model_card import ModelCard, read_model_card
from baton_router.lifecycle.answer import Answer
from baton_router.lifecycle.client_wire import to_message
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.placement.placer import Placer
from baton_router.request import Request
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import name_of, restored
from tests.support.engine.images import (
    IMAGE_TOKEN,
    TOKENS_PER_IMAGE,
    greedy,
    image,
    save_vision_language,
    words,
)
from tests.support.router.scripted import HANDOFFS
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

Given = tuple[str, tuple[Image.Image, ...]]

NUM_TOKENS = 100
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts_of(seed: int) -> list[Given]:
    """Prompts with two images each, of which no worker has anything cached."""
    seeds = range(10 * seed, 10 * seed + 4)
    texts = [f"{words(40, i)} {IMAGE_TOKEN} {words(30, -i)} {IMAGE_TOKEN}" for i in seeds]
    return [(text, (image(i), image(i + 4))) for i, text in zip(seeds, texts, strict=True)]


class Model:
    """Checkpoint, its card in the router, and an engine that makes prompts of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.card: ModelCard = read_model_card(path)
        config = EngineConfig(device="cpu", dtype="float32", num_blocks=16)
        self._engine = Engine.from_pretrained(path, config)

    def request(self, request_id: str, given: Given) -> Request:
        prompt = self._engine.prompt_with_images(*given)
        tokens, inputs = tuple(prompt.token_ids), prompt.encoder_inputs
        return Request(request_id, tokens, GREEDY, encoder_inputs=inputs)


class Router:
    """Parts of a router that place requests and run them."""

    def __init__(self, fleet: Fleet, model: Model) -> None:
        self.fleet = fleet
        self._model = model

    def lifecycle(self, request: Request) -> RequestLifecycle:
        recovery = Recovery(request.request_id, RetryBudget())
        answer = Answer(request, self._model.card, time.monotonic())
        deadline = Deadline.after(60.0)
        placer = Placer(self.fleet, HANDOFFS)
        return RequestLifecycle(request, self.fleet, placer, answer, recovery, deadline)

    def knows(self, request: Request, role: str, num_cached: int) -> bool:
        """Whether it knows so many tokens of a prompt to be cached by a worker of the role."""
        candidates = self.fleet.candidates(request.prompt)
        return num_cached == max(c.num_cached_tokens for c in candidates if c.role == role)


class Running:
    """Request that runs, and what its client has been told."""

    def __init__(self, lifecycle: RequestLifecycle) -> None:
        self.lifecycle = lifecycle
        self.is_accepted = False
        self.tokens: list[int] = []
        self.usage: Any = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with aclosing(self.lifecycle.run()) as events:
            async for each in events:
                event = to_message(each)
                self.is_accepted |= event.HasField("accepted")
                self.tokens += event.tokens.token_ids
                if event.HasField("finished"):
                    self.usage = event.finished.usage


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("llava")
    save_vision_language("llava_clip", folder)
    return Model(str(folder))


@pytest.fixture(scope="module")
def started(llava: Model) -> Iterator[LocalCluster]:
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256}
    slow = {"max_num_batched_tokens": 2}  # a prompt takes more than fifty steps
    two = {"num_prefill": 2, "num_decode": 2}
    with LocalCluster(llava.path, **two, worker_flags=flags, prefill_flags=slow) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: LocalCluster) -> LocalCluster:
    return restored(started)


@asynccontextmanager
async def router_of(cluster: LocalCluster, model: Model) -> AsyncIterator[Router]:
    redis, channels = connect(cluster.redis_url), Channels()
    fleet = Fleet(redis, channels, model.card.tokenizer_hash)
    fleet.start()
    try:
        await until(lambda: len([m for m in fleet.members if m.is_serving]) == 4, within=20.0)
        yield Router(fleet, model)
    finally:
        await fleet.stop()
        await channels.close()
        await redis.aclose()


class Asked:
    """Requests of one test and their answers by transformers, made while no event loop runs."""

    def __init__(self, model: Model, given: list[Given]) -> None:
        self.requests = [model.request(f"r{i}", each) for i, each in enumerate(given)]
        self._expected = [greedy(model.path, *each, NUM_TOKENS) for each in given]

    def begin(self, router: Router) -> list[Running]:
        return [Running(router.lifecycle(request)) for request in self.requests]

    async def check(self, running: list[Running]) -> None:
        """Waits until all have ended, and checks their tokens."""
        await asyncio.gather(*(each.task for each in running))
        assert [tuple(each.tokens) for each in running] == self._expected


@pytest.fixture
def asked(request: pytest.FixtureRequest, llava: Model) -> Asked:
    return Asked(llava, request.param)


def asking(given: list[Given]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("asked", [given], indirect=True, ids=[""])


_TEXT = f"{words(20, 1)} {IMAGE_TOKEN} {words(30, 2)}"
_CACHED = (50 + TOKENS_PER_IMAGE) // 16 * 16


@asking([(_TEXT, (image(91),)), (_TEXT, (image(91),)), (_TEXT, (image(92),))])
async def test_router_finds_equal_images_cached_after_restart(cluster, llava, asked):
    first, again, other = asked.requests
    running = []
    async with router_of(cluster, llava) as router:
        running.append(Running(router.lifecycle(first)))
        await running[0].task
    async with router_of(cluster, llava) as router:
        for role in ("prefill", "decode"):
            await until(partial(router.knows, again, role, _CACHED))
            assert router.knows(other, role, 16)  # the text before the image
        for request in (again, other):
            running.append(Running(router.lifecycle(request)))
            await running[-1].task
    await asked.check(running)
    assert [each.usage.num_cached_prompt_tokens for each in running] == [0, _CACHED, 16]
    await until_nothing_is_held(cluster)


@asking(prompts_of(1))
async def test_images_survive_killed_prefill_worker(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router)
        await until(lambda: any(each.is_accepted for each in running))
        accepted = next(each for each in running if each.is_accepted)
        cluster.kill(name_of(cluster, accepted.lifecycle.placement.prefill))
        await asked.check(running)
    assert accepted.usage.num_migrations > 0, "it was killed after the prompt"


@asking(prompts_of(2))
async def test_images_survive_killed_decode_worker(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router)
        await until(lambda: len(running[0].tokens) > 3)
        cluster.kill(name_of(cluster, running[0].lifecycle.placement.decode))
        await asked.check(running)
    assert running[0].usage.num_migrations > 0


@asking(prompts_of(3))
async def test_draining_decode_worker_hands_over_images(cluster, llava, asked):
    async with router_of(cluster, llava) as router:
        running = asked.begin(router)
        await until(lambda: len(running[0].tokens) > 3)
        process = cluster.process(name_of(cluster, running[0].lifecycle.placement.decode))
        async with grpc.aio.insecure_channel(process.admin_endpoint) as channel:
            await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)
        await asked.check(running)
    assert running[0].usage.num_migrations == 1
