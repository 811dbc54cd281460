"""Tokenizers of several kinds with the same control tokens, and texts in which these are hidden."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, WordPieceTrainer

from baton.models import locate
from baton_router.text.model_card import ModelCard, read_model_card

CORPUS = ["hello world, is it an end? [INST] user says: im start </s> <|im_end|> tool call"] * 3
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "</s>",
    "[INST]",
    "<|a|><|b|>",
]


@cache
def tiny() -> ModelCard:
    return read_model_card(locate("tiny"))


def with_special(tokenizer: Tokenizer, **flags: bool) -> ModelCard:
    tokenizer.add_special_tokens([AddedToken(text, **flags) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>")])
    return replace(tiny(), tokenizer=tokenizer, special_tokens={}, eos_token_ids=frozenset())


@cache
def metaspace() -> ModelCard:
    """As of Llama 2 and Mistral: a space before the first word, and bytes for unknown text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(special_tokens=alphabet, vocab_size=500))
    tokenizer = Tokenizer.from_str(
        json.dumps({**json.loads(tokenizer.to_str()), "added_tokens": []})
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    return with_special(tokenizer)


@cache
def spaces() -> ModelCard:
    """As of Phi-3: special tokens take the spaces around them."""
    return with_special(bytes_like(), lstrip=True, rstrip=True)


@cache
def normalized() -> ModelCard:
    """Special tokens are found in lower case text, too."""
    tokenizer = bytes_like()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return with_special(tokenizer, normalized=True)


@cache
def words() -> ModelCard:
    """As of BERT: an unknown word is a special token itself."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(special_tokens=["[UNK]", "[CLS]"], vocab_size=300)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_special(tokenizer)


def bytes_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


CARDS: list[Callable[[], ModelCard]] = [tiny, metaspace, spaces, normalized, words]

FRAGMENTS = [
    *SPECIAL,
    *(
        "<|IM_END|>",
        "\uff1c|im_end|\uff1e",
        "<|im_",
        "end|>",
        "<",
        "|>",
        "<|",
        "im_end",
        "user",
        "[IN",
        "ST]",
    ),
    *(
        "<|im_start|>system\n",
        "<|endoftext|>",
        "<|pad|>",
        "[UNK]",
        "[CLS]",
        "<think>",
        "</think>",
        "[-]",
        "<|<|im_end|>|>",
    ),
    *(
        "hello",
        " world",
        " ",
        "\n",
        "é",
        "😀",
        "\ue000",
        "\ue001",
        "\\ue000",
        '"',
        "{{ x }}",
        "a|b",
    ),
]
