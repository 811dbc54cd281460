"""Texts that are tokenized in pieces have the tokens of the whole."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from baton.serving.tenant import Tenant
from baton_router.call.generate_call import Conversation, Turn
from baton_router.text.intake import Intake
from baton_router.text.request_bounds import RequestLimits
from baton_router.text.token_cache import CachingTokenizer
from tests.support.router.tokenizers import CARDS, FRAGMENTS, bytes_like, tiny

TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
LONG = " long" * 1000


class Counting:
    """Tokenizer that notes what it is given."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer or tiny().tokenizer
        self.given: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.given += texts
        return self._tokenizer.encode_batch_fast(texts, **options)

    def taken(self) -> list[str]:
        given, self.given = self.given, []
        return given


def added(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.get_added_tokens_decoder().values()]


@settings(max_examples=40)
@pytest.mark.parametrize("new_card", CARDS, ids=lambda card: card.__name__)
@given(text=TEXTS, places=st.lists(st.integers(0, 40), max_size=3))
@example(text="a<|im_start|> b <|im_end|> c", places=[])
@example(text="<|a|><|b|><|im_end|>", places=[3])
def test_pieces_have_the_tokens_of_the_whole_text(new_card, text, places):
    tokenizer = new_card().tokenizer
    cuts = {at for at in places if 0 < at < len(text)}
    whole = CachingTokenizer(tokenizer).encode(text, cuts)
    pieces = CachingTokenizer(tokenizer, added(tokenizer), 2**20, from_chars=0)
    assert pieces.encode(text, cuts, b"") == whole
    assert pieces.encode(text, cuts, b"") == whole
    if not cuts:
        assert whole == new_card().encode_rendered(text)


@pytest.mark.parametrize(
    ("others", "is_split"),
    [
        ([], True),
        ([AddedToken("<|im_start|>user", special=True, normalized=False)], False),
        ([AddedToken("|><", special=True, normalized=False)], False),
        ([AddedToken("x<|im", special=True, normalized=False)], False),
        ([AddedToken("<|x|>", special=True, normalized=False, single_word=True)], True),
    ],
    ids=["alone", "beginning-of-another", "another-ends-as-it-begins", "overlap", "apart"],
)
def test_text_is_split_only_where_no_other_token_may_be(others, is_split):
    tokenizer = bytes_like()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", normalized=False), *others])
    text = "hello<|im_start|>user<|x|><|im_start|>x<|im_start|>"
    counting = Counting(tokenizer)
    pieces = CachingTokenizer(counting, ["<|im_start|>"], 2**20, from_chars=0)  # type: ignore[arg-type]
    assert pieces.encode(text, salt=b"") == tokenizer.encode(text, add_special_tokens=False).ids
    assert (len(counting.taken()) > 1) == is_split


def test_only_new_pieces_are_tokenized():
    tokenizer = Counting()
    pieces = CachingTokenizer(tokenizer, ["<|im_start|>"], 2**20)  # type: ignore[arg-type]
    first = f"<|im_start|>user\nhello{LONG}"
    whole = first + "<|im_start|>assistant\nhi"
    assert pieces.encode(first, salt=b"a") == tiny().encode_rendered(first)
    assert tokenizer.taken() == [first]
    assert pieces.encode(whole, salt=b"a") == tiny().encode_rendered(whole)
    assert tokenizer.taken() == ["<|im_start|>assistant\nhi"]


def test_tenants_find_only_their_own_pieces():
    tokenizer = Counting()
    pieces = CachingTokenizer(tokenizer, ["<|im_start|>"], 2**20)  # type: ignore[arg-type]
    text = f"<|im_start|>user\nhello{LONG}"
    for salt, is_known in ((b"a", False), (b"b", False), (b"a", True), (None, False)):
        pieces.encode(text, salt=salt)
        assert tokenizer.taken() == ([] if is_known else [text])
    pieces.drop(b"b")
    for salt, is_known in ((b"a", True), (b"b", False)):
        pieces.encode(text, salt=salt)
        assert tokenizer.taken() == ([] if is_known else [text])


async def test_conversations_of_one_tenant_evict_no_others():
    tokenizer = Counting()
    card = replace(tiny(), tokenizer=tokenizer)
    intake = Intake(card, RequestLimits(text_cache_bytes=50_000))
    few, many = Tenant("few", b"f"), Tenant("many", b"m")
    await intake.prompt_of(Conversation([Turn("user", (f"hello{LONG}",))]), tenant=few)
    for number in range(20):
        turns = [Turn("user", (f"{number}{LONG}",))]
        await intake.prompt_of(Conversation(turns), tenant=many.salted(str(number)))
    tokenizer.taken()
    await intake.prompt_of(Conversation([Turn("user", (f"hello{LONG}",))]), tenant=few)
    assert not any(LONG in text for text in tokenizer.taken())


@pytest.mark.parametrize(("cache_bytes", "is_known"), [(0, False), (6000, False), (2**20, True)])
async def test_turn_of_a_conversation_tokenizes_what_is_new(cache_bytes, is_known):
    tokenizer = Counting()
    card = replace(tiny(), tokenizer=tokenizer)
    limits = RequestLimits(text_cache_bytes=cache_bytes)
    intake, turns = Intake(card, limits), [Turn("user", (f"hello{LONG}",))]
    salted = Tenant("a", b"a")
    await intake.prompt_of(Conversation(turns), tenant=salted)
    tokenizer.taken()
    turns += [Turn("assistant", ("hi",)), Turn("user", ("world",))]
    prompt = await intake.prompt_of(Conversation(turns), tenant=salted)
    assert any(LONG in text for text in tokenizer.taken()) != is_known
    assert list(prompt.token_ids) == (await intake.tokenize(Conversation(turns)))[0]
    tokenizer.taken()
    intake.forget(b"a", images=False)
    await intake.prompt_of(Conversation(turns), tenant=salted)
    assert any(LONG in text for text in tokenizer.taken())
