"""Bodies of requests: what is said of those that are wrong, for any that a client may send."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from baton.errors import InvalidArgumentError
from baton_router.http.body import BODY_SECONDS, parse, read_body
from baton_router.http.errors import BodyTooLargeError, MediaTypeError
from baton_router.http.schemas import ChatRequest, CompletionRequest

HEADERS = {"content-type": "application/json; charset=utf-8"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
fields = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields])


async def pieces(*parts: bytes):
    for part in parts:
        yield part


async def test_http_body_is_read_up_to_its_limit():
    assert await read_body(pieces(b"ab", b"c"), HEADERS, 3) == b"abc"
    with pytest.raises(BodyTooLargeError, match="larger than 2 bytes"):
        await read_body(pieces(b"ab", b"c"), HEADERS, 2)


async def test_http_body_announced_too_large_is_not_read():
    async def never():
        raise AssertionError("read")
        yield b""

    with pytest.raises(BodyTooLargeError):
        await read_body(never(), {**HEADERS, "content-length": "5"}, 4)


async def test_http_body_must_be_json():
    for said in ({}, {"content-type": "text/plain"}):
        with pytest.raises(MediaTypeError):
            await read_body(pieces(b"{}"), said, 10)
    assert BODY_SECONDS > 0


def refusal_of(body: bytes, schema: type[BaseModel]) -> InvalidArgumentError | None:
    try:
        parse(body, schema)
    except InvalidArgumentError as error:
        return error
    return None


@given(st.dictionaries(fields | st.text(), json_values, max_size=6))
def test_http_body_of_any_json_is_parsed_or_refused_by_field(content):
    for schema in (ChatRequest, CompletionRequest):
        refused = refusal_of(json.dumps(content).encode(), schema)
        assert refused is None or (refused.field and refused.problem)


@given(st.binary(max_size=40))
def test_http_body_of_random_bytes_is_refused(body):
    with pytest.raises(InvalidArgumentError):
        parse(body, ChatRequest)


def test_http_body_treats_null_as_absent():
    asked = parse(b'{"prompt": "x", "stop": null, "suffix": null, "n": null}', CompletionRequest)
    assert (asked.prompt, asked.stop, asked.n) == ("x", [], 1)
