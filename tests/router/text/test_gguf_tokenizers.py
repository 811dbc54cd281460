"""Tokenizers of GGUF files in the router: tokens, texts and prompts as transformers makes them of
the same files, without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from baton.models import DESCRIPTION, checkpoint_folder
from baton_router.text.model_card import read_model_card
from tests.support.engine.engines import mostly_slow
from tests.support.gguf.caches import own_cache
from tests.support.gguf.models import small_gguf
from tests.support.gguf.vocabularies import (
    TEMPLATE,
    USER_DEFINED,
    Vocabulary,
    byte_level,
    sentence_piece,
)

TEXTS = [
    "",
    "hello world",
    "  hello   world ",
    "def split(text: str) -> list[str]:\n\treturn text.split()\n\n\n",
    "the router sends 12345 prompts; workers' answers (Hé, 日本, 🙂) I'll see",
    "<|im_start|>user\nwho are you?<|im_end|>\n</s><s> <unk>",
]
MESSAGES = [{"role": "user", "content": "hello é"}, {"role": "assistant", "content": "an end"}]


def _user_defined() -> Vocabulary:
    """A vocabulary with a token that is no special one, and an end of texts at the end of them."""
    vocabulary = sentence_piece()
    types = [*vocabulary.types]
    types[300] = USER_DEFINED
    return replace(vocabulary, types=types, adds_bos=False)


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "byte-level": byte_level,
    "byte-level with start": lambda: replace(byte_level(), adds_bos=True),
    "of GPT-2": lambda: replace(byte_level(), split="gpt-2"),
    "of Llama 3": lambda: replace(byte_level(), split="llama-bpe"),
    "SentencePiece": sentence_piece,
    "user-defined": _user_defined,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache(tmp_path)))


@pytest.mark.parametrize("name", mostly_slow(VOCABULARIES, "byte-level", "SentencePiece"))
def test_router_reads_gguf_tokenizer_as_transformers(name: str, tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "small.gguf", VOCABULARIES[name]())
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    card = read_model_card(str(file))
    assert card.name == "small"
    for text in TEXTS:
        token_ids = theirs(text)["input_ids"]
        assert card.tokenizer.encode(text).ids == token_ids
        for skips in (True, False):
            decoded = theirs.decode(token_ids, skip_special_tokens=skips)
            assert card.tokenizer.decode(token_ids, skip_special_tokens=skips) == decoded
    prompt = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert (card.render(MESSAGES), card.chat_template) == (prompt, TEMPLATE)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from baton.models.gguf.convert import main
main(*sys.argv[1:])
"""
ROUTER = """
import sys
from baton_router.text.model_card import read_model_card
read_model_card(sys.argv[1])
absent = ("torch", "numpy", "transformers.tokenization_utils_base")
print([name for name in absent if name in sys.modules])
"""


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_gguf_is_described_without_torch_alike(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "small.gguf", byte_level())
    (tmp_path / "bare").mkdir()
    run(WITHOUT_TORCH, tmp_path / "bare", file)
    folder = checkpoint_folder(str(file), DESCRIPTION)
    described = {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix != ".gguf"}
    assert {f.name: f.read_bytes() for f in (tmp_path / "bare").iterdir()} == described


def test_router_of_gguf_loads_no_library_of_its_conversion(tmp_path: Path) -> None:
    assert run(ROUTER, small_gguf(tmp_path / "small.gguf", sentence_piece())) == "[]"


def test_gguf_metadata_reach_the_model_card(tmp_path: Path) -> None:
    """A prefix space that is turned off, another template, sampling, and a further end."""
    metadata = {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.ggml.eot_token_id": 4,
        "general.sampling.temp": 0.5,
    }
    file = small_gguf(tmp_path / "small.gguf", sentence_piece(), metadata=metadata)
    card = read_model_card(str(file))
    texts = ["hello world", " hello world"]
    token_ids = [card.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert list(map(card.tokenizer.decode, token_ids)) == texts
    assert card.tool_template == "{{ tools }}"
    assert card.eos_token_ids == {2, 4}
    described = json.loads((file_of(file, "generation_config.json")).read_text())
    assert described == {"temperature": 0.5}


@pytest.mark.slow
def test_gguf_of_digits_splits_them_one_by_one(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "small.gguf", replace(byte_level(), split="smollm"))
    assert read_model_card(str(file)).tokenizer.encode("in 2026").tokens[-4:] == list("2026")


def file_of(gguf: Path, name: str) -> Path:
    """Returns a file of what describes a GGUF file."""
    return checkpoint_folder(str(gguf), DESCRIPTION) / name
