"""Response formats of OpenAI's API: chunks of a stream, and whole answers.

A `Shape` serves one answer, and gets the pieces of each choice in order.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.answers.sequence_reader import ScoredToken, SequenceDelta
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from baton_router.text.token_bytes import TokenBytes

_Utf8 = getincrementaldecoder("utf-8")


class Shape(Protocol):
    """Response format of the choices of an answer.

    Attributes:
        id_prefix: prefix of the answer's id.
        whole_name, chunk_name: the `object` of an answer and of a part of one.
        has_prompts: what is told of a prompt is in its choices, else in the answer.
    """

    id_prefix: str
    whole_name: str
    chunk_name: str
    has_prompts: bool

    def opening(self, index: int) -> Json | None:
        """Returns the first chunk of a choice in a stream, if the format has one."""

    def part(self, update: SequenceDelta) -> Json | None:
        """Returns a piece in a stream; None if the client gets nothing of it."""

    def empty(self, index: int) -> Json:
        """Returns a piece in a stream that adds nothing."""

    def whole(self, index: int, updates: Sequence[SequenceDelta]) -> Json:
        """Returns a whole choice from all its pieces."""

    def prompt_logprobs(self, scored: Sequence[ScoredToken]) -> list[Json | None]:
        """Returns the log-probabilities of a prompt, as vLLM has them: by token id, None for its
        first token. `scored`: the tokens from the second on."""


class ChatShape:
    """Response format of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    has_prompts = False

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        is_parsed: bool = False,
        may_call: bool = False,
        reasoning_names: Sequence[str] = ("reasoning_content",),
    ) -> None:
        """`is_parsed`: choices are made of parts, else of text. `may_call`: there may be calls
        among them. `reasoning_names`: fields that have the reasoning; empty: it is left out."""
        # Null is that of an answer that is a call, and adds to a text as "" does.
        self._begun = None if may_call else ""
        self._reasoning_names = reasoning_names
        self._tokens = tokens
        self._is_parsed = is_parsed
        self._have_calls: set[int] = set()

    def opening(self, index: int) -> Json | None:
        return self._choice(index, {"role": "assistant", "content": self._begun}, [])

    def part(self, update: SequenceDelta) -> Json | None:
        delta = self._message([update])
        if not (delta or update.tokens or update.finish_reason):
            return None
        if update.tokens and not self._is_parsed:
            delta.setdefault("content", "")
        choice = self._choice(update.index, delta, [update])
        if update.tokens:
            choice["logprobs"] = self._logprobs(update.tokens)
        return choice

    def empty(self, index: int) -> Json:
        return self._choice(index, {}, [])

    def prompt_logprobs(self, scored: Sequence[ScoredToken]) -> list[Json | None]:
        return _prompt_logprobs(self._tokens, scored)

    def whole(self, index: int, updates: Sequence[SequenceDelta]) -> Json:
        scored = _tokens_of(updates)
        message = self._message(updates)
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = None if "tool_calls" in message else ""
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None, **message},
            "logprobs": self._logprobs(scored) if scored else None,
            **self._ending(index, updates),
        }

    def _choice(self, index: int, delta: Json, updates: Sequence[SequenceDelta]) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, **self._ending(index, updates)}

    def _message(self, updates: Sequence[SequenceDelta]) -> Json:
        """Returns what pieces of a choice add to its message; fields to which they add nothing are
        left out."""
        if not self._is_parsed:
            text = _text_of(updates)
            return {"content": text} if text else {}
        parts = [part for update in updates for part in update.parts]
        if len(parts) == 1 and isinstance(parts[0], Text):  # hot path
            return {"content": parts[0].text}
        content = "".join([part.text for part in parts if isinstance(part, Text)])
        reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
        calls = _calls_of(parts)
        if calls:
            self._have_calls.add(updates[0].index)
        thought = dict.fromkeys(self._reasoning_names, reasoning)
        message = {"content": content, **thought, "tool_calls": calls}
        return {name: value for name, value in message.items() if value}

    def _ending(self, index: int, updates: Iterable[SequenceDelta]) -> Json:
        ending = _ending_of(updates)
        if ending["finish_reason"] == "stop" and index in self._have_calls:
            ending["finish_reason"] = "tool_calls"
        return ending

    def _logprobs(self, scored: Iterable[ScoredToken]) -> Json:
        content = []
        for token in scored:
            top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
            content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        raw = list(self._tokens[token_id])
        return {"token": self._tokens.text(token_id), "logprob": logprob, "bytes": raw}


class CompletionShape:
    """Response format of `/v1/completions`."""

    id_prefix = "cmpl-"
    whole_name = chunk_name = "text_completion"
    has_prompts = True

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._offsets: dict[int, _Offsets] = {}

    def opening(self, index: int) -> Json | None:  # noqa: ARG002 - all choices begin alike
        return None

    def part(self, update: SequenceDelta) -> Json | None:
        if not (update.text or update.tokens or update.finish_reason):
            return None
        return self.whole(update.index, [update])

    def empty(self, index: int) -> Json:
        return self.whole(index, [])

    def prompt_logprobs(self, scored: Sequence[ScoredToken]) -> list[Json | None]:
        return _prompt_logprobs(self._tokens, scored)

    def whole(self, index: int, updates: Sequence[SequenceDelta]) -> Json:
        scored = _tokens_of(updates)
        return {
            "index": index,
            "text": _text_of(updates),
            "logprobs": self._logprobs(index, scored) if scored else None,
            **_ending_of(updates),
        }

    def _logprobs(self, index: int, scored: Sequence[ScoredToken]) -> Json:
        offsets = self._offsets.setdefault(index, _Offsets(self._tokens))
        return {
            "tokens": [self._name(token.token_id) for token in scored],
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [self._top(token) for token in scored],
            "text_offset": [offsets.next(token.token_id) for token in scored],
        }

    def _top(self, token: ScoredToken) -> Json | None:
        """Returns log-probabilities by token name, the chosen token included."""
        if token.logprob is None:
            return None
        named = {self._name(token_id): logprob for token_id, logprob in token.top}
        named.setdefault(self._name(token.token_id), token.logprob)
        return named

    def _name(self, token_id: int) -> str:
        """Returns the token's text; its bytes if it is no whole character, so names differ."""
        raw = self._tokens[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Offsets:
    """Text offsets of the tokens of a choice, in characters."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._decoder = _Utf8(errors="replace")
        self._num_characters = 0

    def next(self, token_id: int) -> int:
        begin = self._num_characters
        if not self._tokens.is_special(token_id):
            self._num_characters += len(self._decoder.decode(self._tokens[token_id]))
        return begin


def _prompt_logprobs(tokens: TokenBytes, scored: Sequence[ScoredToken]) -> list[Json | None]:
    found: list[Json | None] = [None]
    for token in scored:
        entries: Json = {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": tokens.text(token_id),
            }
            for rank, (token_id, logprob) in enumerate(token.top, 1)
        }
        own = {"logprob": token.logprob, "rank": None, "decoded_token": tokens.text(token.token_id)}
        entries.setdefault(str(token.token_id), own)
        found.append(entries)
    return found


def _calls_of(parts: Iterable[Part]) -> list[Json]:
    """Returns the pieces of calls, one for each call; only the first piece of a call has a name."""
    calls: dict[int, Json] = {}
    for part in parts:
        match part:
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": function,
                }
            case ToolCallArguments(index, json):
                empty = {"index": index, "function": {"arguments": ""}}
                calls.setdefault(index, empty)["function"]["arguments"] += json
    return list(calls.values())


def _text_of(updates: Iterable[SequenceDelta]) -> str:
    return "".join(update.text for update in updates)


def _tokens_of(updates: Iterable[SequenceDelta]) -> list[ScoredToken]:
    return [token for update in updates for token in update.tokens]


def _ending_of(updates: Iterable[SequenceDelta]) -> Json:
    """Returns the finish reason, and what stopped a choice that has ended: vLLM's extension."""
    for update in updates:
        if update.finish_reason is not None:
            return {"finish_reason": update.finish_reason, "stop_reason": update.stop_reason}
    return {"finish_reason": None}
