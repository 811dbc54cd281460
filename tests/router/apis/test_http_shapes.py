"""Tokens as bytes, and where they are in a text."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from baton.models import locate
from baton_router.apis.answers.sequence_reader import ScoredToken, SequenceDelta
from baton_router.apis.openai.choice_formats import CompletionShape
from baton_router.text.token_bytes import TokenBytes

TEXTS = ["def main():\n\treturn 'é' + \"漢字\"", "🙂🙃", " \x00\x7f\xa0\xad"]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")


@pytest.mark.symptom(
    "ollama#13497, vllm#28874",
    there="`bytes` of log-probabilities are wrong for parts of a character",
    here="Sends the bytes of each token; together they are the text.",
)
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_text(tiny, text):
    tokens = TokenBytes(tiny)
    ids = tiny.encode(text, add_special_tokens=False).ids
    assert b"".join(tokens[i] for i in ids).decode() == tiny.decode(ids)


@pytest.mark.symptom(
    "vllm#16838",
    there="tokens of log-probabilities have the tokenizer's signs, such as `Ġ`",
    here="Sends their text.",
)
def test_token_bytes_cover_every_token(tiny):
    tokens = TokenBytes(tiny)
    for token_id in range(tiny.get_vocab_size()):
        alone = tiny.decode([token_id], skip_special_tokens=False)
        assert tokens.text(token_id) == alone or "\ufffd" in alone


def test_token_bytes_name_special_tokens_and_no_unknown_ones(tiny):
    tokens = TokenBytes(tiny)
    assert (tokens[0], tokens.is_special(0)) == (b"<|endoftext|>", True)
    assert (tokens[10**6], tokens.is_special(10**6)) == (b"", False)


def test_token_bytes_decode_sentencepiece_pieces():
    pieces = {"\u2581a": 0, "<0x0A>": 1, "<0xC3>": 2, "b": 3}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokens = TokenBytes(tokenizer)
    assert [tokens[i] for i in range(4)] == [b" a", b"\n", b"\xc3", b"b"]


def test_completion_offset_is_at_first_whole_character(tiny):
    text = "a 漢 b"
    ids = tiny.encode(text, add_special_tokens=False).ids
    shape = CompletionShape(TokenBytes(tiny))
    offsets: list[int] = []
    names: list[str] = []
    for token_id in ids:  # piece by piece, as they stream
        part = shape.part(SequenceDelta(0, tokens=(ScoredToken(token_id, -1.0),)))
        assert part is not None
        offsets += part["logprobs"]["text_offset"]
        names += part["logprobs"]["tokens"]
    for name, offset in zip(names, offsets, strict=True):
        assert name.startswith("bytes:\\x") or text[offset:].startswith(name)
    assert offsets == sorted(offsets)
    assert json.dumps(names)
