"""Tool call formats in which arguments are JSON, but for that of gpt-oss."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.calls import (
    TaggedCalls,
    arguments_rule,
    call_rule,
    read_arguments,
    read_call_object,
    read_name,
)
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class HermesCalls(TaggedCalls):
    """Calls of Hermes and Qwen: each an object between marks."""

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads one call. Raises `NotACall`."""
        yield from reader.literal("<tool_call>")
        yield from reader.spaces()
        yield from read_call_object(reader, parts, is_marked=True)
        yield from reader.spaces()
        while closer := (yield from reader.begins_with(["}", "]"])):  # one too many
            yield from reader.literal(closer)
            yield from reader.spaces()
        yield from reader.literal("</tool_call>")

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """Returns an expression that matches a call, but for the mark before it."""
        call = call_rule(lark, tools, "arguments")
        return f"{lark.literal(chr(10))} {call} {lark.literal(chr(10) + '</tool_call>')}"


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """Calls of Llama 3: objects at the beginning or after a mark, with semicolons between them."""

    marks: tuple[str, ...] = ("<|python_tag|>",)
    first_marks: tuple[str, ...] = ("{",)
    tokens: tuple[str, ...] = ("<|python_tag|>",)

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads all calls. Raises `NotACall`."""
        is_marked = bool((yield from reader.begins_with(self.marks)))
        if is_marked:
            yield from reader.literal(self.marks[0])
            yield from reader.spaces()
        while True:
            yield from read_call_object(reader, parts, is_marked=is_marked)
            yield from reader.spaces()
            if not (yield from reader.begins_with([";"])):
                return
            yield from reader.literal(";")
            yield from reader.spaces()

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        return f"{lark.literal(self.marks[0])}? {self._calls(lark, tools, is_one=is_one)}"

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        calls = lark.rule("calls", self._calls(lark, tools, is_one=is_one))
        return (
            f"{calls} | {lark.text(self.marks, self.first_marks)} | "
            f"{lark.until(self.marks[0], self.first_marks)} {calls}"
        )

    def _calls(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        call = call_rule(lark, tools, "parameters")
        return call if is_one else f'{call} ("; " {call})*'


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as the whole output: an object, or an array of objects."""

    marks: tuple[str, ...] = ()
    first_marks: tuple[str, ...] = ("{", "[")
    tokens: tuple[str, ...] = ()

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads all calls. Raises `NotACall`."""
        if (yield from reader.begins_with(["["])):
            yield from read_call_array(reader, parts, is_marked=False)
        else:
            yield from read_call_object(reader, parts, is_marked=False)

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        call = call_rule(lark, tools, "arguments")
        return call if is_one else f'({call} | "[" {call} (", " {call})* "]")'

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        calls = self.alone(lark, tools, is_one=is_one)
        return f"{calls} | {lark.text(first=self.first_marks)}"


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """Calls of Mistral: an array after a mark, or of newer models name and arguments after one."""

    marks: tuple[str, ...] = ("[TOOL_CALLS]",)
    first_marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads all calls after a mark. Raises `NotACall`."""
        yield from reader.literal("[TOOL_CALLS]")
        yield from reader.spaces()
        if (yield from reader.begins_with(["["])):
            yield from read_call_array(reader, parts, is_marked=True)
            return
        name = yield from read_name(reader, ("[CALL_ID]", "[ARGS]", "{"))
        if (yield from reader.begins_with(["[CALL_ID]"])):
            yield from read_name(reader, ("[ARGS]", "{"))
        if (yield from reader.begins_with(["[ARGS]"])):
            yield from reader.literal("[ARGS]")
        yield from reader.spaces()
        yield from read_arguments(reader, parts, name)

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        mark, calls = lark.literal("[TOOL_CALLS]"), self._calls(lark, tools, is_one=is_one)
        if is_one or not lark.is_token("[ARGS]"):
            return f"{mark} {calls}"
        return f"({mark} {calls})+"

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        calls = f"{lark.until('[TOOL_CALLS]')} {self._calls(lark, tools, is_one=is_one)}"
        if is_one or not lark.is_token("[ARGS]"):
            return f"{calls} | {lark.text(self.marks)}"
        return f"({calls})* {lark.text(self.marks)}"

    def _calls(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches what follows the mark."""
        if lark.is_token("[ARGS]"):
            calls = [
                f"{lark.literal(tool.name + '[ARGS]')} {arguments_rule(lark, tool, index)}"
                for index, tool in enumerate(tools)
            ]
            return f"({' | '.join(calls)})"
        call = call_rule(lark, tools, "arguments")
        more = "" if is_one else f'(", " {call})*'
        return f'" "? "[" {call} {more} "]"'


@dataclass(frozen=True, slots=True)
class DeepSeekCalls:
    """Calls of DeepSeek: name and arguments between marks, of V3 and R1 in a code block."""

    marks: tuple[str, ...] = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    first_marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads all calls. Raises `NotACall`."""
        _, beginning, _, end, all_end = self.tokens
        if (yield from reader.begins_with(self.tokens[:1])):
            yield from reader.literal(self.tokens[0])
            yield from reader.spaces()
        while True:
            yield from reader.literal(beginning)
            yield from self._read_call(reader, parts, end)
            yield from reader.spaces()
            yield from reader.literal(end)
            reader.keep()
            yield from reader.spaces()
            if (yield from reader.one_of([beginning, all_end])) == all_end:
                yield from reader.literal(all_end)
                return

    def _read_call(self, reader: Reader, parts: PartCollector, end: str) -> Steps[None]:
        separator, fence = self.tokens[2], "```json"
        name = yield from read_name(reader, (separator,))
        yield from reader.literal(separator)
        yield from reader.spaces()
        if (yield from reader.begins_with(["{", end])):
            yield from read_arguments(reader, parts, name, [end])
            return
        name = yield from read_name(reader, (fence,))
        yield from reader.literal(fence)
        yield from reader.spaces()
        yield from read_arguments(reader, parts, name, ["```"])
        yield from reader.spaces()
        yield from reader.literal("```")

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        return f"{lark.literal(self.tokens[0])} {self._calls(lark, tools, is_one=is_one)}"

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        calls = self._calls(lark, tools, is_one=is_one)
        return f"{lark.until(self.tokens[0])} {calls} | {lark.text(self.marks)}"

    def _calls(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches what follows the first mark."""
        _, beginning, separator, end, all_end = self.tokens
        forms = []
        for index, tool in enumerate(tools):
            arguments = arguments_rule(lark, tool, index)
            fenced = lark.literal(f"function{separator}{tool.name}\n```json\n")
            forms.append(f'{fenced} {arguments} "\\n```"')
            forms.append(f"{lark.literal(tool.name + separator)} {arguments}")
        call = lark.rule("call", f"{lark.literal(beginning)} ({' | '.join(forms)})")
        ended = f"{call} {lark.literal(end)}"
        more = "" if is_one else f'("\\n"? {ended})*'
        return f"{ended} {more} {lark.literal(all_end)}"


def read_call_array(reader: Reader, parts: PartCollector, *, is_marked: bool) -> Steps[None]:
    """Reads an array of the objects of calls, and adds the calls. Raises `NotACall`.

    Args:
        is_marked: as of `read_call_object`.
    """
    yield from reader.literal("[")
    while True:
        yield from reader.spaces()
        yield from read_call_object(reader, parts, is_marked=is_marked)
        yield from reader.spaces()
        separator = yield from reader.one_of([",", "]"])
        yield from reader.literal(separator)
        if separator == "]":
            return
