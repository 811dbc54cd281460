"""OpenAI's own client against /v1/responses: the tokens of chats, in items and events."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.named_clusters import tenants_file
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.wide import HANDOFFS

pytestmark = pytest.mark.e2e

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0}
QUESTION = "A queue in Python."
FORM: Any = {
    "type": "json_schema",
    "name": "size",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"small": {"type": "boolean"}},
        "required": ["small"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}
FIRST: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
async def ai(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.http_address}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


async def text_of(client: AsyncClient, messages: Any, max_tokens: int) -> str:
    return await client.generate(messages, SamplingParams(max_tokens=max_tokens)).text()


async def test_response_has_the_text_of_a_chat(ai, client):
    expected = await text_of(client, [{"role": "system", "content": "Short."}, *FIRST], 24)
    answer = await ai.responses.create(
        input=QUESTION, instructions="Short.", max_output_tokens=24, metadata={"a": "b"}, **GREEDY
    )
    assert answer.output_text == expected
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 24
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24
    assert (answer.model, answer.object, answer.metadata) == ("tiny", "response", {"a": "b"})
    assert (answer.instructions, answer.max_output_tokens) == ("Short.", 24)


@pytest.mark.symptom(
    "hermes-agent#119758",
    there="a stream of a response lacks the events of content parts",
    here="Sends `response.content_part.added` and `.done`.",
)
async def test_response_streams_typed_events_in_order(ai, client):
    expected = await text_of(client, FIRST, 30)
    stream = await ai.responses.create(input=QUESTION, max_output_tokens=30, stream=True, **GREEDY)
    events = [event async for event in stream]
    types = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) > 5
    assert "".join(event.delta for event in deltas) == expected
    assert events[-1].response.output_text == expected
    assert events[0].response.id == events[-1].response.id
    for event in events:  # the package accepts what it cannot parse, so its types parse it again
        type(event).model_validate(event.model_dump(by_alias=True))


async def test_response_stream_adds_up_to_the_final_response(ai):
    async with ai.responses.stream(
        input=QUESTION, max_output_tokens=40, text={"format": FORM}, **GREEDY
    ) as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == "".join(deltas)
    assert json.loads(final.output_text).keys() == {"small"}
    assert Response.model_validate(final.model_dump(by_alias=True)).status == "completed"


@pytest.mark.symptom(
    "mlx-vlm#1046",
    there="`previous_response_id` is ignored",
    here="Continues the stored conversation.",
)
async def test_response_continues_the_previous_one(ai, client):
    first = await ai.responses.create(input=QUESTION, max_output_tokens=6, **GREEDY)
    assert first.store is True
    second = await ai.responses.create(
        input="Shorter.", previous_response_id=first.id, max_output_tokens=6, **GREEDY
    )
    third = await ai.responses.create(
        input="Longer.", previous_response_id=second.id, max_output_tokens=6, **GREEDY
    )
    messages = [
        *FIRST,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Shorter."},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Longer."},
    ]
    assert third.output_text == await text_of(client, messages, 6)
    assert third.previous_response_id == second.id


async def test_response_takes_its_own_output_as_input(ai, client):
    first = await ai.responses.create(input=FIRST, max_output_tokens=6, store=False, **GREEDY)
    assert first.store is False
    again: list[Any] = [*FIRST, *first.output, {"role": "user", "content": "Shorter."}]
    second = await ai.responses.create(input=again, max_output_tokens=6, **GREEDY)
    messages = [
        *FIRST,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Shorter."},
    ]
    assert second.output_text == await text_of(client, messages, 6)


async def test_stored_response_is_returned_and_deleted(ai):
    made = await ai.responses.create(input=QUESTION, max_output_tokens=4, **GREEDY)
    assert await ai.responses.retrieve(made.id) == made
    await ai.responses.delete(made.id)
    for call in (ai.responses.retrieve(made.id), ai.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match="Send the whole conversation"):
            await call
    with pytest.raises(openai.BadRequestError, match="Send the whole conversation"):
        await ai.responses.create(input="x", previous_response_id=made.id, **GREEDY)


async def test_response_follows_a_json_schema(ai):
    answer = await ai.responses.create(
        input=QUESTION, max_output_tokens=40, text={"format": FORM}, **GREEDY
    )
    assert answer.status == "completed"
    assert json.loads(answer.output_text).keys() == {"small"}
    assert answer.text.format.name == "size"


async def test_response_accepts_hints_without_effect(ai):
    answer = await ai.responses.create(
        input=[{"type": "message", "role": "developer", "content": "Short."}, *FIRST],
        max_output_tokens=1,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        service_tier="auto",
        text={"verbosity": "low"},
        truncation="disabled",
        prompt_cache_key="x",
        safety_identifier="y",
        user="a user",
        parallel_tool_calls=True,
        **GREEDY,
    )
    assert answer.usage.output_tokens == 1


async def test_failed_response_stream_ends_with_response_failed(ai):
    stream = await ai.responses.create(
        input=QUESTION,
        stream=True,
        extra_body={"ignore_eos": True, "baton": {"timeout_s": 0.4}},
        **GREEDY,
    )
    *_, error, last = [event async for event in stream]
    assert (error.type, error.code) == ("error", "deadline_exceeded")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "deadline" in last.response.error.message


async def test_response_errors_name_fields_of_the_responses_api(ai):
    with pytest.raises(openai.NotFoundError) as unknown:
        await ai.responses.create(model="gpt-5", input="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await ai.responses.create(input="x", max_output_tokens=0, **GREEDY)
    assert refused.value.param == "max_output_tokens"


# A router of its own, with tenants.


@pytest.fixture(scope="module")
def shared(
    single_shape: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecondRouter]:
    path = tenants_file(tmp_path_factory.mktemp("tenants"), {"a": "acme", "g": "globex"})
    flags = {"tenants_file": path, "responses_per_tenant": 2, **HANDOFFS}
    with second_router(single_shape, http=True, **flags) as running:
        yield running


def connected(router: SecondRouter, token: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.http_address}/v1", api_key=token, max_retries=0)


async def test_stored_responses_belong_to_their_tenant(shared):
    async with connected(shared, "a") as owner, connected(shared, "g") as other:
        made = await owner.responses.create(input="x", max_output_tokens=1, **GREEDY)
        for call in (other.responses.retrieve(made.id), other.responses.delete(made.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(input="x", previous_response_id=made.id, **GREEDY)
        assert (await owner.responses.retrieve(made.id)).id == made.id


async def test_oldest_response_is_lost_beyond_their_number(shared):
    async with connected(shared, "a") as ai:
        made = [
            await ai.responses.create(input="x", max_output_tokens=1, **GREEDY) for _ in range(3)
        ]
        with pytest.raises(openai.NotFoundError, match="has expired"):
            await ai.responses.retrieve(made[0].id)
        for response in made[1:]:
            assert (await ai.responses.retrieve(response.id)).id == response.id


async def test_key_of_anthropics_clients_is_a_bearer_token(shared):
    given: Any = {"model": "tiny", "max_tokens": 1, "messages": FIRST}
    options = {"base_url": shared.http_address, "max_retries": 0}
    async with anthropic.AsyncAnthropic(api_key="a", **options) as client:
        assert (await client.messages.create(**given)).usage.output_tokens == 1
    async with anthropic.AsyncAnthropic(api_key="guessed", **options) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**given)
