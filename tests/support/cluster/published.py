"""Small checkpoint with the files that real ones have and the shipped model has not.

Its text begins as of Llama 2, its end is no special token, its tokenizer was saved with truncation
and padding, its generation configuration names no end, and its files are not ASCII.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.support.router.tokenizers import metaspace

Decoder = Literal["metaspace", "strip"]

END, STOP = "<end>", "<stop>"
TEXT = "hello"
ANSWER = " world, is it"
"""What the model says to `TEXT`, before `END`."""

# What it says to each token.
_SAID = {"▁hello": "▁world,", "</s>": "▁world,", "▁world,": "▁is", "▁is": "▁it", "▁it": END}
_TEMPLATE = (
    "{% for m in messages %}é {{ m.content }}{% if not loop.last %}!{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)
_HIDDEN_SIZE = 64


def _tokenizer(decoder: Decoder) -> Tokenizer:
    tokenizer = Tokenizer.from_str(metaspace().tokenizer.to_str())
    if decoder == "strip":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_tokens([AddedToken(END), AddedToken(STOP)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=13, pad_token="</s>", pad_id=tokenizer.token_to_id("</s>"))
    return tokenizer


def save_published(folder: Path, decoder: Decoder = "strip") -> None:
    """Writes the checkpoint."""
    tokenizer = _tokenizer(decoder)
    _save_model(folder, tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write(folder / "generation_config.json", {"eos_token_id": None})
    _write(folder / "config.json", json.loads((folder / "config.json").read_text("utf-8")))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _write(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps({**content, "author": "Zoë"}, ensure_ascii=False)
    file.write_text(text, encoding="utf-8")


def _save_model(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a model whose layers add nothing: a token alone decides the next one."""
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    said = {tokenizer.token_to_id(token): tokenizer.token_to_id(n) for token, n in _SAID.items()}
    assert None not in {*said, *said.values()}, "the tokenizer has other tokens"
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        embedded, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        embedded.copy_(torch.nn.functional.normalize(torch.randn(size, _HIDDEN_SIZE), dim=1))
        head.zero_()
        for token, following in said.items():
            head[following] += 50.0 * embedded[token]  # whatever the temperature
    model.save_pretrained(folder)


@cache
def _reference(folder: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def said_by_transformers(folder: str, text: str) -> str:
    """Returns the text with which transformers continues one: that of the whole, less the text
    before and the end."""
    tokenizer, model = _reference(folder)
    given = tokenizer(text, return_tensors="pt")
    (whole,) = model.generate(
        **given, max_new_tokens=20, do_sample=False, eos_token_id=model.config.eos_token_id
    ).tolist()
    before = tokenizer.decode(given["input_ids"][0])
    return str(tokenizer.decode(whole)).removeprefix(before).removesuffix(END)
