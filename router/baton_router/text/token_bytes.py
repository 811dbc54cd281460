"""Bytes of single tokens, for log-probabilities.

A token is not always text: it may be part of a character.
"""

import json
from typing import Any

from tokenizers import Tokenizer

_UNKNOWN = ord("?")  # for characters outside the byte alphabet
_SPACE = "\u2581"  # a space in SentencePiece


class TokenBytes:
    """Token bytes of a tokenizer, by token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._byte_of = _byte_of_character() if _is_byte_level(tokenizer) else None

    def is_special(self, token_id: int) -> bool:
        """Returns True if the token is not part of the text."""
        return token_id in self._added and self._added[token_id].special

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the token's bytes: of an added token its content, of an unknown one none."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of.get(character, _UNKNOWN) for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace(_SPACE, " ").encode()

    def text(self, token_id: int) -> str:
        """Returns the token's text, with replacement characters for incomplete ones."""
        return self[token_id].decode(errors="replace")


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return any(part["type"] == "ByteLevel" for part in parts)


def _byte_of_character() -> dict[str, int]:
    """Returns the alphabet of byte-level tokenizers: printable bytes of Latin-1 are their own
    characters, the other bytes, in order, are written as U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + at): byte for at, byte in enumerate(others)}
