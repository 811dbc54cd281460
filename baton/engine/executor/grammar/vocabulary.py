"""Vocabulary of a model for grammars, and bitmasks over its tokens."""

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

# Bit i % 32 of word i // 32 says whether token i is allowed.
Mask: TypeAlias = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Returns the length of a bitmask row in 32-bit words."""
    return -(-vocab_size // 32)


def is_allowed(row: Mask, token_id: int) -> bool:
    """Returns whether the mask allows the token; False for an id outside the vocabulary."""
    word, bit = divmod(token_id, 32)
    return 0 <= word < len(row) and bool(row[word] >> bit & 1)


class Vocabulary:
    """Vocabulary of a model, as a tokenizer of llguidance.

    Attributes:
        mark_ids: tokens that llguidance takes for the end of a text: the model's end-of-sequence
            tokens, if some are special tokens.
        end_ids: the model's end-of-sequence tokens.
        ends: bitmask of `end_ids`.
    """

    def __init__(self, file: Path, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Raises `ValueError` if the tokenizer cannot be used with grammars."""
        self.size = vocab_size
        self.end_ids = frozenset(i for i in end_ids if 0 <= i < vocab_size)
        self.tokenizer = _load(file, sorted(self.end_ids))
        self.mark_ids = self.tokenizer.eos_tokens
        self.ends = _bits(self.end_ids, vocab_size)
        self._native_words = mask_words(self.tokenizer.vocab_size)
        known = range(min(vocab_size, self.tokenizer.vocab_size))
        self._text = _bits(set(known) - self.end_ids - set(self.mark_ids), vocab_size)

    def fill(self, matcher: LLMatcher, row: Mask) -> None:
        """Fills `row` with the text tokens that `matcher` allows next. Releases the GIL."""
        assert row.dtype == np.int32
        assert row.shape == self.ends.shape
        if self._native_words == len(row) and row.flags.c_contiguous:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            words = np.empty(self._native_words, np.int32)
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            shared = min(len(words), len(row))
            row[:shared] = words[:shared]
        row &= self._text


def _load(file: Path, end_ids: list[int]) -> LLTokenizer:
    """Loads the tokenizer with only special tokens as the end of a text, which llguidance forbids
    elsewhere. Raises `ValueError` if it has none."""
    tokenizer = LLTokenizer(str(file), eos_token=end_ids or None)
    marks = [i for i in tokenizer.eos_tokens if tokenizer.is_special_token(i)]
    if marks != tokenizer.eos_tokens:
        tokenizer = LLTokenizer(str(file), eos_token=marks or None)
    if not tokenizer.is_special_token(tokenizer.eos_token):
        raise ValueError("its tokenizer has no special token, to mark the end of a text")
    return tokenizer


def _bits(token_ids: AbstractSet[int], vocab_size: int) -> Mask:
    flags = np.zeros(32 * mask_words(vocab_size), np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
