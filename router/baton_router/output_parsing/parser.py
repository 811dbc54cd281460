"""Parser of outputs: reasoning first, then text with tool calls in it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from baton_router.output_parsing.lark import Lark
from baton_router.output_parsing.output_format import Choice, ParsingOptions, Tool
from baton_router.output_parsing.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from baton_router.output_parsing.reader import NotACall, Reader, Steps, held_back


def is_forced(options: ParsingOptions) -> bool:
    """Returns whether a grammar makes every call valid."""
    if not options.tools or options.choice is Choice.NONE:
        return False
    return (
        options.choice is not Choice.AUTO
        or options.one_tool_call
        or any(tool.strict for tool in options.tools)
    )


class PartCollector:
    """Collector of the parts of one output.

    Whitespace around calls separates them from text and from one another: it comes out before the
    text that follows it, and is left out at the end of an output with calls.

    Attributes:
        tools: those that may be called, by name.
        is_forced: a grammar makes every call valid.
    """

    def __init__(self, options: ParsingOptions) -> None:
        may_call = options.choice is not Choice.NONE
        self.tools: Mapping[str, Tool] = {t.name: t for t in options.tools if may_call}
        self.is_forced = is_forced(options)
        self._parts: list[Part] = []
        self._spaces: list[str] = []
        self._num_calls = 0

    def drain(self) -> list[Part]:
        """Returns the parts since the last call of `drain`."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> None:
        """Adds whitespace that ends an output without calls."""
        if not self._num_calls:
            self._append_text("".join(self._spaces))

    def text(self, text: str) -> None:
        if not self.tools:
            self._append_text(text)
            return
        shown = text.rstrip()
        if shown:
            self._append_text("".join(self._spaces) + shown)
            self._spaces.clear()
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def start_call(self, name: str) -> None:
        self._parts.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, json: str) -> None:
        """Adds a piece of the arguments of the call that was started last."""
        if json:
            self._parts.append(ToolCallArguments(self._num_calls - 1, json))

    def call(self, name: str, arguments: str) -> None:
        self.start_call(name)
        self.arguments(arguments)

    def _append_text(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(self._parts[-1], Text):
            text = self._parts.pop().text + text  # type: ignore[union-attr]
        self._parts.append(Text(text))


class ReasoningSyntax(Protocol):
    """Syntax of reasoning, which comes before all else.

    Attributes:
        tokens: its marks, which are special tokens of some tokenizers.
    """

    @property
    def tokens(self) -> tuple[str, ...]: ...

    def opens(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends within reasoning."""

    def lark(self, lark: Lark, options: ParsingOptions) -> str:
        """Returns an expression that matches the reasoning, if there is any."""

    def read(self, reader: Reader, parts: PartCollector, options: ParsingOptions) -> Steps[None]:
        """Reads reasoning, if there is any."""


class CallSyntax(Protocol):
    """Syntax of tool calls in text.

    Attributes:
        marks: each begins calls, wherever it is in a text.
        first_marks: these do at the beginning of a text.
        tokens: marks of all kinds, which are special tokens of some tokenizers.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def first_marks(self) -> tuple[str, ...]: ...

    @property
    def tokens(self) -> tuple[str, ...]: ...

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads calls from their mark on. Raises `NotACall` for what is none; what it kept in the
        reader is then text."""

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""


class SequenceParser:
    """Parser of the output of one sequence, in one syntax for reasoning and one for calls."""

    def __init__(
        self,
        options: ParsingOptions,
        reasoning: ReasoningSyntax | None,
        calls: CallSyntax | None,
    ) -> None:
        self._reader = Reader()
        self._parts = PartCollector(options)
        self._options = options
        self._reasoning = reasoning
        self._calls = calls if self._parts.tools else None
        self._steps = self._read()
        next(self._steps)

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain now."""
        self._reader.rest += text
        next(self._steps)
        return self._parts.drain()

    def finish(self) -> list[Part]:
        """Returns the parts that were held back, once the output has ended."""
        self._reader.has_ended = True
        next(self._steps, None)
        self._parts.finish()
        return self._parts.drain()

    def _read(self) -> Steps[None]:
        yield
        if self._reasoning is not None:
            yield from self._reasoning.read(self._reader, self._parts, self._options)
        if self._calls is None:
            yield from self._read_text()
        else:
            yield from self._read_calls(self._calls)

    def _read_text(self) -> Steps[None]:
        while True:
            self._parts.text(self._reader.take(len(self._reader.rest)))
            if self._reader.has_ended:
                return
            yield

    def _read_calls(self, syntax: CallSyntax) -> Steps[None]:
        reader, parts = self._reader, self._parts
        parts.text((yield from reader.spaces()))
        if (yield from reader.begins_with(syntax.first_marks)):
            yield from self._read_call(syntax)
        while True:
            found = [at for mark in syntax.marks if (at := reader.rest.find(mark)) >= 0]
            if found:
                parts.text(reader.take(min(found)))
                yield from self._read_call(syntax)
                continue
            length = len(reader.rest)
            if not reader.has_ended:
                length -= held_back(reader.rest, syntax.marks)
            parts.text(reader.take(length))
            if reader.has_ended:
                return
            yield

    def _read_call(self, syntax: CallSyntax) -> Steps[None]:
        """Reads calls. What is none is text, but for marks in it."""
        reader = self._reader
        reader.keep()
        try:
            yield from syntax.read(reader, self._parts)
            reader.release()
        except NotACall:
            if reader.has_ended:
                self._parts.text(reader.release())
            elif reader.put_back():
                self._parts.text(reader.take(1))
