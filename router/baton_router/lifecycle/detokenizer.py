"""Incremental detokenizer and stop strings: splits no character, shows no stop string.

Knows nothing of requests or workers.
"""

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders

# The decoder's output for bytes that are no character (yet).
_INCOMPLETE = "�"


class _LoneTexts(dict[int, str]):
    """Cache of the texts of single tokens that are whole characters; empty for a token without a
    text of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Byte-level decoders concatenate the tokens' bytes; others look at neighbours.
        self._is_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str:
        text = ""
        if self._is_bytes:
            text = self._tokenizer.decode([token_id], skip_special_tokens=True)
        self[token_id] = "" if _INCOMPLETE in text else text
        return self[token_id]


_lone_texts = cache(_LoneTexts)


class Detokenizer:
    """Incremental detokenizer of one sequence.

    A token is decoded together with the ones before it, because the text of a token can depend on
    its neighbours; only the text that is new and complete is returned.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lone = _lone_texts(tokenizer)
        self._token_ids: list[int] = []
        self._context = 0  # index of the first token still decoded as context
        self._shown = 0  # tokens before this index were returned

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        lone = self._lone[token_id] if self._shown == len(self._token_ids) else ""
        self._token_ids.append(token_id)
        text = lone or self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        if text:
            self._context, self._shown = self._shown, len(self._token_ids)
        return text

    def finish(self) -> str:
        """Returns the remaining text, incomplete characters as the decoder writes them."""
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
    """Stop string matcher, which holds back text that could be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that may be shown. A match sets `matched`, and no text follows."""
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
        """Returns the text that was held back but completed no stop string."""
        shown, self._held = self._held, ""
        return shown if self.matched is None else ""

    def _num_held_back(self) -> int:
        """Returns the length of the longest suffix of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0
