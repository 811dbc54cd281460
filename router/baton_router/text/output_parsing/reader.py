"""Reader of text that arrives in pieces, for parsers that are generators.

A parser yields where it needs more text, and goes on when some has arrived or the text has ended.
What it has read since `keep` can be put back.
"""

import functools
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from baton_router.call.parts import Reasoning, Text

Result = TypeVar("Result")
Steps: TypeAlias = Generator[None, None, Result]


class NotACall(Exception):  # noqa: N818 - no error: it is text
    """Text that is not what the parser looked for."""


class CutOff(NotACall):
    """Text that ends within what the parser looked for."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Pieces that are parts as they are, which a parser need not read: the hot path.

    Attributes:
        pattern: it matches the whole of such a piece.
    """

    pattern: re.Pattern[str]
    part: type[Text | Reasoning]


class Reader:
    """Reader of text that arrives in pieces.

    Attributes:
        rest: text that has arrived and is not read yet.
        has_ended: no more text arrives.
        plain: pieces that need not be read, until another one arrives; None: there are none.
    """

    def __init__(self) -> None:
        self.rest = ""
        self.has_ended = False
        self.plain: Plain | None = None
        self._kept: list[str] | None = None

    def take(self, length: int) -> str:
        """Reads `length` characters of `rest`."""
        piece, self.rest = self.rest[:length], self.rest[length:]
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def keep(self) -> None:
        """Remembers what is read from here on, and nothing before it."""
        self._kept = []

    def release(self) -> str:
        """Forgets what was kept, and returns it."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def put_back(self) -> bool:
        """Makes what was kept unread. Returns False if nothing was kept."""
        kept = self.release()
        self.rest = kept + self.rest
        return bool(kept)

    def more(self) -> Steps[None]:
        """Waits for more text. Raises `CutOff` if there is none."""
        if self.has_ended:
            raise CutOff
        yield

    def spaces(self) -> Steps[str]:
        """Reads whitespace, until other text is there or the text has ended."""
        pieces = []
        while True:
            pieces.append(self.take(len(self.rest) - len(self.rest.lstrip())))
            if self.rest or self.has_ended:
                return "".join(pieces)
            yield

    def literal(self, text: str) -> Steps[None]:
        """Reads `text`. Raises `NotACall` for other text."""
        while not self.rest.startswith(text):
            if not text.startswith(self.rest):
                raise NotACall
            yield from self.more()
        self.take(len(text))

    def skip_to(self, marks: Sequence[str]) -> Steps[str]:
        """Reads up to the first of `marks`, and returns the mark, unread. Raises `CutOff`."""
        while (found := first_of(self.rest, marks)) is None:
            self.take(len(self.rest) - held_back(self.rest, marks))
            yield from self.more()
        at, mark = found
        self.take(at)
        return mark

    def begins_with(self, texts: Sequence[str]) -> Steps[str]:
        """Returns the one of `texts` that comes next, unread; empty if none does."""
        while True:
            for text in texts:
                if self.rest.startswith(text):
                    return text
            if self.has_ended or not any(text.startswith(self.rest) for text in texts):
                return ""
            yield

    def one_of(self, texts: Sequence[str]) -> Steps[str]:
        """Returns the one of `texts` that comes next, unread. Raises `NotACall` for other text."""
        text = yield from self.begins_with(texts)
        if not text:
            is_cut = self.has_ended and any(text.startswith(self.rest) for text in texts)
            raise CutOff if is_cut else NotACall
        return text


@functools.cache
def without(marks: Sequence[str], last: str) -> re.Pattern[str]:
    """Returns a pattern of text in which no mark begins, and which does not end with one of the
    characters `last`, given as a range of a regular expression."""
    begins = "".join(re.escape(mark[0]) for mark in marks)
    return (
        re.compile(f"[^{begins}]*[^{begins}{last}]") if marks else re.compile(f"(?s:.*)[^{last}]")
    )


@functools.cache
def beginnings(marks: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern of the characters with which marks begin."""
    return re.compile(f"[{''.join(re.escape(mark[0]) for mark in marks)}]" if marks else "(?!)")


def first_of(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Returns where the first of `marks` is in `text`, and the mark; None: there is none."""
    found = None
    for mark in marks:
        at = text.find(mark)
        if at >= 0 and (found is None or at < found[0]):
            found = at, mark
    return found


def held_back(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the end of `text` that could be the beginning of a mark."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0:
            if mark.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(mark[0], at + 1)
    return longest
