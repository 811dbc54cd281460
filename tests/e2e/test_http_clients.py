"""Real clients of OpenAI's and Anthropic's APIs complete tasks of their own against a router.

Each runs from `tests/support/http_clients` in an environment of its own, with pinned versions. The
model has learned to call tools (`tests/support/tool_model`), in the format of its chat template.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.http_clients import program_of
from tests.support.tool_model import FORMATS, save_tool_model

# The first test of a client installs it.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

GREETING = "Hello! How can I help you?"
WEATHER = ["get_weather", {"city": "Paris"}]
SUM = ["add", {"a": 12, "b": 30}]
ANSWER = "The weather in Paris is sunny, 21 degrees. The sum is 42."
LOOP = {"calls": [WEATHER, SUM], "answer": ANSWER}
PERSON = {"name": "Anna", "age": 31}
PROVIDERS = ["openai", "openai_chat", "openai_compatible", "anthropic"]


@pytest.fixture(
    scope="module",
    params=[FORMATS[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in FORMATS[1:])],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """A cluster whose model writes tool calls in the format of the parameter."""
    folder = save_tool_model(request.param, tmp_path_factory.mktemp("models") / "tool_model")
    with LocalCluster(model=str(folder), http_port=0) as cluster:
        yield cluster


in_hermes = pytest.mark.parametrize("served", FORMATS[:1], indirect=True)


async def said(cluster: LocalCluster, client: str, task: str, *arguments: str) -> Any:
    """Returns what the task of a client prints, once the cluster holds nothing of it."""
    process = await asyncio.create_subprocess_exec(
        *await asyncio.to_thread(program_of, client),
        *(str(cluster.http_address), Path(cluster.model).name, task, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(240.0):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-4000:]
    await until_nothing_is_held(cluster)
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
async def test_openai_client_reads_text(served):
    assert await said(served, "openai", "text") == {
        "whole": GREETING,
        "streamed": GREETING,
        "finish_reason": "stop",
        "same_usage": True,
        "completion_tokens": 4,
        "models": ["tool_model"],
    }


@pytest.mark.slow
async def test_openai_client_calls_tools_to_the_answer(served):
    assert await said(served, "openai", "tools") == LOOP


@pytest.mark.slow
async def test_openai_client_streams_tool_calls(served):
    assert await said(served, "openai", "streamed_tools") == {**LOOP, "in_deltas": True}


@pytest.mark.slow
async def test_openai_client_forces_tool_calls(served):
    call = [["add", {"a": 7, "b": 8}]]
    expected = {"required": call, "named": call, "none": []}
    assert await said(served, "openai", "forced") == expected


@pytest.mark.slow
@in_hermes
async def test_openai_client_reads_responses(served):
    assert await said(served, "openai", "responses_text") == {
        "whole": GREETING,
        "streamed": GREETING,
        "kept": GREETING,
        "deleted": True,
        "first": "response.created",
        "last": "response.completed",
    }


@pytest.mark.slow
async def test_openai_client_calls_tools_by_responses(served):
    assert await said(served, "openai", "responses_tools") == LOOP


@pytest.mark.slow
@in_hermes
async def test_anthropic_client_reads_text(served):
    assert await said(served, "anthropic", "text") == {
        "whole": GREETING,
        "streamed": GREETING,
        "stop_reason": "end_turn",
        "same_usage": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tools", "streamed_tools"])
async def test_anthropic_client_calls_tools_to_the_answer(served, task):
    assert await said(served, "anthropic", task) == {**LOOP, "stop_reason": "end_turn"}


@pytest.mark.slow
async def test_anthropic_client_forces_tool_calls(served):
    call = [["add", {"a": 7, "b": 8}]]
    assert await said(served, "anthropic", "forced") == {"any": call, "tool": call}


@pytest.mark.nightly
@in_hermes
async def test_instructor_reads_objects_in_each_mode(served):
    objects = await said(served, "instructor", "structured")
    # A schema within the prompt is beyond the model, but what it writes has its form.
    in_prompt = objects.pop("json_mode")
    assert {name: type(value) for name, value in in_prompt.items()} == {"name": str, "age": int}
    assert objects == {"tool_call": PERSON, "json_schema_mode": PERSON}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "task",
    ["tools", "streamed_tools", "responses_tools", "responses_streamed_tools"],
)
async def test_openai_agent_ends_after_two_tool_calls(served, task):
    assert await said(served, "openai_agents", task) == LOOP


@pytest.mark.nightly
@pytest.mark.parametrize(
    "task",
    ["tools", "streamed_tools", "responses_tools", "responses_streamed_tools"],
)
async def test_agent_in_javascript_ends_after_two_tool_calls(served, task):
    assert await said(served, "openai_agents_js", task) == LOOP


@pytest.mark.nightly
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("task", ["tools", "streamed_tools"])
async def test_ai_sdk_calls_tools_to_the_answer(served, task, provider):
    assert await said(served, "vercel_ai", task, provider) == LOOP


@pytest.mark.nightly
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("task", ["turns", "streamed_turns"])
@in_hermes
async def test_ai_sdk_continues_a_conversation(served, task, provider):
    assert await said(served, "vercel_ai", task, provider) == {"greeting": GREETING, **LOOP}


@pytest.mark.nightly
@pytest.mark.parametrize("client", ["litellm", "langchain_openai", "llama_index"])
@in_hermes
async def test_library_reads_text(served, client):
    assert await said(served, client, "text") == {"whole": GREETING, "streamed": GREETING}


@pytest.mark.nightly
@pytest.mark.parametrize("client", ["litellm", "langchain_openai", "llama_index"])
async def test_library_calls_tools_to_the_answer(served, client):
    assert await said(served, client, "tools") == LOOP


@pytest.mark.nightly
async def test_litellm_streams_tool_calls(served):
    assert await said(served, "litellm", "streamed_tools") == LOOP


@pytest.mark.nightly
@pytest.mark.parametrize("client", ["langchain_openai", "llama_index"])
async def test_library_binds_tools(served, client):
    assert await said(served, client, "bound") == {"auto": [WEATHER], "any": [WEATHER]}


@pytest.mark.nightly
@in_hermes
async def test_langchain_reads_structured_output(served):
    objects = await said(served, "langchain_openai", "structured")
    assert objects == {"function_calling": PERSON, "json_schema": PERSON}


@pytest.mark.nightly
@in_hermes
async def test_litellm_knows_that_a_prompt_is_too_long(served):
    expected = dict.fromkeys(("openai", "anthropic"), "ContextWindowExceededError")
    assert await said(served, "litellm", "overlong") == expected


@pytest.mark.nightly
@in_hermes
async def test_lm_eval_scores_likelihoods_and_text(served):
    scores = await said(served, "lm_eval", "text", served.model)
    assert scores["accuracy"] == 1.0
    assert scores["num_samples"] == {"choices": 2, "written": 2}
    assert len(scores["written"]) == 2
    async with httpx.AsyncClient(base_url=str(served.http_address)) as client:
        for prompt, text in scores["written"].items():
            asked = {"prompt": prompt, "stop": ["."], "max_tokens": 12, "temperature": 0}
            answer = await client.post("/v1/completions", json=asked, timeout=30.0)
            assert text == answer.json()["choices"][0]["text"]


@pytest.mark.nightly
@in_hermes
async def test_aiperf_measures_ten_requests(served):
    assert await said(served, "aiperf", "load", served.model) == {
        "requests": 10,
        "errors": 0,
        "measured": ["request_latency", "time_to_first_token"],
    }


@pytest.mark.nightly
@in_hermes
async def test_guidellm_measures_ten_requests(served):
    totals = await said(served, "guidellm", "load", served.model)
    assert totals == {"successful": 10, "errored": 0}
