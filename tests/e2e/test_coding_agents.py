"""Coding agents do a task of two tool calls, set up as the page on coding agents says.

The model (`tests/support/tool_model`) reads the task out of their prompts by its chat template.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.local.local_cluster import LocalCluster
from tests.support.agents import AGENTS, Agent, ask
from tests.support.agents.recording import Recorder, last_turn, recording_of
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.tool_model import save_agent_model

# The first test of an agent installs it.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = save_agent_model(tmp_path_factory.mktemp("models") / "tool_model")
    with LocalCluster(model=str(folder), http_port=0) as cluster:
        yield cluster


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
async def test_agent_copies_file_in_two_tool_calls(served, agent: Agent, tmp_path):
    (tmp_path / "notes.txt").write_text("Oslo is windy\n")
    async with Recorder(served.process("router").http_port or 0) as recorder:
        printed = await ask(agent, tmp_path, recorder.address, Path(served.model).name)
    assert (tmp_path / "copy.txt").read_text() == "Oslo is windy\n"
    assert "The text is: Oslo is windy" in printed
    await until_nothing_is_held(served)
    sent = tmp_path / "sent.json"
    sent.write_text(json.dumps(last_turn(recorder.requests()), indent=1, sort_keys=True) + "\n")
    assert sent.read_text() == recording_of(agent.program).read_text(), (
        f"{agent.title} sends another request than the one recorded: copy {sent}"
    )
