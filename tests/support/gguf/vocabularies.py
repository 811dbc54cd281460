"""Vocabularies as GGUF has them, of both kinds that most models have."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from baton.models import locate

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the router sends prompts to workers and workers write answers to clients",
    "a worker that is lost ends no request, since another worker resumes it",
    "def split(text: str) -> list[str]: return text.split()",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary with what its metadata say; ids are places in `tokens`."""

    kind: str
    split: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    special: dict[str, int]
    adds_bos: bool


@functools.cache
def byte_level() -> Vocabulary:
    """Vocabulary of the model `tiny`: that of GPT-2's kind, with tokens of chats."""
    content = json.loads((Path(locate("tiny")) / "tokenizer.json").read_text())
    by_id = {i: text for text, i in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id |= {i: token["content"] for i, token in added.items()}
    size = max(by_id) + 1
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    return Vocabulary(
        kind="gpt2",
        split="qwen2",
        tokens=[by_id[i] for i in range(size)],
        types=[CONTROL if i in added else NORMAL for i in range(size)],
        scores=None,
        merges=merges,
        special={"bos": 0, "eos": 0, "eot": 2, "padding": 3},
        adds_bos=False,
    )


@functools.cache
def sentence_piece() -> Vocabulary:
    """Vocabulary of Llama 2's kind, with tokens of bytes and scores for merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    first = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [text for text, _ in learned if text not in first]
    num_fixed = len(first) + len(of_bytes)
    return Vocabulary(
        kind="llama",
        split="default",
        tokens=[*first, *of_bytes, *pieces],
        types=[UNKNOWN, *[CONTROL] * 4, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        scores=[0.0] * num_fixed + [-float(rank) for rank in range(len(pieces))],
        merges=None,
        special={"bos": 1, "eos": 2, "unknown": 0},
        adds_bos=True,
    )
