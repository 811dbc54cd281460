"""Every process of a cluster is replaced by one of another version under load, and no request
notices."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.cli.local.process import Process
from baton.client.client import AsyncClient, Client
from baton.sampling import SamplingParams
from baton.version import version
from tests.support.cluster import named_clusters, release
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.rolling import (
    Pools,
    Question,
    Tally,
    clear_question,
    is_busy,
    mixed_questions,
    under_load,
)
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.serving.otlp_receiver import Collector, ReceivedSpan, collecting

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(600)]

# Runs on when a decode worker has no more time.
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)

NUM_READERS = 6
NUM_LONG, APART_SECONDS = 6, 4.0
OLD, NEW = version(), release.VERSION


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder in which another version is installed."""
    packages = release.install(tmp_path_factory.mktemp("release"))
    assert release.version_in(packages) == f"baton {NEW}"
    assert OLD != NEW
    return packages


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return mixed_questions(100)


@pytest.fixture(scope="module")
def long() -> Question:
    return clear_question(LONG)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Gets the traces of what is started while it is there."""
    with collecting() as running:
        told = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": running.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_BSP_MAX_QUEUE_SIZE": "100000",
        }
        with patch.dict(os.environ, told):
            yield running


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_rolling_upgrade_under_load_loses_no_request(
    first, newer, collector, questions, long
):
    with named_clusters.rolling(worker_drain_s=1.0) as running:
        early, late = (of_role(running, role) for role in roles_from(first))
        async with under_load(running, questions, NUM_READERS) as tally:
            async with going_on(running, long) as answers:
                if first == "decode":
                    await upgrade(running, running.routers, newer, tally)
                await upgrade(running, early, newer, tally)
                check_gap(running)
                before = len(collector.spans)
                await tally.more(2 * NUM_READERS)
                check_gap(running)
                assert not named(collector.spans[before:], "kv.send"), "no pair has one version"
                await upgrade(running, late, newer, tally)
            if first == "prefill":
                await upgrade(running, running.routers, newer, tally)
            await tally.more(2 * NUM_READERS)
        assert tally.failures == {}
        assert answers
        assert set(answers) == {long.answer[0]}
        assert {w.version for w in listed(running)} == {NEW}
        await until_nothing_is_held(running.cluster)
        assert not is_busy(running.routers[1])
    print(f"\n{tally}; {len(answers)} long answers; seconds to the end: {running.drains}")
    check_transfers(collector.spans)
    # Some went on in a version other than that in which they began.
    went_on = [r for r in decoded_in(collector.spans).values() if r == {OLD, NEW}]
    print(f"{len(went_on)} requests were decoded in both versions")
    assert went_on


def roles_from(first: str) -> tuple[str, str]:
    return (first, "decode" if first == "prefill" else "prefill")


def of_role(running: Pools, role: str) -> list[Process]:
    return [process for process in running.workers if process.role == role]


async def upgrade(running: Pools, processes: list[Process], packages: Path, tally: Tally) -> None:
    """One after the other, as they are busy."""
    for process in processes:
        await running.replace(process, packages)
        await tally.more(NUM_READERS)


@asynccontextmanager
async def going_on(running: Pools, question: Question) -> AsyncIterator[list[tuple[int, ...]]]:
    """Long answers are being written for the length of the block; those that are done. They begin
    one after the other: if all ended at once, none might be in flight when the last decode worker
    of the old version is replaced."""
    answers: list[tuple[int, ...]] = []
    over = asyncio.Event()

    async def read(client: AsyncClient, delay: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), delay)
        while not over.is_set():
            generation = client.generate(list(question.prompt), question.params)
            answers.append(tuple(await generation.token_ids()))

    async with AsyncClient(running.addresses, timeout=120.0) as client, asyncio.TaskGroup() as all_:
        for i in range(NUM_LONG):
            all_.create_task(read(client, i * APART_SECONDS))
        try:
            yield answers
        finally:
            over.set()


def listed(running: Pools):
    with Client(running.routers[0].admin_endpoint) as admin:
        return admin.list_workers()


def check_gap(running: Pools) -> None:
    """No prefill worker is of a decode worker's version, and each router says what follows."""
    versions = {role: {w.version for w in listed(running) if w.role == role} for role in
                ("prefill", "decode")}  # fmt: skip
    assert sorted(map(sorted, versions.values())) == [[OLD], [NEW]]
    for router in running.routers:
        with Client(router.admin_endpoint) as admin:
            explained = admin.explain(prompt_of(200))
        assert explained.placement.prefill_worker == ""
        (prefills,), (decodes,) = versions["prefill"], versions["decode"]
        said = f"Prefill workers are of version {prefills}, decode workers of {decodes}"
        assert said in explained.reason


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def check_transfers(spans: list[ReceivedSpan]) -> None:
    """Blocks went from each version to itself, and between the two it was not even tried."""
    claims = {span.span_id: span for span in named(spans, "kv.transfer")}
    sent = named(spans, "kv.send")
    pairs = {(s.version, claims[s.parent_id].version) for s in sent if s.parent_id in claims}
    assert pairs == {(OLD, OLD), (NEW, NEW)}
    assert [c.reason for c in claims.values() if "version" in c.reason] == []


def decoded_in(spans: list[ReceivedSpan]) -> dict[str, set[str]]:
    """The versions in which each request was decoded."""
    found: dict[str, set[str]] = {}
    for span in named(spans, "decode"):
        found.setdefault(span.trace_id, set()).add(span.version)
    return found
