"""Requests drawn from the types of OpenAI's and Anthropic's SDKs: each is answered, or refused by
the path of its field; none is an error of the server."""

from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from baton_router.text.model_card import ModelCard
from tests.support.randomness import rng_of
from tests.support.router.front import front_of
from tests.support.router.written import OSLO, calling_card, save_calling_model, writing
from tests.support.sdk_requests import Drawer

NUM_REQUESTS = 150
MAX_TOKENS = 100  # of what the workers write
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
KINDS: dict[str, Any] = {
    "/v1/completions": CompletionCreateParamsBase,
    "/v1/chat/completions": ChatParams,
    "/v1/responses": ResponseCreateParamsBase,
    "/v1/messages": MessageCreateParamsBase,
    "/v1/messages/count_tokens": MessageCountTokensParams,
}


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("models") / "calling"
    save_calling_model(folder)
    return calling_card(folder)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", KINDS)
async def test_request_of_an_sdk_is_answered_or_refused_by_field(path, card):
    rng = rng_of(path)
    drawer, statuses = Drawer(rng), set[int]()
    for _ in range(NUM_REQUESTS):
        body = drawer.of(KINDS[path])
        body["model"] = ""
        if path == "/v1/responses" and "input" not in body:
            body["input"] = drawer.field(KINDS[path], "input")
        for several in ("n", "best_of"):  # the workers write one sequence
            body.pop(several, None)
        for bound in LENGTHS:  # all of it, however long
            if (body.get(bound) or 0) > 0:
                body[bound] += MAX_TOKENS
        if rng.random() < 0.5:
            body["stream"] = rng.random() < 0.5
        async with front_of(*writing(OSLO, model=card), model=card) as front:
            answer = await front.post(path, json=body)
        # 404: items that a request refers to.
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], body
        statuses.add(answer.status_code)
    assert statuses >= {200, 400}
