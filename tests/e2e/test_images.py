"""Prompts with images on the processes of a cluster, by the parts of a router that place requests
and run them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
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
    save_llava,
    words,
)
from tests.support.router.scripted import HANDOFFS
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

Given = tuple[str, tuple[Image.Image, ...]]

NUM_TOKENS = 60
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS: list[Given] = [
    (f"{words(40, i)} {IMAGE_TOKEN} {words(30, i + 20)} {IMAGE_TOKEN}", (image(i), image(i + 1)))
    for i in range(6)
]


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

    def cached_tokens(self, given: Given, role: str) -> int:
        """Tokens of a prompt that the router knows to be cached by workers of a role."""
        prompt = self._model.request("", given).prompt
        return max(c.num_cached_tokens for c in self.fleet.candidates(prompt) if c.role == role)


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
    save_llava("llava_clip", folder)
    return Model(str(folder))


@pytest.fixture(scope="module")
def started(llava: Model) -> Iterator[LocalCluster]:
    flags = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "max_num_batched_tokens": 8}
    two = {"num_prefill": 2, "num_decode": 2}
    with LocalCluster(llava.path, **two, worker_flags=flags) as cluster:
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


def begun(router: Router, model: Model) -> list[Running]:
    requests = (model.request(f"r{i}", given) for i, given in enumerate(PROMPTS))
    return [Running(router.lifecycle(request)) for request in requests]


async def check_all(running: list[Running], model: Model) -> None:
    await asyncio.gather(*(each.task for each in running))
    expected = [greedy(model.path, *given, NUM_TOKENS) for given in PROMPTS]
    assert [tuple(each.tokens) for each in running] == expected


async def test_router_finds_equal_images_cached_after_restart(cluster, llava):
    text = f"{words(20, 1)} {IMAGE_TOKEN} {words(30, 2)}"
    given, other = (text, (image(11),)), (text, (image(12),))
    num_cached = (50 + TOKENS_PER_IMAGE) // 16 * 16
    async with router_of(cluster, llava) as router:
        first = Running(router.lifecycle(llava.request("a", given)))
        await first.task
        assert tuple(first.tokens) == greedy(llava.path, *given, NUM_TOKENS)
        assert first.usage.num_cached_prompt_tokens == 0
    async with router_of(cluster, llava) as router:
        for role in ("prefill", "decode"):
            await until(lambda role=role: router.cached_tokens(given, role) == num_cached)
            assert router.cached_tokens(other, role) == 16  # the text before the image
        for name, asked, num_hit in (("b", given, num_cached), ("c", other, 16)):
            again = Running(router.lifecycle(llava.request(name, asked)))
            await again.task
            assert tuple(again.tokens) == greedy(llava.path, *asked, NUM_TOKENS)
            assert again.usage.num_cached_prompt_tokens == num_hit
    await until_nothing_is_held(cluster)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_images_survive_killed_worker(cluster, llava, role):
    async with router_of(cluster, llava) as router:
        running = begun(router, llava)
        if role == "prefill":  # amid the prompts, which take it a hundred steps
            await until(lambda: any(each.is_accepted for each in running))
            killed = running[0].lifecycle.placement.prefill
        else:
            await until(lambda: all(len(each.tokens) > 3 for each in running))
            killed = running[0].lifecycle.placement.decode
        cluster.kill(name_of(cluster, killed))
        await check_all(running, llava)
        assert sum(each.usage.num_migrations for each in running) > 0


async def test_draining_decode_worker_hands_over_images(cluster, llava):
    async with router_of(cluster, llava) as router:
        running = begun(router, llava)
        await until(lambda: all(len(each.tokens) > 3 for each in running))
        leaving = running[0].lifecycle.placement.decode
        process = cluster.process(name_of(cluster, leaving))
        async with grpc.aio.insecure_channel(process.admin_endpoint) as channel:
            await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)
        await check_all(running, llava)
        assert running[0].usage.num_migrations == 1
