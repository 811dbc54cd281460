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
