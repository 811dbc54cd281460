"""Fields of completions and chat completions that other servers take, too."""

from typing import Any

import httpx
import pytest

from baton.v1 import inference_pb2
from baton.v1 import prefill_pb2 as pb
from baton_router.text.model_card import ModelCard
from tests.support.router.front import front_of
from tests.support.router.scripted import READY, RELEASED, decode, finished, first, prefill, tokens

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 2},
    "chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "responses": {"input": "x", "max_output_tokens": 2},
    "messages": {"messages": MESSAGES, "max_tokens": 2},
}


async def post(
    path: str, fields: dict[str, Any], model: ModelCard | None = None
) -> tuple[httpx.Response, Any]:
    """Returns the answer to a request with these fields, and what the prefill worker got."""
    computing = prefill(first(), RELEASED)
    workers = computing, decode(READY, tokens(1, 1), finished())
    async with front_of(*workers, model=model) as front:
        answer = await front.post(f"/v1/{path}", json={**ROUTES[path], **fields})
    return answer, (computing.requests or [None])[0]


@pytest.mark.parametrize("path", ROUTES)
async def test_top_k_of_minus_one_is_all(path):
    answer, asked = await post(path, {"top_k": -1})
    assert answer.status_code == 200, answer.text
    assert asked.sampling.top_k == 0
    refused, _ = await post(path, {"top_k": -2})
    assert refused.status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_obfuscation_of_streams_is_taken(path):
    fields = {"stream": True, "stream_options": {"include_obfuscation": True}}
    answer, _ = await post(path, fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_of_no_tokens_is_the_prompt_alone(logprobs):
    scores = pb.PrefillResponse(
        prompt_logprobs=inference_pb2.PromptLogprobs(position=1, logprobs=[-0.5] * 2)
    )
    computing = prefill(*([scores] if logprobs is not None else []), first(), RELEASED)
    asked = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    async with front_of(computing, decode(READY, finished())) as front:
        answer = (await front.post("/v1/completions", json=asked)).json()
        text = (await front.post("/detokenize", json={"tokens": asked["prompt"]})).json()["prompt"]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
