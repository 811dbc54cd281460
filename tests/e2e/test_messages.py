"""Anthropic's own client against a router: the tokens of chat completions, in blocks."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.watch import until_nothing_is_held

pytestmark = pytest.mark.e2e

# This client knows no temperature.
EXTRA = {"temperature": 0.0}
GREEDY: dict[str, Any] = {"model": "tiny", "extra_body": EXTRA}
MESSAGES: list[Any] = [{"role": "user", "content": "A queue in Python."}]


@pytest.fixture
async def claude(cluster: LocalCluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=cluster.http_address, api_key="any", max_retries=0
    ) as client:
        yield client


async def text_of(client: AsyncClient, max_tokens: int) -> str:
    chat = [{"role": "system", "content": "Short."}, *MESSAGES]
    return await client.generate(chat, SamplingParams(max_tokens=max_tokens)).text()


async def test_message_has_the_text_of_a_chat(claude, client):
    expected = await text_of(client, 24)
    message = await claude.messages.create(
        messages=MESSAGES, system="Short.", max_tokens=24, **GREEDY
    )
    assert [(block.type, block.text) for block in message.content] == [("text", expected)]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)


async def test_message_stream_has_the_text_of_a_chat(claude, client, cluster):
    expected = await text_of(client, 30)
    async with claude.messages.stream(
        messages=MESSAGES, system="Short.", max_tokens=30, **GREEDY
    ) as stream:
        pieces = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(pieces) == expected
    assert len(pieces) > 5
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 30)
    await until_nothing_is_held(cluster)


async def test_failed_message_stream_ends_with_an_error(claude, cluster):
    stream = await claude.messages.create(
        messages=MESSAGES,
        max_tokens=1900,
        stream=True,
        stop_sequences=["never written"],
        **{**GREEDY, "extra_body": {**EXTRA, "baton": {"timeout_s": 0.4}}},
    )
    with pytest.raises(anthropic.APIStatusError, match="deadline") as caught:
        async for _ in stream:
            pass
    assert caught.value.body["error"]["type"] == "timeout_error"
    await until_nothing_is_held(cluster)
