"""Bounds of serialized messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.serving.bounds import Bounds, BoundsError
from baton.serving.grpc.message_bounds import check_message
from baton.v1 import inference_pb2 as pb

BOUNDS = Bounds(
    max_elements_of={
        "baton.v1.GenerateRequest.continue_from": 2,
        "baton.v1.TokenIds.ids": 5,
        "baton.v1.Chat.messages": 3,
    },
    max_elements=10,
    max_bytes=8,
)


def refusal_of(data: bytes) -> BoundsError | None:
    try:
        check_message(data, pb.GenerateRequest.DESCRIPTOR, BOUNDS)
    except BoundsError as error:
        return error
    return None


def message(**fields: object) -> bytes:
    return pb.GenerateRequest(**fields).SerializeToString()


def chat(num: int, content: str = "hi") -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=content)] * num)


ENTRY = pb.ReceivedTokens(ids=[300])
UNPACKED = b"\x22\x0c" + b"\x08\x07" * 6  # token_ids { ids: 7 } six times

WITHIN = {
    "nothing": b"",
    "ids": message(token_ids=pb.TokenIds(ids=[300] * 5)),
    "entries": message(text="x", continue_from=[ENTRY] * 2),
    "a chat": message(chat=chat(3)),
    "others": message(text="x", sampling={"stop": ["a"] * 10}),
}
BEYOND = {
    "ids": (message(token_ids=pb.TokenIds(ids=[300] * 6)), "input.token_ids"),
    "ids one by one": (UNPACKED, "input.token_ids"),
    "ids in several parts": (
        message(token_ids=pb.TokenIds(ids=[1] * 3)) * 2,
        "input.token_ids",
    ),
    "entries": (message(text="x", continue_from=[ENTRY] * 3), "continue_from"),
    "empty entries": (b"\x42\x00" * 3, "continue_from"),
    "messages": (message(chat=chat(4)), "input.chat.messages"),
    "texts": (message(sampling={"stop": ["a"] * 11}), "sampling.stop"),
    "doubles": (message(sampling={"logit_bias": [{"bias": 1.5}] * 11}), "sampling.logit_bias"),
    "unknown fields": (b"\xf8\x01\x01" * 11, "request"),
    "groups": (b"\xfb\x01\xfc\x01" * 6, "request"),
    "bytes of a text": (message(text="123456789"), "input.text"),
    "bytes of a content": (message(chat=chat(1, "123456789")), "input.chat.messages"),
}


@pytest.mark.parametrize("data", WITHIN.values(), ids=WITHIN)
def test_message_bounds_take_message_within_them(data):
    assert refusal_of(data) is None


@pytest.mark.parametrize(("data", "field"), BEYOND.values(), ids=BEYOND)
def test_message_bounds_refuse_message_by_field(data, field):
    error = refusal_of(data)
    assert error is not None
    assert error.field == field


@given(st.binary(max_size=60))
def test_message_bounds_take_or_refuse_any_bytes(data):
    assert refusal_of(data) is None or refusal_of(data).problem
