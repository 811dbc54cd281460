"""Incremental detokenizer and stop strings: splits no character, shows no stop string.

Knows nothing of requests or workers.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from tokenizers import Tokenizer, decoders

# The decoder's output for bytes that are no character (yet).
_INCOMPLETE = "�"

# Tokens without complete text that are kept at most, apart from the last ones, which may be bytes
# of one character of at most 4.
_MAX_PENDING = 8
_CHARACTER_TOKENS = 4

_NONE: Mapping[int, str] = MappingProxyType({})


class _LoneTexts(dict[int, str]):
    """Cache of the texts of single tokens that are whole characters; empty for a token without a
    text of its own.

    Attributes:
        skipped: special tokens, which have no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.skipped = frozenset(i for i, token in added.items() if token.special)
        # Byte-level decoders concatenate the tokens' bytes; others look at neighbours.
        self._is_bytes = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def __missing__(self, token_id: int) -> str:
        text = ""
        if self._is_bytes and token_id not in self.skipped:
            text = self._tokenizer.decode([token_id], skip_special_tokens=True)
        self[token_id] = "" if _INCOMPLETE in text else text
        return self[token_id]


_lone_texts = cache(_LoneTexts)


class Detokenizer:
    """Incremental detokenizer of one sequence.

    A token is decoded together with the ones before it, because the text of a token can depend on
    its neighbours; only the text that is new and complete is returned. The cost of a token does not
    grow with the length of the sequence, also of one whose bytes are no characters.

    Args:
        kept: special tokens that have a text, by token id.
        after: tokens whose text the sequence continues: some decoders drop a space at the beginning
            of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, kept: Mapping[int, str] = _NONE, after: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._lone = _lone_texts(tokenizer)
        # Tokens shown last, on which the text of the next may depend.
        self._context = [t for t in after[-_MAX_PENDING:] if t not in self._lone.skipped]
        # They may begin amid a character, for which some decoders write no byte behind it either.
        while self._context and self._decode(self._context).endswith(_INCOMPLETE):
            del self._context[0]
        self._pending: list[int] = []  # tokens whose text is not shown yet

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        lone = self._lone[token_id]
        if lone and not self._pending:
            self._context = [token_id]
            return lone  # hot path
        if token_id in self._lone.skipped:
            kept = self._kept.get(token_id, "")
            return self.finish() + kept if kept and self._pending else kept
        self._pending.append(token_id)
        text = self._new_text(self._pending)
        if text and not text.endswith(_INCOMPLETE):
            self._show(len(self._pending))
            return text
        return self._push_broken(text) if len(self._pending) > _MAX_PENDING else ""

    def finish(self) -> str:
        """Returns the remaining text, incomplete characters as the decoder writes them."""
        text = self._new_text(self._pending)
        self._show(len(self._pending))
        return text

    def _push_broken(self, text: str) -> str:
        """Returns what is final of the `text` of all pending tokens: no later byte can complete a
        character that begins before the last tokens."""
        count = len(self._pending) - _CHARACTER_TOKENS
        final = self._new_text(self._pending[:count])
        if not text.startswith(final):  # cuts a character
            return ""
        self._show(count)
        return final

    def _show(self, count: int) -> None:
        self._context, self._pending = self._pending[:count], self._pending[count:]

    def _new_text(self, token_ids: list[int]) -> str:
        """Returns the text that `token_ids` add after the context."""
        before = self._decode(self._context)
        return self._decode(self._context + token_ids)[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def text_after(tokenizer: Tokenizer, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Returns the text that tokens add to that of the tokens before them."""
    detokenizer = Detokenizer(tokenizer, after=before)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()


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
