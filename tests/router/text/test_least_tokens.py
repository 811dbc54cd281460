"""Least number of tokens of a text, against what tokenizers of several kinds make of it."""

import sys
import unicodedata
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from baton_router.text.least_tokens import NFC_SHRINKS, least_tokens
from tests.support.router.tokenizers import (
    FRAGMENTS,
    bytes_like,
    metaspace,
    normalized,
    spaces,
    tiny,
    words,
)

# Characters that NFC makes a third of, and less.
SHRINKING = "\u1fbe\u0308\u0301\u212a\u1fef"


def gemma() -> Tokenizer:
    """As of Gemma: spaces are replaced, and text without tokens is bytes."""
    tokenizer = Tokenizer.from_str(metaspace().tokenizer.to_str())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def llama_2() -> Tokenizer:
    """As of Llama 2: a space is put before, spaces are replaced."""
    tokenizer = gemma()
    replaced = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(replaced)
    tokenizer.pre_tokenizer = None
    return tokenizer


def qwen() -> Tokenizer:
    """As of Qwen: NFC, then bytes."""
    tokenizer = bytes_like()
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return tokenizer


def abbreviating() -> Tokenizer:
    """Makes one character of twenty."""
    tokenizer = qwen()
    tokenizer.normalizer = normalizers.Replace("hello world, is it a", "x")
    return tokenizer


def trimming() -> Tokenizer:
    tokenizer = qwen()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def replacing_by_pattern() -> Tokenizer:
    tokenizer = qwen()
    tokenizer.normalizer = normalizers.Replace(Regex("l+"), "l")
    return tokenizer


def splitting() -> Tokenizer:
    """Leaves spaces out."""
    tokenizer = qwen()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.WhitespaceSplit(), bytes_of]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = qwen()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Split("l", "removed"), bytes_of]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def without_alphabet() -> Tokenizer:
    """Drops characters that it has no token for."""
    tokenizer = Tokenizer(models.BPE({"h": 0, "e": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def unigram() -> Tokenizer:
    """As of T5: one token for all unknown characters in a row."""
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("h", -1.0), ("e", -2.0)], 0))


def cutting() -> Tokenizer:
    tokenizer = qwen()
    tokenizer.enable_truncation(8)
    return tokenizer


def long_added() -> Tokenizer:
    """Has an added token that is longer than all others, and longer still before NFC."""
    tokenizer = qwen()
    tokenizer.add_tokens([AddedToken("\u0390" * 50, normalized=True)])
    return tokenizer


BOUNDED = {
    "tiny": lambda: tiny().tokenizer,
    "metaspace": lambda: metaspace().tokenizer,
    "gemma": gemma,
    "llama_2": llama_2,
    "qwen": qwen,
    "abbreviating": abbreviating,
    "long_added": long_added,
}
UNBOUNDED = {
    "spaces": lambda: spaces().tokenizer,
    "words": lambda: words().tokenizer,
    "trimming": trimming,
    "replacing_by_pattern": replacing_by_pattern,
    "splitting": splitting,
    "removing": removing,
    "without_alphabet": without_alphabet,
    "unigram": unigram,
    "cutting": cutting,
}
ALL = {**BOUNDED, **UNBOUNDED, "normalized": lambda: normalized().tokenizer}

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*FRAGMENTS, *SHRINKING, "\u0390" * 50, "hello world, is it a"]), st.text()
    ).flatmap(lambda piece: st.integers(1, 40).map(lambda times: piece * times)),
    max_size=12,
).map("".join)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return ALL[name]()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25)
@given(text=TEXTS)
@example(text=SHRINKING[:3] * 1000)
@example(text=SHRINKING[3:] * 1000)
@example(text=SHRINKING[:3] * 50)
@example(text="hello world, is it a" * 1000)
@example(text=" " * 5000 + "</s>")
@example(text="l" * 5000)
@example(text="\u1234" * 5000)
def test_no_text_has_fewer_tokens_than_its_least(name, text):
    tokenizer = tokenizer_of(name)
    assert least_tokens(tokenizer, text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("text", ["hello world " * 2000, "Grüße, 世界 " * 2000])
def test_long_text_has_tokens_by_its_bytes(name, text):
    assert least_tokens(tokenizer_of(name), text) >= 50


@pytest.mark.parametrize("name", UNBOUNDED)
def test_least_is_none_where_a_text_may_lose_characters(name):
    assert least_tokens(tokenizer_of(name), "hello world " * 2000) == 0


def test_normalizer_without_bound_keeps_ascii():
    assert least_tokens(tokenizer_of("normalized"), "hello world " * 2000) >= 50
    assert least_tokens(tokenizer_of("normalized"), "hellö world " * 2000) == 0


def test_nfc_makes_one_byte_of_few():
    points = (at for at in range(sys.maxunicode + 1) if not 0xD800 <= at < 0xE000)
    composed = {one for one in map(chr, points) if not unicodedata.is_normalized("NFD", one)}
    parts_of = {one: unicodedata.normalize("NFD", one) for one in composed}
    parts_of |= {part: part for parts in parts_of.values() for part in parts}
    most = dict[str, int]()  # bytes of a character that NFD makes this one character of
    for one, parts in parts_of.items():
        if len(parts) == 1:
            most[parts] = max(most.get(parts, 0), len(one.encode()))
    for one, parts in parts_of.items():
        bytes_before = sum(most[part] for part in parts)
        assert len(one.encode()) <= bytes_before
        if unicodedata.is_normalized("NFC", one):
            assert bytes_before <= NFC_SHRINKS * len(one.encode())
