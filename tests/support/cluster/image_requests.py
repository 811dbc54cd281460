"""Requests with images on the processes of a cluster, by the parts of a router that place requests
and run them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import cycle
from typing import Any

import pytest
from PIL import Image

from baton.cli.local.local_cluster import LocalCluster
from baton.cluster.redis.client import connect
from baton.engine import LLM, EngineConfig
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.grpc.channels import Channels
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.request import Request
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.routing.placement.placer import Placer
from baton_router.text.model_card import ModelCard, read_model_card
from tests.support.engine.images import IMAGE_TOKEN, image, is_greedy, words
from tests.support.router.encoding import EncodingPlacer
from tests.support.router.scripted import HANDOFFS
from tests.support.waiting import until

Given = tuple[str, tuple[Image.Image, ...]]
"""Text and images of a prompt."""

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
        self._engine = LLM.from_pretrained(path, config)

    def request(self, request_id: str, given: Given) -> Request:
        prompt = self._engine.prompt_with_images(*given)
        tokens, inputs = tuple(prompt.token_ids), prompt.encoder_inputs
        return Request(request_id, tokens, GREEDY, encoder_inputs=inputs)


class Router:
    """Parts of a router that place requests and run them."""

    def __init__(self, fleet: Fleet, model: Model) -> None:
        self.fleet = fleet
        self._model = model

    def lifecycle(
        self,
        request: Request,
        encoders: Sequence[str] | None = None,
        *,
        only_cached: bool = False,
        is_alone: bool = False,
    ) -> RequestLifecycle:
        """Returns the lifecycle of a request.

        Args:
            encoders: workers that encode the images, in turn, in every attempt; empty: none but
                the one that computes the prompt; None: those that the placement chooses.
            only_cached: these workers have the outputs cached.
            is_alone: the decode worker computes the prompt itself.
        """
        recovery = Recovery(request.request_id, RetryBudget())
        answer = Answer(request, self._model.card, time.monotonic())
        deadline = Deadline.after(60.0)
        placer = Placer(self.fleet, HANDOFFS)
        if encoders is not None:
            choices = tuple(
                EncoderChoice(index, each.length, worker, only_cached)
                for (index, each), worker in zip(
                    enumerate(request.encoder_inputs), cycle(encoders), strict=False
                )
            )
            placer = EncodingPlacer(self.fleet, lambda _: choices, is_alone=is_alone)
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


@asynccontextmanager
async def router_of(cluster: LocalCluster, model: Model) -> AsyncIterator[Router]:
    redis, channels = connect(cluster.redis_url), Channels()
    fleet = Fleet(redis, channels, model.card.tokenizer_hash)
    fleet.start()
    num_workers = len(cluster.processes) - 1
    try:
        await until(lambda: sum(m.is_serving for m in fleet.members) == num_workers, within=20.0)
        yield Router(fleet, model)
    finally:
        await fleet.stop()
        await channels.close()
        await redis.aclose()


class Asked:
    """Requests of one test, made while no event loop runs, and the check of their answers."""

    def __init__(self, model: Model, given: list[Given]) -> None:
        self.requests = [model.request(f"r{i}", each) for i, each in enumerate(given)]
        self._path, self._given = model.path, given

    def begin(
        self, router: Router, encoders: Sequence[str] | None = None, *, is_alone: bool = False
    ) -> list[Running]:
        """Begins all requests. Arguments as of `Router.lifecycle`."""
        return [
            Running(router.lifecycle(request, encoders, is_alone=is_alone))
            for request in self.requests
        ]

    async def check(self, running: list[Running]) -> None:
        """Waits until all have ended, and checks that their tokens are those of transformers."""
        await asyncio.gather(*(each.task for each in running))
        for each, given in zip(running, self._given, strict=True):
            assert len(each.tokens) == NUM_TOKENS
            assert is_greedy(self._path, *given, each.tokens), given[0]


def requests_of(given: list[Given]) -> pytest.MarkDecorator:
    """Returns the mark of a test whose fixture `asked` has requests of these prompts."""
    return pytest.mark.parametrize("asked", [given], indirect=True, ids=[""])
