"""Containers of all roles are replaced, one after the other, under requests about texts and images,
over gRPC and HTTP, on connections that are kept: no request notices."""

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import cycle

import httpx
import pytest

from baton import AsyncClient, Image, Message, SamplingParams
from baton.errors import BatonError
from baton.models.shapes.drawings import held_out, questions
from tests.support.balancer import balanced
from tests.support.cluster.containers import Containers, containers_of
from tests.support.router.images import encoded

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(1800)]

MODEL = "shapes"
ROLES = {
    f"{kind}-{number}": role
    for kind, role in {
        "router": "router",
        "encode": "encode-worker",
        "prefill": "prefill-worker",
        "decode": "decode-worker",
    }.items()
    for number in (0, 1)
}
PROMPT = "Once upon a time there was"
MAX_TOKENS = 200
ANSWERS_WITHIN = 120.0

Ask = Callable[[], Awaitable[tuple[str, str]]]
"""Asks one question; returns the answer, and the right one."""


@pytest.fixture(scope="module")
def containers(podman, images) -> Iterator[Containers]:
    with containers_of(podman, images, ROLES, model=MODEL) as running:
        yield running


class Drawings:
    """Questions about drawings, with the right answers."""

    def __init__(self) -> None:
        drawn = [held_out(number)[0] for number in range(8)]
        self._asked = cycle(
            (encoded(drawing.image()), asked.text, asked.answer)
            for drawing in drawn
            for asked in questions(drawing)
            if asked.kind == "count"
        )

    def next(self) -> tuple[bytes, str, str]:
        return next(self._asked)


class Load:
    """Clients that ask one question after the other.

    Attributes:
        num_answered: questions that got the right answer, by client.
        encoders: workers that encoded images of gRPC clients.
        failures: what else they got.
    """

    def __init__(self, grpc: AsyncClient, http: httpx.AsyncClient) -> None:
        self.num_answered: Counter[str] = Counter()
        self.encoders: set[str] = set()
        self.failures: list[str] = []
        self._grpc = grpc
        self._http = http
        self._drawings = Drawings()
        self._text = ""
        self._asks: tuple[Ask, ...] = (
            self.text_over_grpc,
            self.image_over_grpc,
            self.text_over_http,
            self.image_over_http,
        )

    async def learn(self) -> None:
        """Asks for the text that an undisturbed cluster writes."""
        self._text, _ = await self.text_over_grpc()
        assert self._text

    async def text_over_grpc(self) -> tuple[str, str]:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        return await self._grpc.generate(PROMPT, params).text(), self._text

    async def image_over_grpc(self) -> tuple[str, str]:
        file, question, expected = self._drawings.next()
        params = SamplingParams(max_tokens=24, temperature=0)
        asked = [Message("user", [Image(file), question])]
        generation = self._grpc.generate(asked, params)
        text = await generation.text()
        placement = (await generation.wait_accepted()).placement
        self.encoders |= {each.worker for each in placement.encoders}
        return text.strip(), expected

    async def text_over_http(self) -> tuple[str, str]:
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await self._post("/v1/completions", body)
        return answer["text"], self._text

    async def image_over_http(self) -> tuple[str, str]:
        file, question, expected = self._drawings.next()
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [image, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        answer = await self._post("/v1/chat/completions", body)
        return answer["message"]["content"].strip(), expected

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        answer = await self._http.post(path, json={"model": MODEL, **body})
        answer.raise_for_status()
        return answer.json()["choices"][0]

    async def repeat(self, ask: Ask, over: asyncio.Event) -> None:
        while not over.is_set():
            try:
                given, expected = await ask()
            except (BatonError, httpx.HTTPError) as error:
                self.failures.append(f"{ask.__name__}: {type(error).__name__}: {error}")
                continue
            if given == expected:
                self.num_answered[ask.__name__] += 1
            else:
                self.failures.append(f"{ask.__name__}: {given!r}; expected {expected!r}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        over = asyncio.Event()
        tasks = [asyncio.create_task(self.repeat(ask, over)) for ask in self._asks]
        try:
            await self.more()
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)

    async def more(self) -> None:
        """Returns once every client has got two more answers."""
        before = {ask.__name__: self.num_answered[ask.__name__] for ask in self._asks}
        async with asyncio.timeout(ANSWERS_WITHIN):
            while any(self.num_answered[name] < number + 2 for name, number in before.items()):
                assert not self.failures, self.failures[:3]
                await asyncio.sleep(0.1)


async def test_containers_rolled_under_load_lose_no_request(containers):
    ports = {
        name: int(containers.address_of(name, "http_port").rpartition(":")[2])
        for name in containers.routers
    }
    addresses = [containers.address_of(name) for name in containers.routers]
    async with (
        balanced([*ports.values()]) as (balancer, address),
        AsyncClient(addresses, timeout=ANSWERS_WITHIN) as grpc,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=ANSWERS_WITHIN) as http,
    ):
        load = Load(grpc, http)
        await load.learn()
        async with load.running():
            for name in ROLES:
                stopped = asyncio.create_task(asyncio.to_thread(containers.stop, name))
                if name in ports:  # as an endpoint's removal, which comes after its signal
                    await asyncio.sleep(0.2)
                    balancer.ready.remove(ports[name])
                assert await stopped == 0
                await load.more()
                await asyncio.to_thread(containers.start_again, name)
                if name in ports:
                    balancer.ready.append(ports[name])
                await load.more()
    print(f"\n{load.num_answered}, images by {load.encoders}")
    assert load.failures == []
    assert load.encoders & {name for name, role in ROLES.items() if role == "encode-worker"}
