"""Scheduling policies, drafters and KV connectors that a package outside of Baton declares."""

import pytest
from pydantic import ValidationError

from baton.engine.config import EngineConfig
from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from baton.worker.settings import WorkerSettings
from tests.support.engine.engines import assert_idle, load
from tests.support.repository import ROOT

PLUGINS = ROOT / "tests/support/plugins"
NUM_TOKENS = 12


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of examples is found by its metadata, as an installed one is."""
    monkeypatch.syspath_prepend(str(PLUGINS))


def test_policy_of_a_package_orders_requests(installed, checkpoints):
    engine = load(checkpoints["llama"], num_blocks=20, max_num_seqs=1, policy="last-come")
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for name in "abc":
        engine.core.add(EngineRequest(name, (5, 6, 7), params, 3))
    ended = []
    while engine.core.has_work:
        ended += [u.request_id for u in engine.core.step().updates if u.finish_reason is not None]
    assert ended == ["c", "b", "a"]


def test_drafter_of_a_package_changes_no_token(installed, checkpoints, oracle):
    path, prompt = checkpoints["llama"], [5, 6, 7, 7]
    engine = load(path, num_blocks=20, max_drafts=3, drafter="repeater")
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert result.token_ids == oracle(path, prompt, NUM_TOKENS)
    assert engine.core.scheduler.stats().num_drafted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("field", ["policy", "drafter"])
def test_unknown_plugin_is_refused_with_those_installed(field, installed):
    known = {"policy": "shortest-prefill, last-come", "drafter": "ngram, repeater"}[field]
    with pytest.raises(InvalidArgumentError, match=f"{field}: is 'lost'; .*{known}"):
        EngineConfig(**{field: "lost"})
    with pytest.raises(ValidationError, match=known):
        WorkerSettings(**{field: "lost"})


def test_unknown_connector_is_refused_with_those_installed(installed):
    with pytest.raises(ValidationError, match="nixl, cuda-ipc, proc-mem, sealed"):
        WorkerSettings(kv_connector="lost")
