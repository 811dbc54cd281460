"""Tool calls as elements: one for the call, and for each parameter one or two.

Strings are written as they are, and other values as JSON.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.calls import TaggedCalls, check_name, read_name
from baton_router.text.output_parsing.json_scanner import JsonScanner, quoted, to_json
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import Reader, Steps, held_back
from baton_router.text.output_parsing.schemas import (
    MARK,
    Parameter,
    ValueTypes,
    arguments_schema,
    parameters,
    type_of,
)

_TOOL_CALL_END: Final = "</tool_call>"
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
# Keywords that say no more of a string than that it is one.
_NOTES: Final = frozenset(
    {MARK, "type", "title", "description", "default", "examples", "$defs", "definitions"}
)


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements as a model writes them, with the line breaks around them.

    Attributes:
        call: what stands before the name of a tool,
        named: after it,
        call_end: and after the last parameter.
        parameter: what stands before the name of a parameter,
        value: between name and value,
        value_end: and after the value.
        keeps_breaks: line breaks at the ends of a value belong to it.
    """

    call: str
    named: str
    call_end: str
    parameter: str
    value: str
    value_end: str
    keeps_breaks: bool


QWEN3_CODER: Final = Elements(
    call="\n<function=",
    named=">\n",
    call_end="</function>\n",
    parameter="<parameter=",
    value=">\n",
    value_end="\n</parameter>\n",
    keeps_breaks=False,
)
GLM: Final = Elements(
    call="",
    named="\n",
    call_end="",
    parameter="<arg_key>",
    value="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
    keeps_breaks=True,
)
GLM_TOKENS: Final = (
    *("<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


@dataclass(frozen=True, slots=True)
class ElementCalls(TaggedCalls):
    """Calls of elements."""

    elements: Elements = QWEN3_CODER

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads one call. Raises `NotACall`."""
        elements = self.elements
        yield from reader.literal("<tool_call>")
        yield from reader.spaces()
        yield from reader.literal(elements.call.strip())
        ends = (elements.named.strip(),) if elements.named.strip() else ("\n", "<")
        name = yield from read_name(reader, ends)
        yield from reader.literal(elements.named.strip())
        check_name(name, parts)
        reader.release()
        parts.start_call(name)
        yield from self._read_parameters(reader, parts, parts.tools.get(name))
        reader.keep()
        yield from reader.spaces()
        yield from reader.literal(_TOOL_CALL_END)

    def _read_parameters(
        self, reader: Reader, parts: PartCollector, tool: Tool | None
    ) -> Steps[None]:
        """Reads parameters and the end of their call; shows them as a JSON object."""
        mark, call_end = self.elements.parameter, self.elements.call_end.strip()
        marks = [mark, *([call_end] if call_end else []), _TOOL_CALL_END]
        root = {} if tool is None else arguments_schema(tool)
        schemas = root.get("properties")
        parts.arguments("{")
        before = ""
        while (yield from reader.skip_to(marks)) == mark:
            yield from reader.literal(mark)
            name = yield from self._read_parameter_name(reader)
            parts.arguments(f"{before}{to_json(name)}: ")
            before = ", "
            schema = schemas.get(name) if isinstance(schemas, Mapping) else None
            types = ValueTypes(root).of(schema)
            # A grammar has all other ones written as JSON.
            is_raw = not parts.is_forced or _is_any_text(schema)
            if is_raw and types == {"string"}:
                yield from self._read_string(reader, parts.arguments)
            else:
                text: list[str] = []
                yield from self._read_value(reader, text.append)
                parts.arguments(_value_of("".join(text), types, is_raw=is_raw))
        if call_end and (yield from reader.begins_with([call_end])):
            yield from reader.literal(call_end)
        parts.arguments("}")

    def _read_parameter_name(self, reader: Reader) -> Steps[str]:
        """Reads the name of a parameter, and the marks between it and its value."""
        first, *others = self.elements.value.split("\n")
        name = yield from read_name(reader, (first,), math.inf)
        yield from reader.literal(first)
        for mark in filter(None, others):
            yield from reader.spaces()
            yield from reader.literal(mark)
        return name

    def _read_string(self, reader: Reader, show: Callable[[str], None]) -> Steps[None]:
        """Reads the text of a parameter and its end; shows it as a JSON string."""
        show('"')
        yield from self._read_value(reader, lambda text: show(quoted(text)))
        show('"')

    def _read_value(self, reader: Reader, show: Callable[[str], None]) -> Steps[None]:
        """Reads the text of a parameter and its end; shows it, without the line breaks around it
        unless they belong to it."""
        mark, keeps_breaks = self.elements.value_end.strip(), self.elements.keeps_breaks
        if not keeps_breaks and (yield from reader.begins_with(["\n"])):
            yield from reader.literal("\n")
        while (end := reader.rest.find(mark)) < 0:
            length = len(reader.rest)
            if "<" in reader.rest:
                length -= held_back(reader.rest, [mark])
            if not keeps_breaks and reader.rest.endswith("\n", 0, length):
                length -= 1
            show(reader.take(length))
            yield from reader.more()
        text = reader.take(end)
        show(text if keeps_breaks else text.removesuffix("\n"))
        reader.take(len(mark))

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """Returns an expression that matches a call, but for the mark before it."""
        calls = [
            f"{lark.literal(tool.name + self.elements.named)} {self._arguments(lark, tool, index)}"
            for index, tool in enumerate(tools)
        ]
        call = lark.rule("call", " | ".join(calls))
        end = lark.literal(self.elements.call_end + _TOOL_CALL_END)
        return f"{lark.literal(self.elements.call)} {call} {end}".lstrip()

    def _arguments(self, lark: Lark, tool: Tool, index: int) -> str:
        """Returns an expression that matches the parameters of a call of `tool`."""
        elements, known = self.elements, parameters(tool)
        if known is None:
            value = f"{lark.rule('value', lark.schema({}))} {lark.literal(elements.value_end)}"
            beginning, named = lark.literal(elements.parameter), lark.literal(elements.value)
            return rf"({beginning} /[a-zA-Z_][a-zA-Z0-9_]*/ {named} {value})*"
        rules = []
        for number, parameter in enumerate(known):
            beginning = lark.literal(elements.parameter + parameter.name + elements.value)
            body = f"{beginning} {self._value(lark, parameter)}"
            rule = lark.rule(f"parameter_{index}_{number}", body)
            rules.append(rule if parameter.is_required else f"{rule}?")
        return " ".join(rules)

    def _value(self, lark: Lark, parameter: Parameter) -> str:
        """Returns an expression that matches the value of a parameter and its end."""
        end = self.elements.value_end
        if not _is_any_text(parameter.schema):
            return f"{lark.schema(parameter.schema)} {lark.literal(end)}"
        mark = end.strip()
        return f"{lark.until(mark)} {lark.literal(end.partition(mark)[2])}"


def _value_of(text: str, types: Set[str], *, is_raw: bool) -> str:
    """Returns a value as JSON: what the text says, or the text as a string where only that is of
    the types that the schema admits.

    Args:
        is_raw: the model has written strings as they are, else as JSON.
    """
    written = _CONSTANTS.get(text, text)
    try:
        value = json.loads(written, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return to_json(text)
    kind = type_of(value)
    if "string" in types and (kind not in types or (is_raw and kind == "string")):
        return to_json(text)
    # Strings in it may have line breaks as such.
    return JsonScanner().read(written)[0]


def _refuse(name: str) -> None:
    raise ValueError(name)


def _is_any_text(schema: Any) -> bool:
    """Returns whether a schema admits any string and nothing else. Other strings are written as
    JSON where a grammar has to follow them."""
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return is_text and not schema.keys() - _NOTES
