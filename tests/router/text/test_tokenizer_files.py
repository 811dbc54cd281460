"""Folders of tokenizers in all forms that are found: tokens, texts and prompts as transformers
makes them of the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from baton.errors import UnsupportedModelError
from baton.models.tokenizer_files import read_tokenizer_files
from baton_router.text.chat import ChatTokenizer
from baton_router.text.model_card import read_model_card
from tests.support.router.tokenizers import bytes_like, metaspace, words

FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}"
    "{% endfor %}{{ image_token }}{{ pad_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
)
WITH_TOOLS = "With tools: {{ tools | length }} " + TEMPLATE
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXTS = [
    "",
    "hello world",
    " hello  world ",
    "hello world, is it an end? " * 4,
    "<s>hello</s> is<|im_end|>  it<pad>an <x>end",
    "<tool> <e>  x <a><b> <img><vid><p><aud> </s> Hé [UNK]",
]
MESSAGES = [{"role": "user", "content": "hello é"}, {"role": "assistant", "content": "an end"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

# Files of folders, by what is unusual in them.
FORMS: dict[str, dict[str, Any]] = {
    "tokenizer alone": {},
    "names": {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}},
    "names that are null": {"tokenizer_config": {"bos_token": None, "eos_token": "</s>"}},
    "end that no file lists": {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<p>"}},
    "order of new tokens": {
        "tokenizer_config": {
            "audio_token": "<aud>",
            "pad_token": "<p>",
            "eos_token": "<e>",
            "bos_token": "<b>",
        }
    },
    "typed name": {
        "tokenizer_config": {
            "eos_token": {"__type": "AddedToken", "content": "<e>", **FLAGS, "rstrip": True}
        }
    },
    "map of special tokens": {
        "special_tokens_map": {"bos_token": {"content": "<s>", **FLAGS}, "eos_token": "</s>"}
    },
    "map over configuration": {
        "tokenizer_config": {"eos_token": "<s>"},
        "special_tokens_map": {"eos_token": "</s>"},
    },
    "map beside listed tokens": {
        "tokenizer_config": {
            "added_tokens_decoder": {"0": {"content": "<s>", **FLAGS, "special": True}}
        },
        "special_tokens_map": {"eos_token": "</s>"},
    },
    "listed tokens": {
        "tokenizer_config": {
            "eos_token": "<e>",
            "added_tokens_decoder": {
                "1000": {"content": "<tool>", **FLAGS, "special": False},
                "999": {"content": "<e>", **FLAGS, "rstrip": True, "special": True},
            },
        }
    },
    "file of added tokens": {
        "tokenizer_config": {"eos_token": "<e>"},
        "added_tokens": {"<tool>": 1001, "<e>": 1000},
    },
    "further tokens": {"tokenizer_config": {"extra_special_tokens": ["<a>", "<b>"]}},
    "additional tokens": {"tokenizer_config": {"additional_special_tokens": ["<a>", "<b>"]}},
    "named tokens of images": {
        "tokenizer_config": {
            "extra_special_tokens": {"image_token": "<img>"},
            "video_token": "<vid>",
        }
    },
    "special tokens split": {
        "tokenizer_config": {"eos_token": "</s>", "split_special_tokens": True}
    },
    "switches": {
        "tokenizer_config": {
            "bos_token": "<s>",
            "add_bos_token": True,
            "add_prefix_space": True,
            "clean_up_tokenization_spaces": True,
            "model_max_length": 8,
            "padding_side": "left",
        }
    },
    "template in a file": {"chat_template.jinja": TEMPLATE + "é"},
    "template in the configuration": {"tokenizer_config": {"chat_template": TEMPLATE}},
    "file over configuration": {
        "chat_template.jinja": TEMPLATE,
        "tokenizer_config": {"chat_template": "wrong"},
    },
    "list of templates": {
        "tokenizer_config": {
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": WITH_TOOLS},
            ]
        }
    },
    "folder of templates": {
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
    },
    "folder of other templates": {
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/rag.jinja": "wrong",
    },
}


def cut_and_padded() -> Tokenizer:
    tokenizer = bytes_like()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=13, pad_token="<pad>", pad_id=5)
    return tokenizer


def padded_to_longest() -> Tokenizer:
    tokenizer = bytes_like()
    tokenizer.enable_padding(pad_token="<pad>", pad_id=5)
    return tokenizer


def unigram() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "\u2581hello", "\u2581world", "h", "e", "l", "o"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return tokenizer


# Tokenizers, which transformers writes by itself.
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytes_like,
    "metaspace": lambda: metaspace().tokenizer,
    "words": lambda: words().tokenizer,
    "unigram": unigram,
    "cut and padded": cut_and_padded,
    "padded to longest": padded_to_longest,
}


def written(folder: Path, tokenizer: Tokenizer, files: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 4000, "max_position_embeddings": 64}'
    )
    config = {**CLASS, **files.get("tokenizer_config", {})}
    for name, content in {**files, "tokenizer_config": config}.items():
        file = folder / (name if "." in name else f"{name}.json")
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text, encoding="utf-8")
    return folder


def check_same(folder: Path) -> None:
    """Asserts that ids, texts, names and prompts equal those of transformers."""
    reference, files = AutoTokenizer.from_pretrained(folder), read_tokenizer_files(folder)
    batch = files.tokenizer.encode_batch_fast(TEXTS, add_special_tokens=True)
    for text, encoding in zip(TEXTS, batch, strict=True):
        assert encoding.ids == reference(text)["input_ids"], text
        for skipped in (True, False):
            decoded = files.tokenizer.decode(encoding.ids, skip_special_tokens=skipped)
            assert decoded == reference.decode(encoding.ids, skip_special_tokens=skipped), text
    assert files.special_tokens == reference.special_tokens_map
    end = reference.eos_token_id
    assert files.end_token_ids == (frozenset() if end is None else {end})
    if reference.chat_template is None:
        assert not files.templates
        return
    card = read_model_card(str(folder))
    chat = ChatTokenizer(card, allow_special_tokens=True)
    for tools in ([], TOOLS):
        expected = reference.apply_chat_template(MESSAGES, tools=tools or None, return_dict=False)
        assert chat.encode(chat.render(MESSAGES, tools)) == expected


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_folder_of_every_form_is_read_as_transformers_does(form, tmp_path):
    check_same(written(tmp_path / "model", bytes_like(), form))


@pytest.mark.parametrize("form", ["names", "map of special tokens", "list of templates"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tokenizer_of_every_kind_is_read_as_transformers_does(kind, form, tmp_path):
    first = written(tmp_path / "first", kind(), FORMS[form])
    check_same(first)
    # As it is written by those who fine-tune the model.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(first)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer(TEXTS, truncation=True, padding=True, max_length=4)
    second = tmp_path / "second"
    tokenizer.save_pretrained(second)
    (second / "config.json").write_bytes((first / "config.json").read_bytes())
    check_same(second)


def test_processor_of_images_may_have_the_template(tmp_path):
    folder = written(tmp_path, bytes_like(), {"chat_template": {"chat_template": TEMPLATE}})
    assert read_tokenizer_files(folder).templates == {"default": TEMPLATE}


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_folder_without_a_tokenizer_is_refused_by_name(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"holds no tokenizer"):
        read_tokenizer_files(tmp_path)
