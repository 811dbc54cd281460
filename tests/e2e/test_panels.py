"""Every query of every dashboard, and every rule, asked of a real Prometheus that watches a real
cluster under load."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Image
from baton.client.generation import AsyncGeneration
from baton.sampling import SamplingParams
from tests.support.cluster.prometheus import Prometheus, prometheus
from tests.support.engine.images import IMAGE_TOKEN, image, words
from tests.support.repository import ROOT
from tests.support.router.images import encoded

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(180)]

BOARDS = sorted((ROOT / "helm" / "baton" / "dashboards").glob("*.json"))
# Of it only an encode pool has data.
ENCODE_POOL = "encode-pool"
# In place of what Grafana fills in.
FILLED_IN = {"$__rate_interval": "20s", "$instance": ".*", "$model": ".*"}
TIMEOUT = 60.0
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def queries(*boards: Path) -> Iterator[tuple[str, str]]:
    """All that are asked of Prometheus: the panel's name and the expression."""
    for path in boards:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if target["datasource"]["type"] == "prometheus":
                    expression = target["expr"]
                    for name, value in FILLED_IN.items():
                        expression = expression.replace(name, value)
                    yield f"{path.stem}: {panel['title']}", expression


Request = Callable[[AsyncClient, int, int], AsyncGeneration]


def with_text(client: AsyncClient, line: int, number: int) -> AsyncGeneration:
    """A prompt that has something in common with the others."""
    text = f"def common(prefix):\n    return prefix\n\n\ndef f{line}_{number}(x):\n" * 3
    return client.generate(text, PARAMS)


def with_image(client: AsyncClient, line: int, number: int) -> AsyncGeneration:
    """A prompt with an image of its own."""
    seed = 100_000 * line + number
    text = f"{words(40, seed)} {IMAGE_TOKEN}"
    return client.generate(text, PARAMS, images=[Image(encoded(image(seed)))])


@asynccontextmanager
async def load(cluster: LocalCluster, request: Request = with_text):
    """Requests, one after another in four lines."""

    async def follow(client: AsyncClient, line: int) -> None:
        for number in range(10_000):
            await request(client, line, number).text()

    async with AsyncClient(cluster.address) as client:
        lines = [asyncio.create_task(follow(client, line)) for line in range(4)]
        try:
            yield
        finally:
            for task in lines:
                task.cancel()
            ended = await asyncio.gather(*lines, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


def shows_something(watching: Prometheus, expression: str) -> bool:
    return any(not math.isnan(float(s["value"][1])) for s in watching.query(expression))


def unevaluated(watching: Prometheus) -> list[str]:
    return [rule["name"] for rule in watching.rules() if rule["health"] == "unknown"]


async def until_all_show_something(watching: Prometheus, asked: list[tuple[str, str]]) -> None:
    deadline, empty = time.monotonic() + TIMEOUT, asked
    while empty and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        empty = [
            (panel, expression)
            for panel, expression in empty
            if not await asyncio.to_thread(shows_something, watching, expression)
        ]
    assert not empty


async def test_panels_show_data_and_rules_evaluate(cluster: LocalCluster, tmp_path: Path) -> None:
    with prometheus(tmp_path, cluster.metrics_endpoints["router"]) as watching:
        recorded = [rule["name"] for rule in watching.rules() if rule["type"] == "recording"]
        asked = [
            *queries(*(path for path in BOARDS if path.stem != ENCODE_POOL)),
            *((f"rule: {name}", name) for name in recorded),
        ]
        assert len(asked) > 50
        async with load(cluster):
            await until_all_show_something(watching, asked)
            deadline = time.monotonic() + TIMEOUT
            while await asyncio.to_thread(unevaluated, watching):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)
        assert {rule["health"] for rule in watching.rules()} == {"ok"}
        targets = watching.targets()
        scraped = {target["labels"]["instance"] for target in targets}
        assert scraped == set(cluster.metrics_endpoints.values())
        assert {target["health"] for target in targets} == {"up"}


async def test_encode_pool_panels_show_data_of_images(
    pictured: LocalCluster, tmp_path: Path
) -> None:
    with prometheus(tmp_path, pictured.metrics_endpoints["router"]) as watching:
        (board,) = (path for path in BOARDS if path.stem == ENCODE_POOL)
        async with load(pictured, with_image):
            await until_all_show_something(watching, list(queries(board)))
