"""Tokens to text as they come: characters never split, stop strings never shown.

Knows nothing of requests or workers.
"""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders

# What the decoder writes for bytes that are no character (yet).
_INCOMPLETE = "�"


class _LoneTexts(dict[int, str]):
    """The text of each token that is whole characters, as far as they were asked for; empty where
    a token has none of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Text is the tokens' bytes in a row here; other decoders look at neighbours.
        self._is_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str:
        text = ""
        if self._is_bytes:
            text = self._tokenizer.decode([token_id], skip_special_tokens=True)
        self[token_id] = "" if _INCOMPLETE in text else text
        return self[token_id]


_lone_texts = cache(_LoneTexts)


class Detokenizer:
    """Decodes one sequence incrementally.

    A token is decoded together with the ones before it, because the text of a token can depend on
    its neighbours; only the text that is new and complete is given out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lone = _lone_texts(tokenizer)
        self._token_ids: list[int] = []
        self._context = 0  # the first token that is still decoded as context
        self._shown = 0  # tokens before this one are given out

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        lone = self._lone[token_id] if self._shown == len(self._token_ids) else ""
        self._token_ids.append(token_id)
        text = lone or self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        if text:
            self._context, self._shown = self._shown, len(self._token_ids)
        return text

    def finish(self) -> str:
        """What is left, incomplete characters as the decoder writes them."""
        text = self._new_text()
        self._context = self._shown = len(self._token_ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._token_ids[self._context : self._shown])
        text = self._decode(self._token_ids[self._context :])
        return text[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class StopStrings:
    """Watches a text for stop strings and holds back what could be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. After a match, `matched` is set and nothing more is shown."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            at, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._num_held_back()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back for nothing."""
        shown, self._held = self._held, ""
        return shown if self.matched is None else ""

    def _num_held_back(self) -> int:
        """The longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0
