"""Workers of one model name with other weights: a stream never continues on them."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client
from baton.errors import UnavailableError
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of, save_edited
from tests.support.cluster.worker_beside import worker_beside

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped model with a few rows of a matrix changed, as new tokens are trained."""
    folder = tmp_path_factory.mktemp("edited") / "tiny"
    save_edited(folder, num_rows=25)
    return str(folder)


@pytest.fixture(scope="module")
def mixed(cluster: LocalCluster, edited: str) -> Iterator[LocalCluster]:
    """The shape `single` beside two workers with the edited weights."""
    model = f"tiny={edited}"
    with (
        worker_beside(cluster, "prefill", model=model),
        worker_beside(cluster, "decode", model=model),
    ):
        yield cluster


def model_of(worker: str, edited: str) -> str:
    return TINY if worker in ("prefill-0", "decode-0") else edited


async def test_prompt_is_computed_by_the_weights_that_answer(mixed, client, edited):
    """Their KV is not exchanged, however few values differ."""
    for seed in range(8):
        prompt = prompt_of(40, seed=seed)
        generation = client.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        token_ids = await generation.token_ids()
        placement = (await generation.wait_accepted()).placement
        used = {w for w in (placement.prefill_worker, placement.decode_worker) if w}
        (model,) = {model_of(worker, edited) for worker in used}
        assert is_greedy(model, prompt, token_ids)


async def test_stream_ends_when_other_weights_alone_are_left(mixed, client: AsyncClient, edited):
    prompt, received = prompt_of(40, seed=20), list[int]()
    generation = client.generate(prompt, LONG)
    worker = (await generation.wait_accepted()).placement.decode_worker
    while model_of(worker, edited) == edited:  # that one is not this test's to kill
        generation = client.generate(prompt, LONG)
        worker = (await generation.wait_accepted()).placement.decode_worker

    async def read() -> None:
        async for chunk in generation:
            received.extend(chunk.token_ids)
            mixed.kill(worker)

    try:
        with pytest.raises(UnavailableError, match="other weights than the answer began with"):
            await read()
    finally:
        mixed.restart(worker)
    assert received
    assert is_greedy(TINY, prompt, received)


def test_other_weights_are_told_to_operators_once(mixed):
    """However many requests they serve, and workers have them."""
    params = SamplingParams(max_tokens=4)
    with Client(mixed.address, admin_address=mixed.admin_address) as client:
        known = {worker.id for worker in client.list_workers() if worker.role == "prefill"}
        for seed in range(12):
            client.generate(prompt_of(40, seed=seed), params).token_ids()
    (prefill,) = known - {"prefill-0"}
    metrics = httpx.get(f"http://{mixed.metrics_endpoints['router']}/metrics").text
    assert 'baton_distinct_weights{model="tiny"} 2.0' in metrics
    log = mixed.process("router").log_path.read_text().splitlines()
    (warning,) = [line for line in log if prefill in line and "serve different weights" in line]
    assert "workers of model 'tiny' serve different weights" in warning
    command = [sys.executable, "-m", "baton", "doctor", "--json", "--admin", mixed.admin_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    (finding,) = [finding for finding in findings if "serve different ones" in finding["text"]]
    assert (finding["level"], finding["subject"], done.returncode) == ("fault", "weights", 1)
