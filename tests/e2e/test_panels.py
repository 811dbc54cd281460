"""Every query of every dashboard, and every rule, asked of a real Prometheus that watches a real
cluster under load."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.prometheus import Prometheus, prometheus
from tests.support.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(180)]

BOARDS = ROOT / "helm" / "baton" / "dashboards"
# In place of what Grafana fills in.
FILLED_IN = {"$__rate_interval": "20s", "$instance": ".*", "$model": ".*"}
TIMEOUT = 60.0


def queries() -> Iterator[tuple[str, str]]:
    """All that are asked of Prometheus: the panel's name and the expression."""
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if target["datasource"]["type"] == "prometheus":
                    expression = target["expr"]
                    for name, value in FILLED_IN.items():
                        expression = expression.replace(name, value)
                    yield f"{path.stem}: {panel['title']}", expression


@asynccontextmanager
async def load(cluster: LocalCluster):
    """Requests, one after another in four lines, with prompts that have something in common."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    async def line(client: AsyncClient, number: int) -> None:
        for count in range(10_000):
            text = f"def common(prefix):\n    return prefix\n\n\ndef f{number}_{count}(x):\n" * 3
            await client.generate(text, params).text()

    async with AsyncClient(cluster.address) as client:
        lines = [asyncio.create_task(line(client, number)) for number in range(4)]
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


async def test_panels_show_data_and_rules_evaluate(cluster: LocalCluster, tmp_path: Path) -> None:
    with prometheus(tmp_path, cluster.metrics_endpoints["router"]) as watching:
        recorded = [rule["name"] for rule in watching.rules() if rule["type"] == "recording"]
        empty = [*queries(), *((f"rule: {name}", name) for name in recorded)]
        assert len(empty) > 50
        async with load(cluster):
            deadline = time.monotonic() + TIMEOUT
            while empty and time.monotonic() < deadline:
                await asyncio.sleep(1.0)
                empty = [
                    (panel, expression)
                    for panel, expression in empty
                    if not await asyncio.to_thread(shows_something, watching, expression)
                ]
            assert not empty
            while await asyncio.to_thread(unevaluated, watching):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.5)
        assert {rule["health"] for rule in watching.rules()} == {"ok"}
        targets = watching.targets()
        scraped = {target["labels"]["instance"] for target in targets}
        assert scraped == set(cluster.metrics_endpoints.values())
        assert {target["health"] for target in targets} == {"up"}
