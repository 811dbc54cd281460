from functools import cache

import pytest

from baton.context_length import ContextLength
from baton.errors import ContextLengthError, InvalidArgumentError
from baton.models import locate
from baton.v1 import inference_pb2 as pb
from baton.v1 import sampling_pb2
from baton_router.call.ending import FinishReason
from baton_router.call.request import Request
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard, read_model_card
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.calls import call_of

LIMITS = RequestLimits(max_prompt_bytes=1000)
MAX_LEN = 64


@cache
def card() -> ModelCard:
    return read_model_card(locate("tiny"))


async def read(max_model_len: int = MAX_LEN, **fields: object) -> Request:
    fields = {"text": "abc", **fields} if not {"chat", "token_ids"} & fields.keys() else fields
    intake = Intake(card(), LIMITS)
    return await intake.read(call_of(pb.GenerateRequest(**fields)), ContextLength(max_model_len))


def sampling(**fields: object) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(**fields)


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


def received(*token_ids: int) -> pb.ReceivedTokens:
    return pb.ReceivedTokens(ids=token_ids)


def chat(*messages: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages])


REFUSED = {
    "more output than sequences": (
        {"continue_from": [received(1), received(2)]},
        "continue_from",
        "has 2 entries; must have sampling.n = 1",
    ),
    "more output than is asked for": (
        {"continue_from": [received(*[5] * 17)]},
        "continue_from[0].ids",
        "at most sampling.max_tokens = 16",
    ),
    "output of no token": (
        {"continue_from": [received(3072)]},
        "continue_from[0].ids[0]",
        "[0, 3072)",
    ),
    "an unknown finish reason": (
        {"continue_from": [pb.ReceivedTokens(ids=[7], finish_reason=99)]},
        "continue_from[0].finish_reason",
        "is 99; must be one of the values of FinishReason",
    ),
    "too many messages": (
        {"chat": chat(*[("user", "a")] * 4097)},
        "input.chat.messages",
        "at most ",
    ),
    "no input": ({"text": ""}, "input.text", "at least 1"),
    "no ids": ({"token_ids": ids()}, "input.token_ids", "at least 1"),
    "no messages": ({"chat": chat()}, "input.chat.messages", "at least 1"),
    "no role": ({"chat": chat(("", ""))}, "input.chat.messages[0].role", "does not name"),
    "a text too long": ({"text": "é" * 501}, "input.text", "at most 1000"),
    "a chat too long": ({"chat": chat(("user", "a" * 1001))}, "input.chat.messages", "at most"),
    "a role too long": (
        {"chat": chat(("r" * 1001, "a"))},
        "input.chat.messages[0].role",
        "does not name",
    ),
    "an id too large": ({"token_ids": ids(1, 3072)}, "input.token_ids[1]", "[0, 3072)"),
    "too long together": (
        {"token_ids": ids(*[5] * 60), "sampling": sampling(max_tokens=5)},
        "sampling.max_tokens",
        "is 5, and the prompt has 60 tokens; this model's maximum context length is 64",
    ),
    "a prompt too long for any output": (
        {"token_ids": ids(*[5] * 64)},
        "input.token_ids",
        "64 tokens; this model's maximum context length is 64",
    ),
    "too many tokens": (
        {"sampling": sampling(max_tokens=64)},
        "sampling.max_tokens",
        "is 64; this model's maximum context length is 64",
    ),
    "cold": ({"sampling": sampling(temperature=-0.1)}, "sampling.temperature", "[0, 100]"),
    "a long stop": ({"sampling": sampling(stop=["a", "é" * 129])}, "sampling.stop[1]", "256"),
    "a stop id too large": (
        {"sampling": sampling(stop_token_ids=[7, 9999])},
        "sampling.stop_token_ids[1]",
        "[0, 3072)",
    ),
    "a long id": ({"request_id": "r" * 129}, "request_id", "at most 128"),
    "a biased id too large": (
        {"sampling": sampling(logit_bias=[{"token_id": 3072, "bias": 1}])},
        "sampling.logit_bias",
        "has the token ids 3072; must be in [0, 3072)",
    ),
    "a banned id too large": (
        {"sampling": sampling(bad_token_ids=[{"token_ids": [5]}, {"token_ids": [6, 3072]}])},
        "sampling.bad_token_ids[1][1]",
        "[0, 3072)",
    ),
    "a bad word of many tokens": (
        {"sampling": sampling(bad_words=["a", "x1" * 60])},
        "sampling.bad_words[1]",
        "must be 1 to 32",
    ),
    "bad words of many forms": (
        {
            "sampling": sampling(
                bad_words=["one", "two"], bad_token_ids=[{"token_ids": [i]} for i in range(256)]
            )
        },
        "sampling.bad_token_ids",
        "at most 256",
    ),
    "an empty grammar": (
        {"sampling": sampling(grammar=sampling_pb2.Grammar())},
        "sampling.grammar",
        "json_schema, regex or ebnf",
    ),
}


@pytest.mark.parametrize(("fields", "field", "bound"), REFUSED.values(), ids=REFUSED)
async def test_intake_refuses_bad_request_with_field_and_bound(fields, field, bound):
    with pytest.raises(InvalidArgumentError) as caught:
        await read(**fields)
    assert caught.value.field == field
    assert bound in caught.value.problem


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 1},
        {"n": 2, "best_of": 4, "temperature": 1, "stop": ["a"]},
        {"n": 4, "beam_width": 4, "logprobs": True, "speculate": False},
        {"grammar": sampling_pb2.Grammar(json_schema="{}"), "min_tokens": 3},
        {"prompt_logprobs": 0},
    ],
)
async def test_intake_accepts_compatible_parameters(fields):
    good = await read(sampling=sampling(**fields))
    assert good.params.n == fields.get("n", 1)


async def test_intake_keeps_received_output_even_when_empty():
    fields = {"sampling": sampling(n=2, temperature=1.0, seed=4)}
    request = await read(continue_from=[received(7, 8), received()], **fields)
    assert (request.received, request.params.seed) == (((7, 8), ()), 4)
    assert (await read(**fields)).received == ()


@pytest.mark.parametrize(
    ("reason", "taken"),
    [
        (pb.FINISH_REASON_END_OF_SEQUENCE, FinishReason.END_OF_SEQUENCE),
        (pb.FINISH_REASON_STOP_TOKEN, FinishReason.STOP_TOKEN),
        (pb.FINISH_REASON_LENGTH, FinishReason.LENGTH),
        (pb.FINISH_REASON_STOP_STRING, None),
    ],
)
async def test_intake_keeps_received_finish_reason(reason, taken):
    told = pb.ReceivedTokens(ids=[7], finish_reason=reason)
    assert (await read(continue_from=[told])).received_endings == (taken,)
    told.ClearField("ids")
    assert (await read(continue_from=[told])).received_endings == (None,), "of nothing"


async def test_intake_keeps_priority():
    assert (await read(priority=-3)).priority == -3
    assert (await read()).priority == 0


async def test_intake_bans_bad_word_with_and_without_space():
    good = await read(
        sampling=sampling(bad_words=["self", " def"], bad_token_ids=[{"token_ids": [7]}])
    )

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(card().tokenizer.encode(text, add_special_tokens=False).ids)

    assert good.params.bad_words == ()
    assert set(good.params.bad_token_ids) == {
        (7,),
        tokens("self"),
        tokens(" self"),
        tokens("def"),
        tokens(" def"),
    }


async def test_intake_bans_repeated_bad_word_once():
    good = await read(sampling=sampling(bad_words=["self", " self", "self"]))
    assert len(good.params.bad_token_ids) == 2


async def test_intake_bans_bad_word_of_spaces_as_it_is():
    good = await read(sampling=sampling(bad_words=["    "]))
    assert len(good.params.bad_token_ids) == 1


async def test_intake_refuses_request_without_input():
    with pytest.raises(InvalidArgumentError, match="input: is missing"):
        await Intake(card(), LIMITS).read(call_of(pb.GenerateRequest()), ContextLength(MAX_LEN))


async def test_intake_lets_prompt_and_output_fill_model_length():
    good = await read(token_ids=ids(*[5] * 60), sampling=sampling(max_tokens=4))
    assert (len(good.token_ids), good.params.max_tokens) == (60, 4)


async def test_intake_bounds_length_by_model_when_workers_allow_more():
    with pytest.raises(InvalidArgumentError, match="length is 2048"):
        await read(2**31, token_ids=ids(*[5] * 2048))


async def test_intake_sets_defaults_and_fresh_seed_when_unset():
    first, second = await read(), await read()
    assert (first.params.max_tokens, first.params.is_greedy) == (16, True)
    assert first.params.seed != second.params.seed
    assert first.request_id
    assert first.request_id != second.request_id


async def test_intake_renders_chat_with_single_special_tokens():
    good = await read(max_model_len=256, chat=chat(("user", "hello")))
    start = card().tokenizer.token_to_id("<|im_start|>")
    assert good.token_ids.count(start) == 2


@pytest.mark.parametrize(
    "text", ["abc", "def f():\n    pass\n" * 300], ids=["short", "in a thread"]
)
async def test_intake_tokenizes_as_generate_does(text):
    intake = Intake(card(), RequestLimits())
    token_ids, shown = await intake.tokenize(text)
    assert (shown, token_ids) == (text, card().tokenizer.encode(text).ids)


async def test_intake_clamps_bound_of_call_that_asks_for_it():
    for asked, clamped in ((4, 4), (5, 4), (2**31, 4)):
        made = await read(
            token_ids=ids(*[5] * 60), sampling=sampling(max_tokens=asked), clamp_max_tokens=True
        )
        assert (made.params.max_tokens, made.is_clamped) == (clamped, asked > clamped)
    with pytest.raises(ContextLengthError, match="64 tokens; this model's maximum") as caught:
        await read(token_ids=ids(*[5] * 64), clamp_max_tokens=True)
    assert (caught.value.size, caught.value.limit, caught.value.unit) == (64, 64, "tokens")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"text": "a b" * 5000}, "input.text"),
        ({"chat": chat(("user", "a b" * 5000))}, "input.chat.messages"),
    ],
)
async def test_intake_refuses_long_text_by_its_bytes(given, field):
    intake = Intake(card(), RequestLimits())
    with pytest.raises(ContextLengthError, match=r"has \d+ tokens or more by its bytes") as caught:
        await intake.read(call_of(pb.GenerateRequest(**given)), ContextLength(MAX_LEN))
    assert (caught.value.field, caught.value.limit) == (field, MAX_LEN)
    assert MAX_LEN <= caught.value.size <= len(card().encode("a b" * 5000)) + 64


async def test_intake_counts_tokens_of_text_beyond_the_model():
    token_ids, _ = await Intake(card(), RequestLimits()).tokenize("a b" * 100_000)
    assert token_ids == card().tokenizer.encode("a b" * 100_000).ids
