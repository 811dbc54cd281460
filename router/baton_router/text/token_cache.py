"""Tokenization in pieces, which are kept: a turn of a conversation tokenizes only what is new.

A tokenizer splits a text at its added tokens before all else (`AddedVocabulary` of the library
tokenizers). So a piece that begins with such a token has the same tokens in every text, whatever is
before it. Templates write one at each turn.
"""

import re
import sys
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from baton_router.text.salted_cache import SaltedCache

# Shorter texts are tokenized about as fast as their pieces are found.
_PIECES_FROM_CHARS = 2048
# Of a piece that is kept, beside its text and its tokens.
_OVERHEAD_BYTES = 300


class PieceKey(NamedTuple):
    """Key of a piece's tokens; `salt`: of the tenant's caches."""

    salt: bytes
    text: str


class CachingTokenizer:
    """Tokenizer of texts that begin as earlier ones. From any thread.

    Args:
        separators: strings of added tokens at which a text may be split, such as those that a
            template writes. Those that depend on what is beside them are left out.
        max_bytes: maximum bytes of the pieces that are kept, and of their tokens.
        from_chars: shorter texts are tokenized whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        separators: Collection[str] = (),
        max_bytes: int = 0,
        from_chars: int = _PIECES_FROM_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        is_text = tokenizer.encode_special_tokens  # special tokens are no tokens in texts
        decoder = tokenizer.get_added_tokens_decoder()
        added = [token for token in decoder.values() if not (is_text and token.special)]
        chosen = [t for t in added if t.content in separators and _is_apart(t, added)]
        self._separator = re.compile("|".join(re.escape(t.content) for t in chosen) or r"(?!)")
        apart = chain(chosen, (t for t in added if t.special and _is_apart(t, added)))
        self._barrier = next((token.content for token in apart if not token.rstrip), "")
        self._is_kept = bool(chosen and max_bytes)
        self._cache: SaltedCache[PieceKey, array[int]] = SaltedCache(max_bytes, _num_bytes)
        self._from_chars = from_chars
        self._lock = threading.Lock()

    def encode(
        self, text: str, cuts: Iterable[int] = (), salt: bytes | None = None, holder: str = ""
    ) -> list[int]:
        """Returns the tokens of `text`, without those that the tokenizer adds by default.

        Args:
            cuts: positions at which it is cut: what is beside one another there is no token.
            salt: of the tenant whose pieces are taken and kept; None: none are.
            holder: the tenant's name.
        """
        first, *others = _parts(text, cuts)
        # After a token a part is tokenized as within a text: some tokenizers add a space to a text.
        skipped = 1 if self._barrier else 0
        parts = [(first, 0), *((self._barrier + part, skipped) for part in others)]
        if salt is not None and self._is_kept and len(text) >= self._from_chars:
            parts = [piece for part in parts for piece in self._pieces(*part)]
            ids_of = self._kept({piece for piece, _ in parts}, salt, holder)
        else:
            ids_of = self._encoded({part for part, _ in parts})
        ids: list[int] = []
        for part, num_skipped in parts:
            ids += ids_of[part][num_skipped:]
        return ids

    def drop(self, salt: bytes | None) -> None:
        """Drops the pieces of the tenants of one salt; None: all."""
        with self._lock:
            self._cache.drop(salt)

    def _pieces(self, part: str, num_skipped: int) -> Iterator[tuple[str, int]]:
        """Yields the pieces of a part, each with the number of its first tokens that are not the
        text's."""
        starts = (match.start() for match in self._separator.finditer(part))
        for piece in _parts(part, filter(None, starts)):
            yield piece, num_skipped
            num_skipped = 0

    def _kept(self, pieces: Collection[str], salt: bytes, holder: str) -> dict[str, Sequence[int]]:
        """Returns the tokens of each piece, of which new ones are kept."""
        with self._lock:
            found = {piece: self._cache.get(PieceKey(salt, piece)) for piece in pieces}
        new = self._encoded([piece for piece, ids in found.items() if ids is None])
        with self._lock:
            for piece, ids in new.items():
                self._cache.put(PieceKey(salt, piece), array("I", ids), holder)
        return {**new, **{piece: ids for piece, ids in found.items() if ids is not None}}

    def _encoded(self, texts: Collection[str]) -> dict[str, Sequence[int]]:
        # As `encode`, without the tokens' offsets in the text, which take a quarter of the time and
        # are not needed.
        batch = list(texts)
        encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        return {text: encoding.ids for text, encoding in zip(batch, encodings, strict=True)}


def _is_apart(token: AddedToken, added: Iterable[AddedToken]) -> bool:
    """Returns whether every occurrence of a token's string in a text is that token: no other one
    has it within, or ends as it begins, and it is taken as it stands."""
    text = token.content
    if token.normalized or token.single_word or token.lstrip or text[:1].isspace():
        return False
    return not any(
        text in other.content or any(map(other.content.endswith, _beginnings(text, other.content)))
        for other in added
        if other.content != text
    )


def _beginnings(text: str, other: str) -> Iterator[str]:
    """Yields the beginnings of `text` that end with the last character of `other`."""
    return (text[: at + 1] for at in range(len(text) - 1) if text[at] == other[-1])


def _parts(text: str, cuts: Iterable[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


def _num_bytes(key: PieceKey, ids: "array[int]") -> int:
    return sys.getsizeof(key.text) + ids.itemsize * len(ids) + _OVERHEAD_BYTES
