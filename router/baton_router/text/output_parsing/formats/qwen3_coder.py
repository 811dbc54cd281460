"""Tool calls of Qwen3-Coder: elements for the call and for each of its parameters."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.calls import TaggedCalls, read_name, to_json
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import NotACall, Reader, Steps, held_back
from baton_router.text.output_parsing.schemas import Parameter, parameters

_END: Final = "</parameter>"
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}
# Keywords that say no more of a string than that it is one.
_NOTES: Final = frozenset(
    {"type", "title", "description", "default", "examples", "$defs", "definitions"}
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
        if name not in parts.tools:
            raise NotACall
        types = _types(parts.tools[name])
        if parts.is_forced:
            reader.release()
            parts.start_call(name)
            yield from _read_arguments(reader, types, parts.arguments, is_forced=True)
        else:
            pieces: list[str] = []
            yield from _read_arguments(reader, types, pieces.append, is_forced=False)
            parts.call(name, "".join(pieces))
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


def _types(tool: Tool) -> Mapping[str, Any]:
    """Returns the schemas of a tool's parameters by their names."""
    properties = (tool.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _read_arguments(
    reader: Reader, types: Mapping[str, Any], show: Callable[[str], None], *, is_forced: bool
) -> Steps[None]:
    """Reads parameters and the end of their call; shows them as a JSON object."""
    show("{")
    before = ""
    while True:
        yield from reader.spaces()
        mark = yield from reader.begins_with(["<parameter=", "</function>"])
        yield from reader.literal(mark or "</function>")
        if mark != "<parameter=":
            break
        name = yield from read_name(reader, (">",))
        yield from reader.literal(">")
        text = yield from _read_value(reader)
        show(f"{before}{to_json(name)}: {_value_of(text, types.get(name), is_forced=is_forced)}")
        before = ", "
    show("}")


def _read_value(reader: Reader) -> Steps[str]:
    """Reads the text of a parameter and its end, without the line breaks around the text."""
    pieces = []
    while (end := reader.rest.find(_END)) < 0:
        pieces.append(reader.take(len(reader.rest) - held_back(reader.rest, [_END])))
        yield from reader.more()
    pieces.append(reader.take(end))
    reader.take(len(_END))
    return "".join(pieces).removeprefix("\n").removesuffix("\n")


def _value_of(text: str, schema: Any, *, is_forced: bool) -> str:
    """Returns a value as JSON: the text as a string, or what it says where the schema asks for
    other values."""
    if _is_text(schema) and (_is_any_text(schema) or not is_forced):
        return to_json(text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _CONSTANTS.get(text) or to_json(text)
    return text


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
    if not _is_text(schema) or not _is_any_text(schema):
        return f"{lark.schema(schema)} {end}"
    return f'{lark.until(_END)} "\\n"'


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _is_any_text(schema: Mapping[str, Any]) -> bool:
    """Returns whether the schema of a string takes any. Other ones are written as JSON where a
    grammar has to follow them."""
    return not schema.keys() - _NOTES
