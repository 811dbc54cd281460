"""Incremental scanner that finds the end of a JSON object or array."""

import re
from typing import Final

from baton_router.text.output_parsing.reader import NotACall, Reader, Steps

_OUTSIDE_STRINGS: Final = re.compile(r"[\s\d+\-.,:Eaeflnrstu]*")
_IN_STRING: Final = re.compile(r'[^"\\]*')
_CLOSER: Final = {"{": "}", "[": "]"}


class JsonScanner:
    """Scanner of one object or array, which need not be valid but in its brackets and strings."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._is_string = False
        self._is_escape = False

    def end(self, text: str) -> int | None:
        """Returns the end of the value in `text`, the next piece; None if it does not end there.
        Raises `NotACall` for characters that are not JSON."""
        at = 0
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
            elif self._is_string:
                self._is_escape = True
            elif character in _CLOSER:
                self._closers.append(_CLOSER[character])
            elif not self._closers or self._closers.pop() != character:
                raise NotACall
            if not self._closers:
                if character not in "}]":
                    raise NotACall
                return at
        return None


def json_value(reader: Reader) -> Steps[str]:
    """Reads an object or array. Raises `NotACall` if there is none."""
    scanner = JsonScanner()
    pieces: list[str] = []
    while True:
        if reader.rest:
            if not pieces and reader.rest[0] not in _CLOSER:
                raise NotACall
            end = scanner.end(reader.rest)
            pieces.append(reader.take(len(reader.rest) if end is None else end))
            if end is not None:
                return "".join(pieces)
        yield from reader.more()
