"""Tokenizer of a GGUF model, written as the files that a checkpoint has. Imports transformers,
without torch where that is not installed: for a process of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import TokenizersBackend
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    GGUF_TOKENIZER_TYPES,
    convert_gguf_tokenizer,
)

from baton.errors import UnsupportedModelError
from baton.models.gguf.header import GgufHeader

_PREFIX = "tokenizer."
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Splits of byte-level tokenizers by `tokenizer.ggml.pre`, beside those that transformers knows:
# GPT-2's, and GPT-2's with digits one by one.
_GPT2 = ("gpt-2", "phi-2", "gigachat", "mellum", "modern-bert", "mpt", "olmo", "jais", "trillion")
_DIGITS = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b")
_WITHOUT_PREFIX_SPACE = ("gemma", "gemma2", "gemma3")  # whatever the file says


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Writes `tokenizer.json`, its configuration and chat templates. Raises
    `UnsupportedModelError` for a file without a tokenizer, or with one of an unknown kind."""
    _check_is_known(header)
    settings = _settings(header, "tokenizer")
    backend, _ = convert_gguf_tokenizer(header.architecture, settings)
    _undo_defaults(backend, settings, header.architecture)
    own = {k: v for k, v in _settings(header, "tokenizer_config").items() if k != "chat_template"}
    if settings["tokenizer_type"] == "llama":
        own.setdefault("add_bos_token", True)  # as llama.cpp does
    tokens = settings["tokens"]
    for name, key in _SPECIAL.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        own[f"{name}_token"] = None if token_id is None else tokens[token_id]
    TokenizersBackend(tokenizer_object=backend, **own).save_pretrained(folder)
    _write_templates(header.metadata, folder)


def _settings(header: GgufHeader, group: str) -> dict[str, Any]:
    named = {_PREFIX + key: name for key, name in GGUF_TOKENIZER_MAPPING[group].items()}
    return {name: header.metadata[key] for key, name in named.items() if key in header.metadata}


def _check_is_known(header: GgufHeader) -> None:
    file, metadata = str(header.files[0]), header.metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind not in GGUF_TOKENIZER_TYPES:
        raise UnsupportedModelError(
            f"{file!r} has a tokenizer of kind {kind!r}; expected one of "
            f"{', '.join(sorted(GGUF_TOKENIZER_TYPES))}: give the original checkpoint"
        )
    split = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split not in (*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2, *_DIGITS):
        raise UnsupportedModelError(
            f"{file!r} splits texts by the rule {split!r} (tokenizer.ggml.pre), which is not known "
            "here: convert the model again with a current llama.cpp, or give the original "
            "checkpoint"
        )


def _undo_defaults(backend: Tokenizer, settings: Mapping[str, Any], architecture: str) -> None:
    """Changes what transformers takes for granted where the file says otherwise."""
    if settings.get("pre_tokenizer_type") in _DIGITS and settings["tokenizer_type"] == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    is_metaspace = settings["tokenizer_type"] == "llama" and architecture not in (
        *_WITHOUT_PREFIX_SPACE,
        "phi3",
    )
    if is_metaspace and settings.get("add_prefix_space") is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )


def _write_templates(metadata: Mapping[str, Any], folder: Path) -> None:
    if template := metadata.get(_TEMPLATE):
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    others = folder / "additional_chat_templates"
    for name in metadata.get(_TEMPLATES, ()):
        others.mkdir(exist_ok=True)
        (others / f"{Path(name).name}.jinja").write_text(metadata[f"{_TEMPLATE}.{name}"], "utf-8")
