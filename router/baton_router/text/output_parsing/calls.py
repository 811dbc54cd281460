"""Parts that formats of tool calls share: JSON objects with a name and arguments, and tags."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.json_scanner import JsonScanner, json_value
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import NotACall, Reader, Steps
from baton_router.text.output_parsing.schemas import arguments_schema

_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_HEADER: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_STRING_END: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_NAME_LENGTH: Final = 512


def read_call_object(reader: Reader, parts: PartCollector) -> Steps[None]:
    """Reads the object of one call, which comes next, and adds the call. Raises `NotACall`."""
    if not parts.is_forced:
        call = call_of((yield from json_value(reader)), parts)
        reader.keep()
        parts.call(*call)
        return
    for text in ("{", '"name"', ":"):
        yield from reader.literal(text)
        yield from reader.spaces()
    name = yield from _string(reader)
    yield from reader.spaces()
    yield from reader.literal(",")
    yield from reader.spaces()
    key = yield from reader.begins_with([f'"{key}"' for key in _ARGUMENT_KEYS])
    yield from reader.literal(key or _ARGUMENT_KEYS[0])
    yield from reader.spaces()
    yield from reader.literal(":")
    yield from reader.spaces()
    yield from read_arguments(reader, parts, name)
    yield from reader.spaces()
    yield from reader.literal("}")
    reader.keep()


def read_arguments(reader: Reader, parts: PartCollector, name: str) -> Steps[None]:
    """Reads the object of the arguments, which comes next, and adds a call of the tool `name`.
    Raises `NotACall`."""
    if name not in parts.tools:
        raise NotACall
    if not parts.is_forced:
        arguments = object_text((yield from json_value(reader)))
        reader.keep()
        parts.call(name, arguments)
        return
    while not reader.rest:
        yield from reader.more()
    if reader.rest[0] != "{":
        raise NotACall
    reader.release()
    parts.start_call(name)
    scanner = JsonScanner()
    end = None
    while end is None:
        end = scanner.end(reader.rest)
        parts.arguments(reader.take(len(reader.rest) if end is None else end))
        if end is None:
            yield from reader.more()
    reader.keep()


def read_name(reader: Reader, ends: Sequence[str]) -> Steps[str]:
    """Reads a name up to one of `ends`. Raises `NotACall`."""
    while not (found := [at for end in ends if (at := reader.rest.find(end)) >= 0]):
        if len(reader.rest) > _MAX_NAME_LENGTH:
            raise NotACall
        yield from reader.more()
    return reader.take(min(found)).strip()


def to_json(value: Any) -> str:
    """Returns a value as JSON text, which can be encoded in UTF-8. Raises `NotACall` for infinity,
    as which numbers are read that are too large."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise NotACall from error
    return json.dumps(value) if _SURROGATE.search(text) else text


def call_rule(lark: Lark, tools: Sequence[Tool], key: str) -> str:
    """Adds a rule that matches the object of a call of one of `tools`, and returns its name.

    Args:
        key: of the arguments.
    """
    calls = [
        lark.literal(json.dumps(tool.name, ensure_ascii=False)[1:] + f', "{key}": ')
        + " "
        + arguments_rule(lark, tool, index)
        for index, tool in enumerate(tools)
    ]
    beginning, end = lark.literal('{"name": "'), lark.literal("}")
    return lark.rule("call", f"{beginning} ({' | '.join(calls)}) {end}")


def arguments_rule(lark: Lark, tool: Tool, index: int) -> str:
    """Adds a rule that matches the arguments of a call of `tool`, and returns its name.

    Args:
        index: of the tool among all.
    """
    return lark.rule(f"arguments_{index}", lark.schema(arguments_schema(tool)))


def calls_of(text: str, parts: PartCollector) -> list[tuple[str, str]]:
    """Returns names and arguments of the calls in an array. Raises `NotACall`."""
    calls = _loaded(text)
    if not isinstance(calls, list) or not calls:
        raise NotACall
    return [_checked(call, to_json(call), parts) for call in calls]


def call_of(text: str, parts: PartCollector) -> tuple[str, str]:
    """Returns name and arguments of a call from its object. Raises `NotACall`."""
    return _checked(_loaded(text), text, parts)


def _checked(call: Any, text: str, parts: PartCollector) -> tuple[str, str]:
    if not isinstance(call, dict) or not _is_known(call.get("name"), parts):
        raise NotACall
    key = next((key for key in _ARGUMENT_KEYS if key in call), None)
    if key is None:
        raise NotACall
    return call["name"], _as_written(text, call[key])


def _is_known(name: Any, parts: PartCollector) -> bool:
    return isinstance(name, str) and name in parts.tools


def _as_written(text: str, arguments: Any) -> str:
    """Returns the arguments as they are in the text of a call, where they are an object."""
    if isinstance(arguments, str):
        return object_text(arguments)
    if not isinstance(arguments, dict):
        raise NotACall
    header = _HEADER.match(text)
    if header is not None and text.startswith("{", header.end()):
        end = JsonScanner().end(text[header.end() :])
        if end is not None and text[header.end() + end :].strip() == "}":
            return object_text(text[header.end() :][:end])
    return to_json(arguments)


def object_text(text: str) -> str:
    """Returns the text of an object as valid JSON. Raises `NotACall`."""
    value = _loaded(text)
    if not isinstance(value, dict):
        raise NotACall
    try:
        json.loads(text)
    except ValueError:
        return to_json(value)
    return text


def _loaded(text: str) -> Any:
    """Returns the value of a JSON text, in which strings may contain line breaks as such."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotACall from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _string(reader: Reader) -> Steps[str]:
    while (match := _STRING_END.match(reader.rest)) is None:
        if reader.rest[:1] not in ("", '"') or len(reader.rest) > _MAX_NAME_LENGTH:
            raise NotACall
        yield from reader.more()
    return str(_loaded(reader.take(match.end())))


@dataclass(frozen=True, slots=True)
class TaggedCalls(ABC):
    """Calls each of which stands between `<tool_call>` and `</tool_call>`."""

    marks: tuple[str, ...] = ("<tool_call>",)
    first_marks: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        call = f"{lark.literal('<tool_call>')} {self._call(lark, tools)}"
        return call if is_one else f'{call} ("\\n"? {call})*'

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        call = f"{lark.until('<tool_call>')} {self._call(lark, tools)}"
        return (
            f"{call} | {lark.text(self.marks)}" if is_one else f"({call})* {lark.text(self.marks)}"
        )

    @abstractmethod
    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        """Returns an expression that matches a call, but for the mark before it."""
