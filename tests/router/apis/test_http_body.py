"""Bodies of requests: what is said of those that are wrong, for any that a client may send."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from baton.errors import InvalidArgumentError
from baton.serving.grpc.large_requests import LargeRequests
from baton_router.apis.edge.body.bodies import BODY_SECONDS, read_body
from baton_router.apis.edge.body.structure import (
    MAX_DEPTH,
    MAX_KEYS,
    Structure,
    bounds_of,
)
from baton_router.apis.edge.errors import BodyTooLargeError, MediaTypeError
from baton_router.apis.edge.settings import BodyLimits
from baton_router.apis.openai.schemas import ChatRequest, CompletionRequest
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.bodies import parsed_body

BOUNDS = bounds_of(
    16, BodyLimits(max_body_elements=1000), RequestLimits(max_messages=5, max_tools=4)
)
HEADERS = {"content-type": "application/json; charset=utf-8"}


def json_of(floats: st.SearchStrategy[float]) -> st.SearchStrategy[object]:
    return st.recursive(
        st.none() | st.booleans() | st.integers() | floats | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )


json_values = json_of(st.floats())
finite_values = json_of(st.floats(allow_nan=False, allow_infinity=False))
fields = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__])


async def pieces(*parts: bytes):
    for part in parts:
        yield part


async def read(chunks, headers, max_bytes: int) -> bytes:
    with LargeRequests().share() as share:
        return bytes(await read_body(chunks, headers, max_bytes, Structure(BOUNDS), share))


async def test_http_body_is_read_up_to_its_limit():
    assert await read(pieces(b"ab", b"c"), HEADERS, 3) == b"abc"
    with pytest.raises(BodyTooLargeError, match="larger than 2 bytes"):
        await read(pieces(b"ab", b"c"), HEADERS, 2)


async def test_http_body_announced_too_large_is_not_read():
    async def never():
        raise AssertionError("read")
        yield b""

    with pytest.raises(BodyTooLargeError):
        await read(never(), {**HEADERS, "content-length": "5"}, 4)


async def test_http_body_must_be_json():
    for said in ({}, {"content-type": "text/plain"}):
        with pytest.raises(MediaTypeError):
            await read(pieces(b"{}"), said, 10)
    assert BODY_SECONDS > 0


def scan(body: bytes, piece: int = 7) -> InvalidArgumentError | None:
    structure = Structure(BOUNDS)
    try:
        for begin in range(0, len(body), piece):
            structure.feed(body[begin : begin + piece])
    except InvalidArgumentError as error:
        return error
    return None


WITHIN = {
    "ids": b'{"prompt":[' + b",".join([b"1"] * 16) + b"]}",
    "several prompts": b'{"prompt":[' + b",".join([b"[1,2,3]"] * 8) + b"]}",
    "commas and brackets in a text": b'{"prompt":"' + b"[,{" * 200 + b'"}',
    "a quote in a text": b'{"user":"\\\\\\"' + b"[," * 200 + b'"}',
    "messages": b'{"messages":[' + b",".join([b'{"role":"a"}'] * 5) + b"]}",
}
BEYOND = {
    "ids": (b'{"prompt":[' + b",".join([b"1"] * 17) + b"]}", "prompt", "at most 16 tokens"),
    "ids of one prompt": (b'{"prompt":[[' + b",".join([b"1"] * 17) + b"]]}", "prompt", "16"),
    "messages": (b'{"a":1,"messages":[' + b",".join([b"{}"] * 6) + b"]}", "messages", "at most 5"),
    "tools": (b'{"tools" : [' + b",".join([b"{}"] * 5) + b"]}", "tools", "at most 4"),
    "biases": (b'{"logit_bias":{' + b",".join([b'"1":1'] * 301) + b"}}", "logit_bias", "300"),
    "keys": (b"{" + b",".join([b'"k":1'] * (MAX_KEYS + 1)) + b"}", "body", "keys"),
    "depth": (b'{"stop":' + b"[" * MAX_DEPTH + b"]}", "body", "64 levels"),
    "elements": (b'{"metadata":[' + b'"",' * 600 + b"1]}", "metadata", "at most 1000"),
    "invalid UTF-8": (b'{"user":"\xc3\xa4\xff', "body", "UTF-8"),
    "NaN between strings": (b'{"user":"N","seed":NaN', "body", "has N"),
    "Infinity in a list": (b'{"a":["I",{"b":1},-Infinity', "body", "I"),
    "elements of several fields": (
        b'{"a":[' + b"[]," * 300 + b'1],"b":[' + b"[]," * 300 + b"1]}",
        "b",
        "at most 1000",
    ),
}


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize("body", WITHIN.values(), ids=WITHIN)
def test_structure_takes_body_within_bounds(body, piece):
    assert scan(body, piece) is None


@pytest.mark.parametrize("piece", [1, 7, 10_000])
@pytest.mark.parametrize(("body", "field", "problem"), BEYOND.values(), ids=BEYOND)
def test_structure_refuses_body_beyond_bound_by_field(body, field, problem, piece):
    error = scan(body, piece)
    assert error is not None
    assert error.field == field
    assert problem in error.problem


@given(finite_values, st.integers(1, 50))
def test_structure_counts_as_json_parser_does(content, piece):
    body = json.dumps({"a": content}, ensure_ascii=False).encode()
    structure = Structure(bounds_of(16))
    for begin in range(0, len(body), piece):
        structure.feed(body[begin : begin + piece])
    assert structure.num_elements == elements_of({"a": content})
    assert structure.num_keys == keys_of({"a": content})


def elements_of(value: object) -> int:
    """Strings, lists, objects and commas."""
    if isinstance(value, dict):
        inner = sum(1 + elements_of(item) for item in value.values())
        return 1 + inner + max(0, len(value) - 1)
    if isinstance(value, list):
        return 1 + sum(map(elements_of, value)) + max(0, len(value) - 1)
    return int(isinstance(value, str))


def keys_of(value: object) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(keys_of, value.values()))
    return sum(map(keys_of, value)) if isinstance(value, list) else 0


@pytest.mark.parametrize("inner", [b"%b", b'[{"a":1},%b]', b'{"b":[[%b]]}'])
def test_http_body_with_key_twice_at_any_depth_is_refused(inner):
    body = b'{"prompt":"x","metadata":' + inner % b'{"k":":","\\u006b":[]}' + b"}"
    with pytest.raises(InvalidArgumentError, match="has the key 'k' twice"):
        parsed_body(body, CompletionRequest)


def test_http_body_of_2_mb_with_key_twice_is_refused_unnamed():
    body = b'{"prompt":"%b","a":1,"a":2}' % (b"x" * 2 * 10**6)
    with pytest.raises(InvalidArgumentError, match="has a key twice"):
        parsed_body(body, CompletionRequest)


def refusal_of(body: bytes, schema: type[Struct]) -> InvalidArgumentError | None:
    try:
        parsed_body(body, schema)
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
        parsed_body(body, ChatRequest)
