"""Reasoning formats: where reasoning is in what a model writes, before all else."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.call.output_format import ParsingOptions
from baton_router.call.parts import Reasoning
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import (
    NotACall,
    Plain,
    Reader,
    Steps,
    beginnings,
    first_of,
    held_back,
    without,
)


@dataclass(frozen=True, slots=True)
class MarkedReasoning:
    """Reasoning between two marks, with line breaks around it that are left out.

    Attributes:
        opening: it begins the reasoning, unless the prompt has ended with it.
        is_always_open: the output begins within reasoning, also after prompts without `opening`.
    """

    opening: str
    closing: str
    is_always_open: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def opens(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (
            self.is_always_open and not end.endswith(self.closing)
        )

    def closes(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends with reasoning that is closed."""
        return prompt.rstrip().endswith(self.closing)

    def read(
        self, reader: Reader, parts: PartCollector, options: ParsingOptions, marks: Sequence[str]
    ) -> Steps[str]:
        """Reads reasoning, if there is any. Returns what it has from the first of `marks` on if the
        output ends within it; else an empty text."""
        splits = options.splits_reasoning
        parts.is_reasoning = splits and options.is_reasoning_open
        reader.keep()
        try:
            yield from reader.spaces()
            yield from reader.literal(self.opening)
        except NotACall:
            reader.put_back()
            if not options.is_reasoning_open:
                return ""
        parts.is_reasoning = splits
        opening = reader.release()
        if not splits:
            parts.text(opening)
            return (yield from self._read_body(reader, parts, marks))
        yield from _skip_line_breaks(reader)
        unclosed = yield from self._read_body(reader, parts, marks)
        yield from _skip_line_breaks(reader)
        return unclosed

    def _read_body(self, reader: Reader, parts: PartCollector, marks: Sequence[str]) -> Steps[str]:
        """Reads reasoning and the mark that ends it. Returns as `read`."""
        splits = parts.is_reasoning
        show = parts.reasoning if splits else parts.text
        all_marks = (self.closing, *marks)
        begins, has_mark = beginnings(all_marks), False
        plain = Plain(without(all_marks, r"\n"), Reasoning) if splits else None
        while True:
            length = len(reader.rest)
            if reader.has_ended:
                show(reader.take(length))
                return reader.release()
            if begins.search(reader.rest):
                if (end := reader.rest.find(self.closing)) >= 0:
                    break
                if not has_mark and (found := first_of(reader.rest, marks)) is not None:
                    has_mark = True
                    show(reader.take(found[0]))
                    reader.keep()
                length = len(reader.rest) - held_back(reader.rest, all_marks)
            show(reader.take(len(reader.rest[:length].rstrip("\n")) if splits else length))
            reader.plain = None if reader.rest or has_mark else plain
            yield
            reader.plain = None
        body, closing = reader.take(end), reader.take(len(self.closing))
        reader.release()
        show(body.rstrip("\n") if splits else body + closing)
        parts.is_reasoning = False
        return ""

    def lark(self, lark: Lark, options: ParsingOptions) -> str:
        """Returns an expression that matches the reasoning, if there is any."""
        body = lark.until(self.closing, most_tokens=options.max_reasoning_tokens)
        if options.is_reasoning_open:
            return f'{body} ("\\n" | "\\n\\n")?'
        return f'({lark.literal(self.opening)} {body} ("\\n" | "\\n\\n")?)?'


def _skip_line_breaks(reader: Reader) -> Steps[None]:
    while True:
        reader.take(len(reader.rest) - len(reader.rest.lstrip("\n")))
        if reader.rest or reader.has_ended:
            return
        yield
