"""Tool calls of Qwen3-Coder: elements for the call and for each of its parameters."""

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

_PARAMETER: Final = "<parameter="
_END: Final = "</parameter>"
_CALL_END: Final = "</function>"
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
# Keywords that say no more of a string than that it is one.
_NOTES: Final = frozenset(
    {MARK, "type", "title", "description", "default", "examples", "$defs", "definitions"}
)


@dataclass(frozen=True, slots=True)
class Qwen3CoderCalls(TaggedCalls):
    """Calls of Qwen3-Coder, in which strings are written as they are and other values as JSON."""

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads one call. Raises `NotACall`."""
        yield from reader.literal("<tool_call>")
        yield from reader.spaces()
        yield from reader.literal("<function=")
        name = yield from read_name(reader, (">",))
        yield from reader.literal(">")
        check_name(name, parts)
        reader.release()
        parts.start_call(name)
        yield from _read_parameters(reader, parts, parts.tools.get(name))
        reader.keep()
        yield from reader.spaces()
        yield from reader.literal("</tool_call>")

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """Returns an expression that matches a call, but for the mark before it."""
        calls = [
            f"{lark.literal(tool.name + '>' + chr(10))} {_arguments(lark, tool, index)}"
            for index, tool in enumerate(tools)
        ]
        call = lark.rule("call", " | ".join(calls))
        beginning, end = lark.literal("\n<function="), lark.literal("</function>\n</tool_call>")
        return f"{beginning} {call} {end}"


def _read_parameters(reader: Reader, parts: PartCollector, tool: Tool | None) -> Steps[None]:
    """Reads parameters and the end of their call; shows them as a JSON object."""
    root = {} if tool is None else arguments_schema(tool)
    schemas = root.get("properties")
    parts.arguments("{")
    before = ""
    while (yield from reader.skip_to([_PARAMETER, _CALL_END, "</tool_call>"])) == _PARAMETER:
        yield from reader.literal(_PARAMETER)
        name = yield from read_name(reader, (">",), math.inf)
        yield from reader.literal(">")
        parts.arguments(f"{before}{to_json(name)}: ")
        before = ", "
        schema = schemas.get(name) if isinstance(schemas, Mapping) else None
        types = ValueTypes(root).of(schema)
        # A grammar has all other ones written as JSON.
        is_raw = not parts.is_forced or _is_any_text(schema)
        if is_raw and types == {"string"}:
            yield from _read_string(reader, parts.arguments)
        else:
            text: list[str] = []
            yield from _read_value(reader, text.append)
            parts.arguments(_value_of("".join(text), types, is_raw=is_raw))
    if (yield from reader.begins_with([_CALL_END])):
        yield from reader.literal(_CALL_END)
    parts.arguments("}")


def _read_string(reader: Reader, show: Callable[[str], None]) -> Steps[None]:
    """Reads the text of a parameter and its end; shows it as a JSON string."""
    show('"')
    yield from _read_value(reader, lambda text: show(quoted(text)))
    show('"')


def _read_value(reader: Reader, show: Callable[[str], None]) -> Steps[None]:
    """Reads the text of a parameter and its end; shows it without the line breaks around it."""
    if (yield from reader.begins_with(["\n"])):
        yield from reader.literal("\n")
    while (end := reader.rest.find(_END)) < 0:
        length = len(reader.rest)
        if "<" in reader.rest:
            length -= held_back(reader.rest, [_END])
        if reader.rest.endswith("\n", 0, length):
            length -= 1
        show(reader.take(length))
        yield from reader.more()
    show(reader.take(end).removesuffix("\n"))
    reader.take(len(_END))


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


def _arguments(lark: Lark, tool: Tool, index: int) -> str:
    """Returns an expression that matches the parameters of a call of `tool`."""
    known = parameters(tool)
    if known is None:
        value = lark.rule("value", lark.schema({}))
        return rf'("<parameter=" /[a-zA-Z_][a-zA-Z0-9_]*/ ">\n" {value} "\n{_END}\n")*'
    rules = []
    for number, parameter in enumerate(known):
        body = (
            f"{lark.literal(f'<parameter={parameter.name}>' + chr(10))} {_value(lark, parameter)}"
        )
        rule = lark.rule(f"parameter_{index}_{number}", body)
        rules.append(rule if parameter.is_required else f"{rule}?")
    return " ".join(rules)


def _value(lark: Lark, parameter: Parameter) -> str:
    """Returns an expression that matches the value of a parameter and its end."""
    schema = parameter.schema
    end = lark.literal(f"\n{_END}\n")
    if not _is_any_text(schema):
        return f"{lark.schema(schema)} {end}"
    return f'{lark.until(_END)} "\\n"'


def _is_any_text(schema: Any) -> bool:
    """Returns whether a schema admits any string and nothing else. Other strings are written as
    JSON where a grammar has to follow them."""
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return is_text and not schema.keys() - _NOTES
