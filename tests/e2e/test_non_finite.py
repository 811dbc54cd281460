"""Requests whose logits are not finite, between real workers: each fails once, with its type, and
the next request of its prompt's beginning is right."""

import shutil
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import NonFiniteError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import greedy, prompt_of, save_checkpoint
from tests.support.cluster.scraped import scrape_all, total
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS
from tests.support.engine.overflow import OVERFLOWING, make_overflow
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

PROMPT = prompt_of(120, seed=5)
BROKEN = [*PROMPT[:100], OVERFLOWING, *PROMPT[100:]]
ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    original, folder = (tmp_path_factory.mktemp(name) for name in ("original", "overflowing"))
    save_checkpoint("llama", original)
    shutil.copytree(original, folder, dirs_exist_ok=True)
    make_overflow(folder)
    return str(folder)


@pytest.fixture(scope="module")
def cluster(model) -> Iterator[LocalCluster]:
    flags = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "num_blocks": 256}
    with LocalCluster(
        model, num_prefill=2, worker_flags=flags, router_flags=HANDOFFS, http_port=0
    ) as running:
        yield running


@pytest.fixture
async def client(cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as open_client:
        yield open_client


def num_failed(cluster: LocalCluster, role: str) -> float:
    return total(scrape_all(cluster), "baton_non_finite_requests_total", role=role)


async def until_counted(cluster: LocalCluster, role: str, number: float) -> None:
    """A process answers scrapes within a second alike."""
    await until_observed(lambda: num_failed(cluster, role) == number, what="the count")


def num_logged(cluster: LocalCluster, text: str) -> int:
    return sum(process.log_path.read_text().count(text) for process in cluster.processes)


async def test_prefill_fails_once_and_leaves_prefix_right(client, cluster, model):
    """On one of two workers: another would compute the same."""
    before = num_failed(cluster, "prefill")
    with pytest.raises(NonFiniteError, match="has NaN or infinite logits at position 120"):
        await client.generate(BROKEN, ANSWER).token_ids()
    await until_counted(cluster, "prefill", before + 1)
    assert await client.generate(PROMPT, ANSWER).token_ids() == greedy(model, PROMPT, 8)
    await until_nothing_is_held(cluster)
    assert num_logged(cluster, "at position 120;") == 1


async def test_decode_fails_after_tokens_and_leaves_prefix_right(client, cluster, model):
    """The first token is forced to be the one that overflows."""
    forced = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias=((OVERFLOWING, 100.0),))
    before = num_failed(cluster, "decode")
    with pytest.raises(NonFiniteError, match="at position 120"):
        await client.generate(PROMPT, forced).token_ids()
    await until_counted(cluster, "decode", before + 1)
    assert await client.generate(PROMPT, ANSWER).token_ids() == greedy(model, PROMPT, 8)
    await until_nothing_is_held(cluster)


async def test_broken_request_is_a_server_error_over_http(cluster):
    body = {"model": cluster.model, "prompt": BROKEN, "max_tokens": 4}
    async with httpx.AsyncClient(base_url=cluster.http_address, timeout=30) as http:
        response = await http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (
        500,
        "server_error",
        "non_finite",
    )
    assert "has NaN or infinite logits" in error["message"]
