"""Calls that an open thought ends with: the model has ended its output, so that it waits for them.

Formats without marks have their calls at the beginning of a text; in a thought, that is a line.
"""

import re
from collections.abc import Sequence
from typing import Final

from baton_router.call.parts import Part, Text, ToolCallArguments, ToolCallStart
from baton_router.text.output_parsing.parser import (
    CallSyntax,
    PartCollector,
    SequenceParser,
    read_calls,
)

_PIECE_LENGTH: Final = 1024
# Lines of a thought, from its end, that are tried as the beginning of calls.
_MAX_LINES: Final = 16


def marks_in_thoughts(syntax: CallSyntax) -> tuple[str, ...]:
    """Returns the marks from which on a thought may be calls."""
    return (*syntax.marks, *syntax.first_marks)


def read_last_calls(syntax: CallSyntax, text: str, parts: PartCollector) -> None:
    """Adds the calls that a text ends with, which begins with one of `marks_in_thoughts`."""
    for at in _beginnings(syntax, text):
        last = _last_calls(syntax, text[at:], parts)
        for part in last:
            if isinstance(part, ToolCallStart):
                parts.start_call(part.name)
            elif isinstance(part, ToolCallArguments):
                parts.arguments(part.json)
        if last:
            return


def _beginnings(syntax: CallSyntax, text: str) -> Sequence[int]:
    """Returns where calls may begin: the first mark that is anywhere, and those of lines."""
    if not syntax.first_marks:
        return [0]
    line = re.compile(f"^(?:{'|'.join(map(re.escape, syntax.first_marks))})", re.MULTILINE)
    return [0, *[match.start() for match in line.finditer(text, 1)][-_MAX_LINES:]]


def _last_calls(syntax: CallSyntax, text: str, parts: PartCollector) -> Sequence[Part]:
    """Returns the parts of calls after which a text has nothing more."""
    parser = SequenceParser(
        parts.options, lambda reader, found, _: read_calls(syntax, reader, found)
    )
    last: list[Part] = []
    # A reader copies what it has not read yet.
    pieces = [text[at : at + _PIECE_LENGTH] for at in range(0, len(text), _PIECE_LENGTH)]
    for found in (*map(parser.push, pieces), parser.finish()):
        for part in found:
            if isinstance(part, Text):
                last.clear()
            else:
                last.append(part)
    return last
