"""Types of the public APIs, against which every answer of a front in a test is validated.

Responses and their events: the types of Open Responses and those of OpenAI's client. Messages and
their events: those of Anthropic's client. Completions and chat completions: those of OpenAI's. A
field that a client's types lack is refused unless it is an extension named here, which
docs/openai.md, docs/responses.md and docs/messages.md describe.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, get_args

import openresponses_types
from anthropic.types import (
    ErrorResponse,
    Message,
    MessageTokensCount,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStreamEvent,
)
from openai.types import Completion, CompletionChoice, completion_choice
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.responses import (
    InputTokenCountResponse,
    Response,
    ResponseItemList,
    ResponseStreamEvent,
)
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from tests.support.router.event_stream import data_of

Json = dict[str, Any]
App = Callable[[Any, Any, Any], Any]
Check = Callable[[bytes | None, list[bytes]], None]
"""Function that raises unless a whole body, or else the events of a stream, are valid."""


class _WithReasoning(BaseModel):
    reasoning: str | None = None
    reasoning_content: str | None = None


class _ChatMessage(ChatCompletionMessage, _WithReasoning):
    pass


class _ChatDelta(chat_completion_chunk.ChoiceDelta, _WithReasoning):
    pass


class _WithTokens(BaseModel):
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class _WithPrompt(BaseModel):
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Json | None] | None = None


class _ChatChoice(chat_completion.Choice, _WithTokens):
    message: _ChatMessage


class _ChatChunkChoice(chat_completion_chunk.Choice, _WithTokens):
    delta: _ChatDelta


class _Chat(ChatCompletion, _WithPrompt):
    choices: list[_ChatChoice]
    baton: Json | None = None


class _ChatChunk(ChatCompletionChunk, _WithPrompt):
    choices: list[_ChatChunkChoice]
    baton: Json | None = None


class _CompletionLogprobs(completion_choice.Logprobs):
    """The first token of a prompt that is repeated has no log-probability."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _CompletionChoice(CompletionChoice, _WithTokens, _WithPrompt):
    logprobs: _CompletionLogprobs | None


class _CompletionChunkChoice(_CompletionChoice):
    """OpenAI's own chunks have null where its types demand a reason."""

    finish_reason: Literal["stop", "length"] | None


class _Completion(Completion):
    choices: list[_CompletionChoice]
    baton: Json | None = None


class _CompletionChunk(Completion):
    choices: list[_CompletionChunkChoice]
    baton: Json | None = None


class _Message(Message):
    baton: Json | None = None


class _MessageStart(RawMessageStartEvent):
    message: _Message


class _MessageDelta(RawMessageDeltaEvent):
    baton: Json | None = None


class _Ping(BaseModel):
    type: Literal["ping"]


class _Error(BaseModel):
    error: ErrorObject


def _by_type(*kinds: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The types of events by the names of events."""
    named = {}
    for kind in kinds:
        (name,) = get_args(kind.model_fields["type"].annotation) or [
            *kind.model_fields["type"].annotation  # type: ignore[union-attr]
        ]
        named[str(name)] = kind
    return named


_OPENAI_EVENTS = _by_type(*get_args(get_args(ResponseStreamEvent)[0]))
_LAST_RESPONSE_EVENTS = {"response.completed", "response.incomplete", "response.failed"}
_OPEN_EVENTS = _by_type(
    *[kind for name, kind in vars(openresponses_types).items() if name.endswith("StreamingEvent")]
)
_MESSAGE_EVENTS = _by_type(
    *get_args(get_args(RawMessageStreamEvent)[0]), _MessageStart, _MessageDelta, _Ping
)
# Required by Open Responses, sent by OpenAI, and not in the types of its client.
_OPEN_FIELDS = ("frequency_penalty", "presence_penalty", "store")
_adapter = cache(TypeAdapter)


class Checked:
    """App that raises where an answer of `app` has another form than its API's."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        check_answer = _check_of(scope["path"]) if scope["type"] == "http" else None
        if check_answer is None:
            await self.app(scope, receive, send)
            return
        start: Json = {}
        parts: list[bytes] = []
        has_ended = False

        async def note(message: Any) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))
                has_ended = not message.get("more_body", False)
            await send(message)

        await self.app(scope, receive, note)
        if has_ended:  # else its client has gone
            _check_body(check_answer, start, b"".join(parts))


def _check_of(path: str) -> Check | None:
    if path.endswith("/input_items"):
        return _check_items
    found = _CHECKS.get(path)
    return _check_response if not found and path.startswith("/v1/responses/") else found


def _check_body(check_answer: Check, start: Mapping[str, Any], body: bytes) -> None:
    media_type = dict(start["headers"]).get(b"content-type", b"").partition(b";")[0]
    if media_type == b"text/event-stream":
        check_answer(None, list(data_of(body)))
    elif media_type == b"application/json" and start["status"] >= 400:
        _check_error(body)
    elif media_type == b"application/json":
        check_answer(body, [])


def _validate(kind: type[BaseModel], written: bytes, extra: Any = "forbid") -> None:
    _adapter(kind).validate_json(written, strict=True, extra=extra)


def _check_error(body: bytes) -> None:
    is_anthropic = json.loads(body).get("type") == "error"
    _validate(ErrorResponse if is_anthropic else _Error, body)


def _check_choices(whole: type[BaseModel], chunk: type[BaseModel]) -> Check:
    def check_answer(body: bytes | None, events: list[bytes]) -> None:
        if body is not None:
            _validate(whole, body)
        for at, event in enumerate(events):
            is_failure = event.startswith(b'{"error"')
            assert not is_failure or at == len(events) - 1
            _validate(_Error if is_failure else chunk, event)

    return check_answer


def _check_message(body: bytes | None, events: list[bytes]) -> None:
    if body is not None:
        _validate(_Message, body)
        return
    names = []
    for event in events:
        name = json.loads(event)["type"]
        _validate(ErrorResponse if name == "error" else _MESSAGE_EVENTS[name], event)
        names.append(name)
    names = [name for name in names if name != "ping"]
    assert names[0] in ("message_start", "error")
    assert names[-1] in ("message_stop", "error")


def _check_count(body: bytes | None, _events: list[bytes]) -> None:
    assert body is not None
    _validate(MessageTokensCount, body)


def _check_items(body: bytes | None, _events: list[bytes]) -> None:
    assert body is not None
    _validate(ResponseItemList, body)


def _check_input_tokens(body: bytes | None, _events: list[bytes]) -> None:
    assert body is not None
    _validate(InputTokenCountResponse, body)


def _check_response(body: bytes | None, events: list[bytes]) -> None:
    if body is not None and json.loads(body).get("deleted"):
        return
    if body is not None:
        _validate_response(json.loads(body), Response, openresponses_types.ResponseResource)
    for at, event in enumerate(events):
        content = json.loads(event)
        assert content["sequence_number"] == at
        name = content["type"]
        # Open Responses has other names for events of reasoning, and another event of errors.
        open_kind = None if name == "error" else _OPEN_EVENTS.get(name)
        _validate_response(content, _OPENAI_EVENTS[name], open_kind)
    assert not events or name in _LAST_RESPONSE_EVENTS


def _validate_response(
    content: Json, kind: type[BaseModel], open_kind: type[BaseModel] | None
) -> None:
    is_event = "sequence_number" in content
    response = content.get("response", {}) if is_event else content
    response.pop("baton", None)
    shown = {name: value for name, value in response.items() if name not in _OPEN_FIELDS}
    if is_event:
        shown = {**content, "response": shown} if shown else content
    if isinstance(shown.get("logprobs"), list):  # whose bytes are such a field, too
        shown = {**shown, "logprobs": list(map(_without_bytes, shown["logprobs"]))}
    _validate(kind, _encoded(shown))
    if open_kind is None:
        return
    if "schema" in (text_format := response.get("text", {}).get("format", {})):
        text_format["schema"] = None  # all that the types take, by a fault of their generator
    if "tools" in response:  # Open Responses knows no namespaces
        response["tools"] = [tool for tool in response["tools"] if tool["type"] == "function"]
    _validate(open_kind, _encoded(content), "ignore")


def _without_bytes(entry: Json) -> Json:
    kept = {name: value for name, value in entry.items() if name != "bytes"}
    if "top_logprobs" in kept:
        kept["top_logprobs"] = list(map(_without_bytes, kept["top_logprobs"]))
    return kept


def _encoded(content: Json) -> bytes:
    return json.dumps(content).encode()


_CHECKS: dict[str, Check] = {
    "/v1/completions": _check_choices(_Completion, _CompletionChunk),
    "/v1/chat/completions": _check_choices(_Chat, _ChatChunk),
    "/v1/responses": _check_response,
    "/v1/responses/input_tokens": _check_input_tokens,
    "/v1/messages": _check_message,
    "/v1/messages/count_tokens": _check_count,
}
