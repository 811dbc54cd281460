"""Two live workers with one id: both say so, and so do the router and `baton doctor`; the first one
is served all the time, whatever becomes of the second."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from baton.cli.checks.cluster import cluster as checks
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.client.client import Client
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.started import start
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = prompt_of(40, seed=9)


@contextmanager
def namesake(cluster: LocalCluster, folder: Path) -> Iterator[Process]:
    """A decode worker with the id of the cluster's, killed in the end."""
    port = free_port(set())
    settings = {"redis_url": cluster.redis_url, "model": "tiny", "worker_id": "decode-0"}
    worker = Process("namesake", "decode", port, settings, admin_port=free_port({port}))
    try:
        start(worker, folder, lambda: "is held by" in worker.log_path.read_text())
        yield worker
    finally:
        worker.signal(signal.SIGKILL)


def served(client: Client) -> list[int]:
    tokens = client.generate(PROMPT, SHORT).token_ids()
    assert is_greedy(locate("tiny"), PROMPT, tokens)
    return tokens


def test_processes_tell_of_two_workers_with_one_id(cluster, tmp_path):
    first = cluster.process("decode-0")
    with (
        Client(cluster.address, admin_address=cluster.admin_address) as client,
        namesake(cluster, tmp_path) as second,
    ):
        addresses = first.endpoint, second.endpoint
        for process in (first, second, cluster.process("router")):
            told = partial(is_told, process, *addresses)
            wait_until(told, what=f"a line of {process.name}")
        reason = client.get_info().refused_records["decode-0"]
        assert all(address in reason for address in addresses)
        findings = list(checks(cluster.admin_address, None, ""))
        assert any(second.endpoint in finding.text for finding in findings)


@pytest.mark.parametrize(
    "ending", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_first_worker_is_served_while_namesake_ends(cluster, tmp_path, ending):
    first = cluster.process("decode-0")
    with Client(cluster.address, admin_address=cluster.admin_address) as client:
        with namesake(cluster, tmp_path) as second:
            wait_until(lambda: "decode-0" in client.get_info().refused_records, what="two workers")
            served(client)
            second.signal(ending)
            wait_until(lambda: not second.is_running, what="the end of the second worker")
            for _ in range(5):
                served(client)
        wait_until(lambda: not client.get_info().refused_records, what="one worker of the id")
        served(client)
        assert [w.endpoint for w in client.list_workers() if w.id == "decode-0"] == [first.endpoint]


def is_told(process: Process, *addresses: str) -> bool:
    """Whether a line of its log has both addresses."""
    lines = process.log_path.read_text().splitlines()
    return any(all(address in line for address in addresses) for line in lines)
