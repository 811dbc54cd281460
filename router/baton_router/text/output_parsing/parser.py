"""Parser of outputs: reasoning first, then text with tool calls in it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.call.parts import (
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.reader import (
    CutOff,
    NotACall,
    Plain,
    Reader,
    Steps,
    beginnings,
    first_of,
    held_back,
    without,
)


def is_forced(options: ParsingOptions) -> bool:
    """Returns whether a grammar makes every call valid."""
    if not options.tools or options.choice is Choice.NONE:
        return False
    return (
        options.choice is not Choice.AUTO
        or options.one_tool_call
        or any(tool.strict for tool in options.tools)
    )


def needs_grammar(options: ParsingOptions, inner: str | None) -> bool:
    """Returns whether outputs have to match a grammar."""
    return inner is not None or options.max_reasoning_tokens is not None or is_forced(options)


def tools_to_call(options: ParsingOptions) -> Sequence[Tool]:
    """Returns the tools that may be called."""
    match options.choice:
        case Choice.NONE:
            return ()
        case Choice.NAMED:
            return [tool for tool in options.tools if tool.name == options.tool_name]
    return options.tools


class PartCollector:
    """Collector of the parts of one output.

    Whitespace around calls separates them from text and from one another: it comes out before the
    text that follows it, and is left out at the end of an output with calls.

    Attributes:
        options: of the parsing.
        tools: those that may be called, by name.
        is_forced: a grammar makes every call valid.
        is_reasoning: the output has come to reasoning that becomes parts of its own.
    """

    def __init__(self, options: ParsingOptions) -> None:
        self.options = options
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools_to_call(options)}
        self.is_forced = is_forced(options)
        self.is_reasoning = False
        self._parts: list[Part] = []
        self._spaces: list[str] = []
        self._num_calls = 0

    @property
    def holds_spaces(self) -> bool:
        """True if there is whitespace that comes out before the next text."""
        return bool(self._spaces)

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

    def closes(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends with reasoning that is closed."""

    def lark(self, lark: Lark, options: ParsingOptions) -> str:
        """Returns an expression that matches the reasoning, if there is any."""

    def read(
        self, reader: Reader, parts: PartCollector, options: ParsingOptions, marks: Sequence[str]
    ) -> Steps[str]:
        """Reads reasoning, if there is any. Returns what it has from the first of `marks` on if the
        output ends within it; else an empty text."""


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
        reader is then text. Raises `CutOff` for calls that are cut off."""

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""


ReadOutput: TypeAlias = Callable[[Reader, PartCollector, ParsingOptions], Steps[None]]


class SequenceParser:
    """Parser of the output of one sequence, an `OutputParser`.

    Args:
        read: reads a whole output.
    """

    def __init__(self, options: ParsingOptions, read: ReadOutput) -> None:
        self._reader = Reader()
        self._parts = PartCollector(options)
        self._steps = read(self._reader, self._parts, options)
        # Until it waits for text.
        next(self._steps)
        self.is_reasoning = self._parts.is_reasoning

    def push(self, text: str) -> list[Part]:
        """Returns the parts that are certain now."""
        plain = self._reader.plain
        if plain is not None and plain.pattern.fullmatch(text):
            return [plain.part(text)]
        if text:
            self._reader.rest += text
            next(self._steps)
            self.is_reasoning = self._parts.is_reasoning
        return self._parts.drain()

    def finish(self) -> list[Part]:
        """Returns the parts that were held back, once the output has ended."""
        self._reader.has_ended = True
        next(self._steps, None)
        self._parts.finish()
        return self._parts.drain()


def read_text(reader: Reader, parts: PartCollector) -> Steps[None]:
    """Reads text without calls."""
    while True:
        parts.text(reader.take(len(reader.rest)))
        if reader.has_ended:
            return
        yield


def read_calls(syntax: CallSyntax, reader: Reader, parts: PartCollector) -> Steps[None]:
    """Reads text with calls in it."""
    begins, plain = beginnings(syntax.marks), Plain(without(syntax.marks, r"\s"), Text)
    parts.text((yield from reader.spaces()))
    if (yield from reader.begins_with(syntax.first_marks)):
        yield from _read_block(syntax, reader, parts)
    while True:
        length = len(reader.rest)
        if begins.search(reader.rest):
            if (found := first_of(reader.rest, syntax.marks)) is not None:
                parts.text(reader.take(found[0]))
                yield from _read_block(syntax, reader, parts)
                continue
            if not reader.has_ended:
                length -= held_back(reader.rest, syntax.marks)
        parts.text(reader.take(length))
        if reader.has_ended:
            return
        reader.plain = None if reader.rest or parts.holds_spaces else plain
        yield
        reader.plain = None


def _read_block(syntax: CallSyntax, reader: Reader, parts: PartCollector) -> Steps[None]:
    """Reads calls from their mark on. What is none is text, but for marks in it; what is cut off is
    left out."""
    reader.keep()
    try:
        yield from syntax.read(reader, parts)
        reader.release()
    except CutOff:
        reader.take(len(reader.rest))
        reader.release()
    except NotACall:
        if reader.put_back():
            parts.text(reader.take(1))
