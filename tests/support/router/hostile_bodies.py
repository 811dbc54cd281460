"""Hostile bodies and messages: below every size limit, with far more elements than any request."""

import json
from collections.abc import Callable

from baton.v1 import inference_pb2 as pb

_MESSAGE = b'{"role":"user","content":"hello"}'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
_CHAT = b'{"messages":[{"role":"user","content":"x"}],'


def _keys(num: int) -> bytes:
    return b",".join(b'"%d":1' % at for at in range(num))


# Path and body by name; the path is that of the field whose bound each exceeds.
BODIES: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "2.7M prompt ids": (
        "completions",
        "prompt",
        lambda: b'{"prompt":[' + b"11," * 2_700_000 + b"11]}",
    ),
    "1.9M nested lists": (
        "completions",
        "prompt",
        lambda: b'{"prompt":[' + b"[1]," * 1_900_000 + b"[1]]}",
    ),
    "2.7M ids to embed": (
        "embeddings",
        "input",
        lambda: b'{"input":[' + b"11," * 2_700_000 + b"11]}",
    ),
    "1.9M texts to embed": (
        "embeddings",
        "input",
        lambda: b'{"input":[' + b'"",' * 1_900_000 + b'""]}',
    ),
    "1.9M texts to score": (
        "score",
        "text_2",
        lambda: b'{"text_1":"x","text_2":[' + b'"",' * 1_900_000 + b'""]}',
    ),
    "deep lists": (
        "completions",
        "body",
        lambda: b'{"prompt":' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}",
    ),
    "240k messages": (
        "chat/completions",
        "messages",
        lambda: b'{"messages":[' + b",".join([_MESSAGE] * 240_000) + b"]}",
    ),
    "90k tools": (
        "chat/completions",
        "tools",
        lambda: _CHAT + b'"tools":[' + b",".join([_TOOL] * 90_000) + b"]}",
    ),
    "500k unknown keys": (
        "chat/completions",
        "body",
        lambda: b"{" + _keys(500_000) + b"}",
    ),
    "500k logit_bias": (
        "chat/completions",
        "logit_bias",
        lambda: _CHAT + b'"logit_bias":{' + _keys(500_000) + b"}}",
    ),
    "500k keys of metadata": (
        "chat/completions",
        "metadata",
        lambda: _CHAT + b'"metadata":{' + _keys(500_000) + b"}}",
    ),
}

# Field whose bound it exceeds, and message, by name.
MESSAGES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "2M continue_from entries": (
        "continue_from",
        lambda: pb.GenerateRequest(text="x").SerializeToString() + b"\x42\x00" * 2_000_000,
    ),
    "chat of 200k messages": (
        "input.chat.messages",
        lambda: pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")] * 200_000)
        ).SerializeToString(),
    ),
    "8M prompt ids": (
        "input.token_ids",
        lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 8_000_000)).SerializeToString(),
    ),
    "4M unknown fields": ("request", lambda: b"\xf8\x01\x01" * 2_700_000),
    "500k stop strings": (
        "sampling.stop",
        lambda: pb.GenerateRequest(sampling={"stop": ["ab"] * 500_000}).SerializeToString(),
    ),
}


def assert_legal(body: bytes) -> None:
    """Fails unless `body` is JSON of less than 8 MiB."""
    assert len(body) < 8 * 2**20
    json.loads(body)


# The least that each POST route takes.
NEEDED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}

_LARGE = 2**20


def _with(more: bytes) -> Callable[[bytes], bytes]:
    """Returns a function that adds fields to an object."""
    return lambda body: body[:-1] + b"," + more + b"}"


# What makes a legal body hostile, by name: none is JSON that a text or a number could hold.
SHAPES: dict[str, Callable[[bytes], bytes]] = {
    "65 levels": _with(b'"x":' + b"[" * 64 + b"]" * 64),
    "a million levels": _with(b'"x":' + b'{"x":' * _LARGE),
    "NaN": _with(b'"x":NaN'),
    "infinity": _with(b'"x":-Infinity'),
    "a key twice": _with(b'"model":"a","model":"b"'),
    "a key twice in an object": _with(b'"x":{"y":[{"z":1,"z":1}]}'),
    "a key twice, once escaped": _with(rb'"x":1,"\u0078":2'),
    "30,000 equal keys": _with(b'"x":{' + b'"k":1,' * 30_000 + b'"k":1}'),
    "invalid UTF-8": _with(b'"x":"\xff"'),
    "overlong UTF-8": _with(b'"x":"\xc0\xaf"'),
    "a surrogate in UTF-8": _with(b'"x":"\xed\xa0\x80"'),
    "invalid UTF-8 in a key": _with(b'"\xff":1'),
    "UTF-16": lambda body: body.decode().encode("utf-16"),
    "half a surrogate pair": _with(rb'"x":"\ud800"'),
    "the other half": _with(rb'"x":"\udc00\ud800"'),
    "a million surrogates": _with(b'"x":"' + rb"\ud800" * (_LARGE // 6) + b'"'),
    "a million digits": _with(b'"x":' + b"9" * _LARGE),
    "a float beyond all": _with(b'"x":1e999'),
    "an exponent of 100,000 digits": _with(b'"x":1e' + b"9" * 100_000),
    "a control character": _with(b'"x":"\x01"'),
    "zeros": lambda body: b"\0" * len(body),
    "half of it": lambda body: body[:-1],
    "two of them": lambda body: body + body,
    "no object": lambda body: b"[" + body + b"]",
    "a comment": lambda body: b"/* */" + body,
    "500,000 keys": _with(_keys(500_000)),
    "500,000 elements": _with(b'"x":[' + b'"",' * 500_000 + b'""]'),
}
