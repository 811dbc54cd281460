"""Sampling parameters that a request leaves to the model, over every API."""

from dataclasses import replace
from typing import Any

import pytest

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.rpc.params import params_of, params_to_message
from baton.sampling import NO_DEFAULTS, SamplingDefaults, SamplingParams
from baton.v1 import inference_pb2 as pb
from baton.v1 import sampling_pb2
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard
from tests.support.router.calls import call_of
from tests.support.router.front import LIMITS, card, front_of
from tests.support.router.scripted import READY, RELEASED, decode, finished, first, prefill, tokens

ADVISED = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
)
NAMES = tuple(ADVISED.given)
PATHS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 2},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "responses": {"input": "x", "max_output_tokens": 2},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def advised(defaults: SamplingDefaults) -> ModelCard:
    return replace(card(), sampling_defaults=defaults)


def values_of(sampling: Any) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in NAMES}


async def sampled(path: str, defaults: SamplingDefaults, **fields: Any) -> tuple[Any, Any]:
    """Returns the answer, and what the prefill worker was asked to sample with."""
    computing = prefill(first(), RELEASED)
    workers = computing, decode(READY, tokens(1, 1), finished())
    async with front_of(*workers, model=advised(defaults)) as front:
        answer = await front.post(f"/v1/{path}", json={**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json(), values_of(computing.requests[0].sampling)


@pytest.mark.parametrize("path", PATHS)
async def test_model_gives_what_an_http_request_leaves_unset(path):
    _, values = await sampled(path, ADVISED)
    assert values == ADVISED.given
    _, values = await sampled(path, ADVISED, temperature=None, top_p=0.5)
    assert values == {**ADVISED.given, "top_p": 0.5}
    _, values = await sampled(path, ADVISED, temperature=0, top_k=-1)
    assert (values["temperature"], values["top_k"]) == (0.0, 0)


@pytest.mark.parametrize("path", PATHS)
async def test_http_has_temperature_one_where_a_model_gives_none(path):
    _, values = await sampled(path, SamplingDefaults(top_k=20))
    expected = {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0}
    assert values == {**expected, "repetition_penalty": 1.0}


async def test_response_tells_values_that_the_model_gave():
    answer, _ = await sampled("responses", ADVISED)
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    answer, _ = await sampled("responses", NO_DEFAULTS, top_p=0.5)
    assert (answer["temperature"], answer["top_p"]) == (1.0, 0.5)


def test_beam_search_takes_the_penalty_alone():
    params = SamplingParams(beam_width=2).with_defaults(ADVISED)
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert values_of(params) == {**off, "repetition_penalty": 1.1}


async def test_models_list_what_a_checkpoint_advises():
    async with front_of(model=advised(SamplingDefaults(temperature=0.6))) as front:
        (model,) = (await front.get("/v1/models")).json()["data"]
    assert model["sampling_defaults"] == {"temperature": 0.6}


async def test_model_gives_what_a_grpc_request_leaves_unset():
    intake = Intake(advised(ADVISED), LIMITS)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]))
    request = await intake.read(call_of(message), ContextLength(100))
    assert values_of(request.params) == ADVISED.given
    message.sampling.CopyFrom(sampling_pb2.SamplingParams(min_p=0.0, top_k=0, temperature=0.0))
    request = await intake.read(call_of(message), ContextLength(100))
    off = {"temperature": 0.0, "top_k": 0, "min_p": 0.0}
    assert values_of(request.params) == {**ADVISED.given, **off}


async def test_several_samples_need_a_temperature_of_anyone():
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]))
    message.sampling.n = 2
    request = await Intake(advised(ADVISED), LIMITS).read(call_of(message), ContextLength(100))
    assert (request.params.n, request.params.temperature) == (2, 0.6)
    with pytest.raises(InvalidArgumentError, match=r"sampling\.n: is 2; must be 1 where"):
        await Intake(card(), LIMITS).read(call_of(message), ContextLength(100))


def test_client_leaves_to_the_router_what_its_caller_does():
    message = params_to_message(SamplingParams(max_tokens=3, top_p=0.5))
    assert {name for name in NAMES if message.HasField(name)} == {"top_p"}
    assert params_of(message, default_seed=1).temperature is None
