"""A model named by its hub id, found in the hub's own cache without a network."""

import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from baton import Client, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.models import locate
from tests.support.cluster.checkpoints import greedy

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.e2e
@pytest.mark.nightly
def test_model_named_by_hub_id_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(
        locate("tiny"),
        cached / "snapshots" / REVISION,
        ignore=shutil.ignore_patterns("*.py", "__pycache__"),
    )
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # This process, which checks the model first, has read the variables already.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    prompt = [5, 6, 7, 8, 9]
    with (
        LocalCluster(
            model="someone/small", worker_flags={"num_blocks": 64}, http_port=0
        ) as cluster,
        Client(cluster.address) as client,
    ):
        assert client.get_model().name == "small"
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert client.generate(prompt, params).token_ids() == greedy(locate("tiny"), prompt, 20)
        url = cluster.process("router").http_address
        for name in ("small", "someone/small"):
            assert client.get_model(name).name == "small"
            generation = client.generate(prompt, params, model=name)
            assert len(generation.token_ids()) == 20
            assert generation.accepted is not None
            assert generation.accepted.model == "small"
            assert httpx.get(f"{url}/v1/models/{name}").json()["id"] == "small"
            body = {"model": name, "prompt": prompt, "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body)
            assert answer.json()["model"] == "small", answer.text
