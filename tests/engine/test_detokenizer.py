from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton.models import locate
from baton.models.detokenizer import Detokenizer, StopStrings, text_after


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(locate("tiny")) / "tokenizer.json"))


def pieces_of(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer())
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.finish()]


def encoded(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "text",
    [
        "def f(): pass",
        "naïve café",
        "你好世界",
        "👩‍👩‍👧‍👦 and 🇨🇭",
        "\U0001f600" * 5,
        "a\u0301b",
        "  \n\t ",
    ],
    ids=["code", "accents", "CJK", "joined emoji", "emoji", "combining", "blanks"],
)
def test_detokenizer_pieces_join_to_text_of_whole_characters(text):
    pieces = pieces_of(encoded(text))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_detokenizer_shows_character_with_its_last_token():
    token_ids = encoded("世")
    assert len(token_ids) > 1, "one token, and nothing to see"
    pieces = pieces_of(token_ids)
    assert pieces[: len(token_ids)] == [""] * (len(token_ids) - 1) + ["世"]


def test_detokenizer_shows_incomplete_character_at_end():
    token_ids = encoded("ab世")[:-1]
    assert "".join(pieces_of(token_ids)) == tokenizer().decode(token_ids)
    assert pieces_of(token_ids)[-1].startswith("�")


def test_detokenizer_hides_special_tokens():
    end = tokenizer().token_to_id("<|im_end|>")
    assert "".join(pieces_of([*encoded("ab"), end, *encoded("cd")])) == "abcd"


@given(st.lists(st.integers(0, tokenizer().get_vocab_size() - 1), max_size=40))
def test_detokenizer_pieces_equal_decoded_tokens(token_ids):
    assert "".join(pieces_of(token_ids)) == tokenizer().decode(token_ids, skip_special_tokens=True)


BROKEN = [i for i in range(tokenizer().get_vocab_size()) if tokenizer().decode([i]) == "�"]


@given(st.lists(st.sampled_from([*BROKEN, *encoded("aé世")]), min_size=20, max_size=60))
def test_broken_characters_are_decoded_a_few_tokens_at_a_time(token_ids):
    detokenizer, pieces = Detokenizer(tokenizer()), []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        assert len(detokenizer._pending) < 16
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer().decode(token_ids)


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer as Llama 2's, which writes unknown characters as tokens of one byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"<unk>": 256, "▁a": 257, "b": 258}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>"])
    return made


ENDS = [tokenizer().token_to_id("<|im_end|>")]


@pytest.mark.parametrize(
    ("vocabulary", "token_ids"),
    [(tokenizer, [*BROKEN, *ENDS]), (byte_fallback, [*range(256), *range(256, 260)])],
    ids=["special tokens", "byte fallback"],
)
@given(data=st.data())
def test_detokenizer_keeps_a_few_tokens_of_any_vocabulary(vocabulary, token_ids, data):
    tokens = data.draw(st.lists(st.sampled_from(token_ids), min_size=20, max_size=60))
    detokenizer, pieces = Detokenizer(vocabulary()), []
    for token_id in tokens:
        pieces.append(detokenizer.push(token_id))
        assert len(detokenizer._pending) + len(detokenizer._context) < 32
    if vocabulary is tokenizer:  # byte fallback decodes a run of bytes as a whole, or not at all
        assert "".join([*pieces, detokenizer.finish()]) == vocabulary().decode(tokens)


@given(st.text("aé世b\U0001f600", max_size=30))
def test_detokenizer_restores_text_of_byte_fallback(text):
    detokenizer = Detokenizer(byte_fallback())
    pieces = [detokenizer.push(token_id) for token_id in byte_fallback().encode(text).ids]
    assert "".join([*pieces, detokenizer.finish()]) == text


class Counting(Detokenizer):
    """Counts the tokens that are decoded."""

    num_decoded = 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super()._decode(token_ids)


@pytest.mark.parametrize("byte", [0x80, 0xE4], ids=["continues none", "begins a character"])
def test_token_without_text_costs_no_more_after_many(byte):
    detokenizer, counts = Counting(byte_fallback()), [0]
    for _ in range(400):
        detokenizer.push(byte)
        counts.append(detokenizer.num_decoded)
    costs = [after - before for before, after in pairwise(counts)]
    assert max(costs[200:]) == max(costs[:200]) < 60
    assert sum(costs) < 25 * len(costs)  # 256 tokens on the event loop take less than 10 ms


@given(st.text(max_size=30))
@example("�")
@example("x�y")
def test_detokenizer_restores_any_text(text):
    token_ids = encoded(text)
    assert "".join(pieces_of(token_ids)) == tokenizer().decode(token_ids)


def shown(stop: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    watch = StopStrings(stop)
    parts = [watch.push(piece) for piece in pieces]
    parts.append(watch.finish())
    return parts, watch.matched


@pytest.mark.parametrize(
    ("stop", "pieces", "parts", "matched"),
    [
        (("\n\n",), ["a", "\n", "\nb"], ["a", "", "", ""], "\n\n"),
        (("abc",), ["xa", "b", "d"], ["x", "", "abd", ""], None),
        (("abc",), ["xab"], ["x", "ab"], None),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (("cd", "b"), ["abcd"], ["a", ""], "b"),
        (("b",), ["ab", "c"], ["a", "", ""], "b"),
        ((), ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_text_is_held_back_while_it_could_begin_a_stop_string(stop, pieces, parts, matched):
    assert shown(stop, pieces) == (parts, matched)


few_letters = st.text("ab", max_size=4)


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=4), st.lists(few_letters))
def test_stop_strings_match_where_plain_search_finds_them(stop, pieces):
    text, expected, matched = "", "", None
    for piece in pieces:
        text += piece
        found = [(text.find(s), s) for s in stop if s in text]
        if found:
            at, matched = min(found)
            expected = text[:at]
            break
        expected = text
    parts, actually = shown(tuple(stop), pieces)
    assert "".join(parts) == expected
    assert (actually is None) == (matched is None)
    if actually is not None:
        assert actually in stop
        assert text.startswith(expected + actually)


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=4), st.lists(few_letters))
def test_stop_strings_hold_back_only_possible_prefix(stop, pieces):
    watch = StopStrings(tuple(stop))
    text = out = ""
    for piece in pieces:
        text += piece
        out += watch.push(piece)
        if watch.matched is not None:
            return
        held = text.removeprefix(out)
        assert text.startswith(out)
        assert not held or any(s.startswith(held) for s in stop)


@example(before="世世世", text=" b")
@given(before=st.text("ab 世", max_size=6), text=st.text("ab 世", max_size=9))
def test_text_continues_that_of_the_tokens_before(before, text):
    """Decoders as of Llama 2 drop a space at the beginning of a text."""
    tokenizer = byte_fallback()
    first, then = (tokenizer.encode(part, add_special_tokens=False).ids for part in (before, text))
    whole, beginning = tokenizer.decode([*first, *then]), tokenizer.decode(first)
    assert beginning + text_after(tokenizer, first, then) == whole
