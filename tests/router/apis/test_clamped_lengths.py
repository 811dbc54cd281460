"""Bounds of answers beyond what the prompt leaves of the model's length, by every API."""

from typing import Any

import pytest

from baton.v1 import inference_pb2 as pb
from tests.support.router.event_stream import events_of
from tests.support.router.front import front_of
from tests.support.router.scripted import card
from tests.support.router.written import writing

CUT = pb.FINISH_REASON_LENGTH
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "How is the weather?"}]}
NUM_CHAT = len(card().encode_rendered(card().render(USER["messages"])))
NUM_TEXT = len(card().encode("Hi there."))
LENGTH = card().max_model_len
ASKED: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "completion": ("completions", {"prompt": "Hi there."}, "max_tokens", NUM_TEXT),
    "chat": ("chat/completions", USER, "max_tokens", NUM_CHAT),
    "chat, newer": ("chat/completions", USER, "max_completion_tokens", NUM_CHAT),
    "response": ("responses", {"input": USER["messages"]}, "max_output_tokens", NUM_CHAT),
    "message": ("messages", USER, "max_tokens", NUM_CHAT),
}


@pytest.mark.symptom(
    "vllm#42474, hive#1629",
    there="`max_tokens` above what the prompt leaves is refused",
    here="Lowers it to what is left, and names that in `x-baton-clamped`.",
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body", "field", "num_prompt"), ASKED.values(), ids=ASKED)
async def test_front_clamps_bound_and_names_it(path, body, field, num_prompt, is_streamed):
    left = LENGTH - num_prompt
    for asked, header in ((left, None), (left + 1, f"{field}={left}"), (10**6, f"{field}={left}")):
        computing, decoding = writing("One two.", reason=CUT)
        async with front_of(computing, decoding) as front:
            given = {**body, field: asked, "stream": is_streamed}
            answer = await front.post(f"/v1/{path}", json=given)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-baton-clamped") == header
        assert computing.requests[0].sampling.max_tokens == left


async def test_front_names_smallest_bound_of_several_prompts():
    prompts = ["Hi there.", "Hi there. " * 5]
    left = LENGTH - len(card().encode(prompts[1]))
    for is_streamed in (False, True):
        async with front_of(*writing("One two.")) as front:
            body = {"prompt": prompts, "max_tokens": 10**6, "stream": is_streamed}
            answer = await front.post("/v1/completions", json=body)
        assert answer.headers["x-baton-clamped"] == f"max_tokens={left}"


@pytest.mark.parametrize(("path", "body", "field", "num_prompt"), ASKED.values(), ids=ASKED)
async def test_front_refuses_bound_if_told_to(path, body, field, num_prompt):
    left = LENGTH - num_prompt
    for asked, told in (
        (left + 1, f"is {left + 1}, and the prompt has {num_prompt} tokens"),
        (10**6, f"is {10**6}"),
    ):
        async with front_of(*writing("One two."), clamps=False) as front:
            answer = await front.post(f"/v1/{path}", json={**body, field: asked})
        if path == "messages":
            assert answer.status_code == 200
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["code"] == "context_length_exceeded"
        assert told in error["message"]
        assert f"this model's maximum context length is {LENGTH} tokens" in error["message"]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_message_that_fills_the_model_says_so(is_streamed):
    for asked, reason in ((10**6, "model_context_window_exceeded"), (9, "max_tokens")):
        async with front_of(*writing("One two.", reason=CUT)) as front:
            body = {**USER, "max_tokens": asked, "stream": is_streamed}
            answer = await front.post("/v1/messages", json=body)
        found = events_of(answer.content)[-2]["delta"] if is_streamed else answer.json()
        assert found["stop_reason"] == reason
    async with front_of(*writing("One two.")) as front:
        answer = await front.post("/v1/messages", json={**USER, "max_tokens": 10**6})
    assert answer.json()["stop_reason"] == "end_turn"
