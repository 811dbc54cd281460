"""Bounds of what one request may hold, over gRPC and HTTP."""

import secrets
from dataclasses import dataclass, replace

from baton.errors import ContextLengthError, InvalidArgumentError
from baton.sampling import (
    MAX_BAD_TOKEN_SEQUENCE_LENGTH,
    MAX_BAD_TOKEN_SEQUENCES,
    MAX_SEQUENCES,
)
from baton.serving.bounds import Bounds
from baton.serving.grpc.channels import MAX_MESSAGE_BYTES
from baton.settings import setting
from baton_router.text.images.image_limits import ImageLimits

_DEFAULT_IMAGES = ImageLimits()
_MAX_REQUEST_ID_BYTES = 128

_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of prompts."""

    max_prompt_bytes: int = setting(
        2**20, "Maximum bytes of a prompt's text, before it is tokenized.", ge=1
    )
    text_cache_bytes: int = setting(
        64 * 2**20,
        "Maximum bytes of tokenized pieces of conversations that are cached, for each model, so "
        "that a turn tokenizes only what is new. 0: none.",
        ge=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(PromptLimits):
    """Limits of what one request may hold."""

    max_messages: int = setting(
        4096, "Maximum messages of a conversation; at most the model's length.", ge=1
    )
    max_tools: int = setting(512, "Maximum tools of a request, over HTTP or gRPC.", ge=1)
    max_inputs: int = setting(
        2048,
        "Maximum inputs of one request for embeddings, and pairs of one for scores.",
        ge=1,
    )
    max_input_tokens: int = setting(300_000, "Maximum tokens of these inputs together.", ge=1)


def message_bounds(
    max_model_len: int,
    limits: RequestLimits,
    images: ImageLimits = _DEFAULT_IMAGES,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Bounds:
    """Returns the bounds of messages for a model of this length in tokens."""
    max_prompt_bytes, max_tools, max_inputs = (
        limits.max_prompt_bytes,
        limits.max_tools,
        limits.max_inputs,
    )
    num_messages = min(limits.max_messages, max_model_len)
    counts = {
        "TokenIds.ids": max_model_len,
        "ReceivedTokens.ids": MAX_SEQUENCES * max_model_len,
        "GenerateRequest.continue_from": MAX_SEQUENCES,
        "Chat.messages": num_messages,
        # Each call in a conversation has a message with its result.
        **{f"ChatMessage.{name}": num_messages for name in _MESSAGE_FIELDS},
        **{f"ToolCall.{name}": num_messages for name in ("id", "name", "arguments")},
        **{f"ContentPart.{name}": num_messages for name in ("text", "image", "clip")},
        "OutputParsing.tools": max_tools,
        **{f"Tool.{name}": max_tools for name in ("name", "description", "strict")},
        "Tool.parameters_json_schema": max_tools,
        "EmbedRequest.inputs": max_inputs,
        **{f"EmbedInput.{name}": max_inputs for name in ("text", "token_ids")},
        "ScoreRequest.pairs": max_inputs,
        **{f"TextPair.{name}": max_inputs for name in ("first", "second")},
        "BadTokens.token_ids": MAX_BAD_TOKEN_SEQUENCES * MAX_BAD_TOKEN_SEQUENCE_LENGTH,
    }
    bounds = Bounds(
        max_elements_of={f"baton.v1.{name}": most for name, most in counts.items()},
        max_bytes=max_prompt_bytes,
        max_bytes_of={
            "baton.v1.Image.data": images.max_bytes,
            # In base64.
            "baton.v1.Image.url": max(max_prompt_bytes, images.max_bytes // 3 * 4 + 128),
            "baton.v1.Tensor.data": max_message_bytes,
        },
    )
    inputs = {**bounds.max_elements_of, "baton.v1.TokenIds.ids": limits.max_input_tokens}
    of_inputs = replace(bounds, max_elements_of=inputs)
    return replace(bounds, of_kind={"baton.v1.EmbedRequest": of_inputs})


def check_text(field: str, text: str, max_bytes: int) -> None:
    """Raises `InvalidArgumentError` for an empty text, `ContextLengthError` for one of more than
    `max_bytes`."""
    if not text:
        raise InvalidArgumentError(field, "is empty; at least 1 character is needed")
    # A character has at least one byte, so most texts need not be encoded to be refused.
    size = len(text) if len(text) > max_bytes else len(text.encode())
    if size > max_bytes:
        raise ContextLengthError(
            field,
            f"has {size} bytes or more; expected at most {max_bytes} bytes of a prompt's text. "
            "Shorten the prompt.",
            size,
            max_bytes,
            "bytes",
        )


def request_id_of(given: str) -> str:
    """Returns the request id that a client gave; a new one if it is empty."""
    if len(given.encode()) > _MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(
            "request_id",
            f"has {len(given.encode())} bytes; at most {_MAX_REQUEST_ID_BYTES} are taken",
        )
    return given or secrets.token_hex(8)
