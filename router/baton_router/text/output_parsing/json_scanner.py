"""Incremental scanner that finds the end of a JSON value."""

import json
import re
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Any, Final

from baton_router.text.output_parsing.reader import Reader, Steps

_OUTSIDE_STRINGS: Final = re.compile(r'[^"{}\[\]]*')
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR: Final = re.compile(r'[^\s,"{}\[\]]*')
_CLOSER: Final = {"{": "}", "[": "]"}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class JsonScanner:
    """Scanner of one object, array or string. Models write some wrongly: a closing bracket also
    closes what was left open within its own, and one that closes nothing is passed over.

    Args:
        opened: the bracket that has been read before; empty: none.
    """

    def __init__(self, opened: str = "") -> None:
        self._closers = [_CLOSER[opened]] if opened else []
        self._is_string = False
        self._is_escape = False

    def read(self, text: str) -> tuple[str, int | None]:
        """Returns what `text`, the next piece, has of the value, with control characters in strings
        as escapes; and the value's end in `text`, None if it does not end there."""
        pieces, begin, at = [], 0, 0
        while at < len(text):
            if self._is_escape:
                self._is_escape = False
                at += 1
                continue
            match = (_IN_STRING if self._is_string else _OUTSIDE_STRINGS).match(text, at)
            assert match is not None
            at = match.end()
            if at == len(text):
                break
            character = text[at]
            at += 1
            if character == '"':
                self._is_string = not self._is_string
            elif character == "\\":
                self._is_escape = True
            elif self._is_string:
                pieces.append(text[begin : at - 1] + quoted(character))
                begin = at
            elif character in _CLOSER:
                self._closers.append(_CLOSER[character])
            elif character in self._closers:
                while self._closers.pop() != character:
                    pass
            if not self._closers and not self._is_string:
                return "".join([*pieces, text[begin:at]]), at
        return "".join([*pieces, text[begin:]]) if pieces else text, None


def read_json(reader: Reader, show: Callable[[str], None]) -> Steps[None]:
    """Reads a value, and shows its text as it comes. Raises `NotACall` if the output ends first."""
    while not reader.rest:
        yield from reader.more()
    if reader.rest[0] in '{["':
        yield from read_json_end(reader, JsonScanner(), show)
        return
    while (match := _SCALAR.match(reader.rest)) is None or match.end() == len(reader.rest):
        yield from reader.more()
    show(reader.take(match.end()))


def read_json_end(reader: Reader, scanner: JsonScanner, show: Callable[[str], None]) -> Steps[None]:
    """Reads the rest of a value, and shows its text as it comes."""
    while True:
        text, end = scanner.read(reader.rest)
        reader.take(len(reader.rest) if end is None else end)
        show(text)
        if end is not None:
            return
        yield from reader.more()


def to_json(value: Any) -> str:
    """Returns a value as JSON text, which can be encoded in UTF-8."""
    return escaped_surrogates(json.dumps(value, ensure_ascii=False))


def quoted(text: str) -> str:
    """Returns `text` as within a JSON string. Hot path of strings that stream."""
    return escaped_surrogates(encode_basestring(text)[1:-1])


def escaped_surrogates(text: str) -> str:
    """Returns JSON text with its surrogates as escapes, without which it has no UTF-8."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
