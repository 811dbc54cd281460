"""Tokenizer of a checkpoint as its files describe it, read as transformers reads them.

Loads neither torch nor transformers. What transformers adds to `tokenizer.json` or undoes of it is
in `PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend` of its version 5.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from baton.errors import UnsupportedModelError
from baton.models import read_json, tokenizer_file

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""Names of chat templates: of conversations without tools, and with some."""

_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokenizer of a checkpoint, with what its folder says of it.

    Attributes:
        tokenizer: with all added tokens; it neither cuts texts nor pads them.
        special_tokens: by the names that chat templates use, such as "bos_token".
        templates: chat templates by name.
    """

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    templates: dict[str, str]

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end of a text, beside the model's; empty if it names none."""
        found = self.tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return frozenset() if found is None else frozenset([found])


def end_token_ids(folder: Path) -> frozenset[int]:
    """Returns the end of a text by the tokenizer of a folder; empty if there is none."""
    is_there = (folder / "tokenizer.json").is_file()
    return read_tokenizer_files(folder).end_token_ids if is_there else frozenset()


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Reads the files of a folder, of which only `tokenizer.json` must be there. Raises
    `UnsupportedModelError`."""
    file = tokenizer_file(folder)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise UnsupportedModelError(
            f"{str(file)!r} holds no tokenizer: {error}; download it again"
        ) from error
    config = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read(folder / "special_tokens_map.json")
    named = _named_tokens(config)
    if tokenizer.padding is not None:
        named.setdefault("pad_token", AddedToken(tokenizer.padding["pad_token"], special=True))
    # They are those of the texts that were tokenized last before the file was written.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in (*_listed_tokens(folder, config, named), *named.values(), *_extra_tokens(config)):
        if token.content not in known:
            tokenizer.add_tokens([token])
            known.add(token.content)
    tokens = {name: token.content for name, token in named.items()}
    return TokenizerFiles(tokenizer, tokens, _templates(folder, config))


def _named_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    extra = config.get("extra_special_tokens")
    names = sorted((key for key in config if key.endswith("_token")), key=_place_of)
    found = {name: config[name] for name in names} | (extra if isinstance(extra, dict) else {})
    return {n: _special(value) for n, value in found.items() if isinstance(value, str | dict)}


def _place_of(name: str) -> int:
    """Tokens that are added get their ids in this order."""
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def _extra_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return map(_special, extra if isinstance(extra, list) else ())


def _listed_tokens(
    folder: Path, config: Mapping[str, Any], named: Mapping[str, AddedToken]
) -> list[AddedToken]:
    """Returns the added tokens that another file than `tokenizer.json` lists, by id."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        return [_token(listed[token_id]) for token_id in sorted(listed, key=int)]
    special = {token.content for token in (*named.values(), *_extra_tokens(config))}
    ids = _read(folder / "added_tokens.json")
    return [
        AddedToken(text, normalized=text not in special, special=text in special)
        for text in sorted(ids, key=lambda text: int(ids[text]))
    ]


def _special(value: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return _token({**value, "special": True})


def _token(fields: Mapping[str, Any]) -> AddedToken:
    flags = {k: v for k, v in fields.items() if k not in ("__type", "id", "content")}
    return AddedToken(fields["content"], **flags)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates: of files, else of the configurations."""
    found = {f.stem: f.read_text("utf-8") for f in folder.glob("additional_chat_templates/*.jinja")}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found[DEFAULT_TEMPLATE] = file.read_text("utf-8")
    if found:
        return found
    # Of a processor of images, before it had a file of its own.
    given = _read(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {DEFAULT_TEMPLATE: given} if isinstance(given, str) else {}


def _read(file: Path) -> dict[str, Any]:
    """Returns the content of a file that a checkpoint may lack."""
    return read_json(file) if file.is_file() else {}
