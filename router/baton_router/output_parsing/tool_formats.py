"""Tool call formats of models, of calls that are JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.output_parsing.calls import call_rule, read_call_object
from baton_router.output_parsing.lark import TEXT, Lark
from baton_router.output_parsing.output_format import Tool
from baton_router.output_parsing.parser import PartCollector
from baton_router.output_parsing.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class HermesCalls:
    """Each call an object between marks, as Hermes and Qwen write them."""

    marks: tuple[str, ...] = ("<tool_call>",)
    first_marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads one call. Raises `NotACall`."""
        yield from reader.literal("<tool_call>")
        yield from reader.spaces()
        yield from read_call_object(reader, parts)
        yield from reader.spaces()
        yield from reader.literal("</tool_call>")

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        call = f"{lark.literal('<tool_call>')} {self._call(lark, tools)}"
        return call if is_one else f'{call} ("\\n"? {call})*'

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        call = f"{lark.until('<tool_call>', 'before_call')} {self._call(lark, tools)}"
        return f"{call} | {TEXT}" if is_one else f"({call})* {TEXT}"

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """Returns an expression that matches a call, but for the mark before it."""
        call = call_rule(lark, tools, "arguments")
        return f"{lark.literal(chr(10))} {call} {lark.literal(chr(10) + '</tool_call>')}"


CALL_SYNTAXES = {"hermes": HermesCalls()}
