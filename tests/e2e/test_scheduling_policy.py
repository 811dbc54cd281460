"""A scheduling policy of a package outside of Baton, in a cluster."""

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_cluster_serves_with_the_policy_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = str(ROOT / "tests/support/plugins")
    monkeypatch.setenv("PYTHONPATH", plugins, prepend=":")
    monkeypatch.syspath_prepend(plugins)
    flags = {"device": "cpu", "num_blocks": 64, "policy": "last-come"}
    prompt = prompt_of(40, seed=3)
    with LocalCluster(worker_flags=flags) as cluster, Client(cluster.address) as client:
        assert "last-come" in cluster.process("decode-0").command
        tokens = client.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids()
    assert is_greedy(locate("tiny"), prompt, tokens)
