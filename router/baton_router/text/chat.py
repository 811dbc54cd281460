"""Chat tokenization: the chat template's control tokens, and users' texts as text.

A template puts texts of users between control tokens. What users write must not become one, or a
message could end early and another role seem to speak. So the positions at which texts of users
must be cut are marked in them by a character before the template is rendered, and found again in
what it rendered. A template may also delete pieces of a text, such as reasoning, so that what is
left makes a control token; where it searches a text for such pieces, each character that tells of a
control token has a mark on both sides.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from baton.errors import InvalidArgumentError
from baton_router.text.control_tokens import ControlTokens
from baton_router.text.model_card import ModelCard
from baton_router.text.token_cache import CachingTokenizer

# Roles and other values that templates compare with, and that some make a control token of.
_CONSTANTS = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
) | {"image", "text"}  # types of parts
# Private-use characters, of which one that is in no text is the mark.
_MARKS = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Conversation as text.

    Attributes:
        cuts: positions in the text at which it is cut before it is tokenized.
    """

    text: str
    cuts: frozenset[int] = frozenset()


class ChatTokenizer:
    """Renders and tokenizes conversations for one model.

    Args:
        allow_special_tokens: leave control tokens in texts of users what they are.
        cache_bytes: maximum bytes of tokenized pieces of conversations that are kept; 0: none.
    """

    def __init__(
        self, card: ModelCard, *, allow_special_tokens: bool = False, cache_bytes: int = 0
    ) -> None:
        self._card = card
        searched = chain.from_iterable(t.searched_texts for t in card.templates)
        self._searched = tuple(dict.fromkeys(searched))
        self._tokens = None
        if not allow_special_tokens:
            self._tokens = ControlTokens(card.tokenizer, card.control_token_ids)
        self.pieces = CachingTokenizer(card.tokenizer, card.template_tokens, cache_bytes)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continues_answer: bool = False,
        begins_answer: bool = True,
    ) -> RenderedChat:
        """Renders a conversation; arguments and errors are those of `ModelCard.render`.
        `continues_answer`: the last message is the beginning of the answer, with which the text
        ends. `begins_answer`: else it ends with what the template puts before one."""
        begins_answer = begins_answer and not continues_answer
        given = list(messages), list(tools), dict(variables or {})
        texts, keys = set(_texts(given)), set(_keys(given))
        tokens = self._tokens
        if tokens is not None and not self._needs_marks(texts, keys):
            tokens = None
        if tokens is None and not continues_answer:
            text = self._card.render(*given, adds_generation_prompt=begins_answer)
            return RenderedChat(text)
        inner, outer, end = _marks_for("\n".join((*texts, *keys)))
        if tokens is not None:
            changed_texts = {text: self._marked(text, inner, outer) for text in texts}
            changed_keys = {key: _with_marks(key, {inner: tokens.cuts(key)}) for key in keys}
            given = _mapped(given, changed_texts, changed_keys)
        if continues_answer:
            given = (_ended(given[0], end), *given[1:])
        rendered = self._card.render(*given, adds_generation_prompt=begins_answer)
        text, found = _without(rendered, inner, outer, end)
        formed = set[int]()
        if tokens is not None and found[outer]:
            formed = found[outer] & tokens.within(text)
        chat = RenderedChat(text, frozenset(found[inner] | formed))
        return _up_to(chat, found[end]) if continues_answer else chat

    def encode(self, chat: RenderedChat, salt: bytes | None = None, holder: str = "") -> list[int]:
        """Returns the tokens of a rendered conversation. `salt`, `holder`: as of
        `CachingTokenizer.encode`."""
        return self.pieces.encode(chat.text, chat.cuts, salt, holder)

    def _needs_marks(self, texts: Collection[str], keys: Collection[str]) -> bool:
        """Returns whether one of the strings has a control token, or may be one together with what
        a template puts beside it, or without what it deletes."""
        assert self._tokens is not None
        return (
            bool(self._tokens.cuts("\n".join((*texts, *keys))))
            or any(map(self._may_complete, texts))
            or any(map(self._frayed, texts))
        )

    def _may_complete(self, text: str) -> bool:
        assert self._tokens is not None
        return text not in _CONSTANTS and self._tokens.may_complete(text)

    def _frayed(self, text: str) -> set[int]:
        """Returns the positions in `text` at which it may end or begin after the template has
        deleted a piece of it: around each character that tells of a control token, outside of what
        the template searches for. Empty if it finds nothing of that."""
        assert self._tokens is not None
        searched = [piece for piece in self._searched if piece in text]
        if not searched:
            return set()
        found = {at for piece in searched for at in _places(text, piece)}
        telling = (at for at in self._tokens.telling(text) if at not in found)
        return {place for at in telling for place in (at, at + 1)}

    def _marked(self, text: str, inner: str, outer: str) -> str:
        """Returns `text` with `inner` where it must be cut, and `outer` where a template may leave
        an end of it, if that and what is beside it may be a control token: around what is left when
        it trims, and where it deletes."""
        assert self._tokens is not None
        ends = self._frayed(text)
        if self._may_complete(text):
            ends |= {len(text) - len(text.lstrip()), len(text.rstrip())}
        return _with_marks(text, {inner: self._tokens.cuts(text), outer: ends})


def _places(text: str, searched: str) -> Iterator[int]:
    """Yields the places of all characters in `text` that are part of what is searched for."""
    at = text.find(searched) if searched.strip() else -1
    while at >= 0:
        yield from range(at, at + len(searched))
        at = text.find(searched, at + 1)


def _texts(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value, but for the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _keys(value: Any) -> Iterator[str]:
    """Yields the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from _keys(item)


def _mapped(value: Any, texts: Mapping[str, str], keys: Mapping[str, str]) -> Any:
    """Returns a JSON value with its strings and the keys of its objects replaced."""
    if isinstance(value, str):
        return texts[value]
    if isinstance(value, dict):
        return {keys[key]: _mapped(item, texts, keys) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, texts, keys) for item in value]
    return value


def _ended(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    """Returns the messages with a mark at the end of the last one's text."""
    *others, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*others, {**last, "content": content + mark}]
    *parts, part = content
    return [*others, {**last, "content": [*parts, {**part, "text": part["text"] + mark}]}]


def _up_to(chat: RenderedChat, ends: Collection[int]) -> RenderedChat:
    """Returns a rendered conversation up to the last one of these places. Raises
    `InvalidArgumentError` if there is none."""
    if not ends:
        raise InvalidArgumentError(
            "input.chat.messages", "end with an answer that the model's chat template leaves out"
        )
    end = max(ends)
    return RenderedChat(chat.text[:end], frozenset(at for at in chat.cuts if at < end))


def _marks_for(text: str) -> tuple[str, str, str]:
    """Returns three characters that are nowhere in `text`, nor as a template escapes them. Raises
    `InvalidArgumentError`."""
    free = (mark for mark in map(chr, _MARKS) if mark not in text and _escaped(mark) not in text)
    try:
        return next(free), next(free), next(free)
    except StopIteration:
        raise InvalidArgumentError(
            "input.chat.messages", "have every character of Unicode's private use area"
        ) from None


def _escaped(mark: str) -> str:
    """Returns a mark as a template writes it that turns values into ASCII JSON."""
    return json.dumps(mark)[1:-1]


def _with_marks(text: str, places: Mapping[str, Collection[int]]) -> str:
    """Returns `text` with each mark at its places."""
    marks = sorted((at, mark) for mark, places_of in places.items() for at in places_of)
    ends = [at for at, _ in marks]
    pieces = [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
    return pieces[0] + "".join(
        mark + piece for (_, mark), piece in zip(marks, pieces[1:], strict=True)
    )


def _without(rendered: str, *marks: str) -> tuple[str, dict[str, set[int]]]:
    """Returns a text without the marks in it, and their positions in what is returned."""
    forms = {form: mark for mark in marks for form in (mark, _escaped(mark))}
    kept, places = [], {mark: set[int]() for mark in marks}
    length, start = 0, 0
    for match in re.finditer("|".join(map(re.escape, forms)), rendered):
        kept.append(rendered[start : match.start()])
        length += len(kept[-1])
        places[forms[match[0]]].add(length)
        start = match.end()
    return "".join([*kept, rendered[start:]]), places
