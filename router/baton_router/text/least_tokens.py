"""Least number of tokens of a text, by its bytes, before it is tokenized.

Exact, or 0: the longest token of a tokenizer bounds the bytes that each token of a text stands for
only if nothing of the text is lost on the way. A tokenizer that deletes, or that makes one unknown
token of many characters, has no such bound.
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

NFC_SHRINKS = 4.0
"""Bytes of a text that NFC makes one byte of, at most. They are 3.5 of U+0390."""

_KEEP_ASCII = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"))
_KEEP_TEXT = frozenset(("ByteLevel", "Metaspace", "Digits"))
_BYTE_ALPHABET = frozenset(ByteLevel.alphabet())
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class _TokenSpan:
    """Bytes of text that one token of a tokenizer stands for, at most. Infinite: no bound is known.

    Attributes:
        of_ascii: in a text of ASCII alone.
    """

    of_ascii: float
    of_other: float


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Returns a number of tokens that `text` has at least; 0 if no bound is known."""
    span = _span(tokenizer)
    return math.ceil(len(text.encode()) / (span.of_ascii if text.isascii() else span.of_other))


@functools.cache
def _span(tokenizer: Tokenizer) -> _TokenSpan:
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return _TokenSpan(math.inf, math.inf)
    longest = max((_longest_piece(tokenizer), *_added_sizes(tokenizer, added)))
    of_ascii, of_other = _shrinking(_steps(tokenizer.normalizer, "normalizers"))
    return _TokenSpan(longest * of_ascii, longest * of_other)


def _longest_piece(tokenizer: Tokenizer) -> float:
    """Returns the bytes of normalized text that a token of the model stands for, at most."""
    model, steps = tokenizer.model, list(_steps(tokenizer.pre_tokenizer, "pretokenizers"))
    if not (isinstance(model, BPE) and all(map(_keeps_text, steps))):
        return math.inf
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return math.inf
    vocab = tokenizer.get_vocab(with_added_tokens=False).keys()
    if any(step["type"] == "ByteLevel" for step in steps):
        return max(map(len, vocab)) if vocab >= _BYTE_ALPHABET else math.inf
    is_complete = model.byte_fallback and vocab >= _BYTE_TOKENS
    return max(len(piece.encode()) for piece in vocab) if is_complete else math.inf


def _added_sizes(tokenizer: Tokenizer, added: Iterable[AddedToken]) -> Iterator[int]:
    """Yields the bytes of added tokens, as they stand and normalized: either is searched for."""
    for token in added:
        yield len(token.content.encode())
        if tokenizer.normalizer is not None:
            yield len(tokenizer.normalizer.normalize_str(token.content).encode())


def _shrinking(steps: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns how many bytes of a text these normalizers make one byte of, at most: of a text of
    ASCII alone, and of another."""
    of_ascii = of_other = 1.0
    is_ascii = True
    for step in steps:
        keeps_ascii = step["type"] in _KEEP_ASCII
        factor = _factor(step)
        of_ascii *= 1.0 if is_ascii and keeps_ascii else factor
        of_other *= factor
        is_ascii &= keeps_ascii
    return of_ascii, of_other


def _factor(step: Mapping[str, Any]) -> float:
    """Returns how many bytes of any text a normalizer makes one byte of, at most."""
    match step:
        case {"type": "NFC"}:
            return NFC_SHRINKS
        case {"type": "Prepend"}:
            return 1.0
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if content:
            return max(1.0, len(pattern.encode()) / len(content.encode()))
    return math.inf


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer leaves nothing of a text out."""
    is_kept = step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"
    return is_kept or step["type"] in _KEEP_TEXT


def _steps(part: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yields the descriptions of a normalizer or pre-tokenizer, in order; of None none. `name`: of
    the parts of a sequence."""
    return _flat(json.loads(part.__getstate__()), name) if part is not None else iter(())


def _flat(step: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[name]:
        yield from _flat(part, name)
