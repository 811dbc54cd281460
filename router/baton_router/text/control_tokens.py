"""Control tokens in texts of users: their strings are found and cut.

A control token is one that the tokenizer marks as special, or that ends an answer. A text that is
cut within such a token's string and tokenized in parts has only ordinary tokens, which decode to
the same text. Knows nothing about chats.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

_START_CHARS = 4


class ControlTokens:
    """Control tokens of one tokenizer.

    Args:
        ids: of control tokens that the tokenizer may not mark as special.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A token of one character cannot be cut; such ones are text.
        tokens = [
            token
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if (token.special or token_id in ids) and len(token.content) > 1
        ]
        self._contents = frozenset(token.content for token in tokens)
        # Models have hundreds of control tokens that begin alike.
        self._by_start: dict[str, list[str]] = {}
        for content in self._contents:
            self._by_start.setdefault(content[:_START_CHARS], []).append(content)
        self._joined = "\n".join(self._contents)
        self._max_chars = max(map(len, self._contents), default=0)
        ends = [(text[:at], text[at:]) for text in self._contents for at in range(1, len(text))]
        self._beginnings = frozenset(beginning for beginning, _ in ends)
        self._rests = frozenset(rest for _, rest in ends)
        is_normalized = tokenizer.normalizer is not None and any(t.normalized for t in tokens)
        self._finder = _finder(tokenizer, tokens) if is_normalized else None
        self._telling = _telling(self._contents, is_normalized=is_normalized)

    def cuts(self, text: str) -> set[int]:
        """Returns the positions at which `text` must be cut so that it has no control token."""
        return {start + 1 for start, _ in self._spans(text)}

    def within(self, text: str) -> set[int]:
        """Returns the positions of `text` that are within a control token."""
        return {at for start, end in self._spans(text) for at in range(start + 1, end)}

    def telling(self, text: str) -> Iterator[int]:
        """Yields the places of characters that tell of a control token: each of them has one, and
        ordinary text has few."""
        return (match.start() for match in self._telling.finditer(text))

    def may_complete(self, text: str) -> bool:
        """Returns whether `text`, without spaces around it, and a text beside it may be one."""
        bare = text.strip()
        sizes = range(1, min(len(bare), self._max_chars) + 1)
        return any(
            bare[:size] in self._rests or bare[-size:] in self._beginnings for size in sizes
        ) or (0 < len(bare) < self._max_chars and bare in self._joined)

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the begin and end of each control token in `text`."""
        for beginning, contents in self._by_start.items():
            for content in contents if beginning in text else ():
                at = text.find(content)
                while at >= 0:
                    yield at, at + len(content)
                    at = text.find(content, at + 1)
        if self._finder is not None:
            encoding = self._finder.encode(text)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                token = text[start:end]
                if token_id != 0 and len(token.strip()) > 1:
                    begin = start + len(token) - len(token.lstrip())
                    yield begin, begin + len(token.strip())


def _finder(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> Tokenizer:
    """Returns a tokenizer whose tokens are `tokens`, and 0 for any text between them."""
    finder = Tokenizer(WordLevel({"": 0}, unk_token=""))
    if tokenizer.normalizer is not None:
        finder.normalizer = tokenizer.normalizer
    finder.add_special_tokens(list(tokens))
    return finder


def _telling(contents: Iterable[str], *, is_normalized: bool) -> re.Pattern[str]:
    characters = set[str]()
    for content in contents:
        punctuation = {c for c in content if not (c.isalnum() or c.isspace() or c in "_-")}
        characters |= punctuation or set(content)
    # Of any punctuation a normalizer may make that of a token.
    others = [r"[^\w\s]"] if is_normalized else []
    return re.compile("|".join([*map(re.escape, sorted(characters)), *others]) or r"(?!)")
