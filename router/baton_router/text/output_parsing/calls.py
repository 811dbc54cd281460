"""Parts that formats of tool calls share: JSON objects with a name and arguments, and tags.

A call is certain once its name is known and its arguments begin; from there on they are sent as the
model writes them. What is wrong in them later is sent, too.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.json_scanner import (
    JsonScanner,
    escaped_surrogates,
    read_json,
    read_json_end,
)
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import NotACall, Reader, Steps, first_of
from baton_router.text.output_parsing.schemas import arguments_schema

_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", *_ARGUMENT_KEYS, "id", "type")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME: Final = re.compile(r"""[^\s"'<>(){}\[\]]+""")
_MAX_NAME_LENGTH: Final = 512


def read_call_object(reader: Reader, parts: PartCollector, *, is_marked: bool) -> Steps[None]:
    """Reads the object of one call, which comes next, and adds the call. Raises `NotACall`.

    Args:
        is_marked: a mark came before it; else it is a call only by its keys, and without arguments
            only by the name of a known tool.
    """
    name, held = "", ""
    yield from reader.literal("{")
    yield from reader.spaces()
    while not (yield from reader.begins_with(["}"])):
        key = yield from _read_string(reader)
        if not (is_marked or key in _KEYS):
            raise NotACall
        yield from reader.spaces()
        yield from reader.literal(":")
        yield from reader.spaces()
        if key == "name":
            name = yield from _read_string(reader)
        elif key not in _ARGUMENT_KEYS:
            yield from read_json(reader, lambda _: None)
        elif name:
            yield from _read_arguments(reader, parts, name)
            yield from _skip_object_end(reader)
            return
        else:
            held = yield from _read_text(reader)
        yield from reader.spaces()
        if not (yield from reader.begins_with([","])):
            break
        yield from reader.literal(",")
        yield from reader.spaces()
    yield from reader.literal("}")
    if not name or not (held or is_marked or name in parts.tools):
        raise NotACall
    parts.call(name, _arguments_of(held))
    reader.keep()


def read_arguments(
    reader: Reader, parts: PartCollector, name: str, ends: Sequence[str] = ()
) -> Steps[None]:
    """Reads the object of the arguments, which comes next, and adds a call of the tool `name`.
    Raises `NotACall` for what is no object.

    Args:
        ends: marks that end the call, also of a tool without arguments.
    """
    check_name(name, parts)
    if (yield from reader.one_of(["{", *ends])) == "{":
        yield from _read_arguments(reader, parts, name)
        return
    parts.call(name, "{}")
    reader.keep()


def read_name(
    reader: Reader, ends: Sequence[str], max_length: float = _MAX_NAME_LENGTH
) -> Steps[str]:
    """Reads a name up to one of `ends`. Raises `NotACall`."""
    while (found := first_of(reader.rest, ends)) is None:
        if len(reader.rest) > max_length:
            raise NotACall
        yield from reader.more()
    return reader.take(found[0]).strip()


def check_name(name: str, parts: PartCollector) -> None:
    """Raises `NotACall` for text that can be no tool's name."""
    if name not in parts.tools and not _NAME.fullmatch(name):
        raise NotACall


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


def _read_arguments(reader: Reader, parts: PartCollector, name: str) -> Steps[None]:
    """Reads the value of the arguments, which comes next, and adds a call of the tool `name`."""
    while not reader.rest:
        yield from reader.more()
    if reader.rest[0] in "{[":
        reader.release()
        parts.start_call(name)
        yield from read_json(reader, parts.arguments)
    else:
        parts.call(name, _arguments_of((yield from _read_text(reader))))
    reader.keep()


def _read_text(reader: Reader) -> Steps[str]:
    pieces: list[str] = []
    yield from read_json(reader, pieces.append)
    return "".join(pieces)


def _arguments_of(written: str) -> str:
    """Returns the arguments that a value says: none by null, and others in a string."""
    if written.startswith('"'):
        try:
            written = escaped_surrogates(json.loads(written))
        except ValueError:
            return written
    return "{}" if written.strip() in ("", "null") else written


def _skip_object_end(reader: Reader) -> Steps[None]:
    """Reads what follows the arguments in the object of a call, which may lack its bracket."""
    yield from reader.spaces()
    if (yield from reader.begins_with([",", "}"])):
        yield from read_json_end(reader, JsonScanner("{"), lambda _: None)
        reader.keep()


def _read_string(reader: Reader) -> Steps[str]:
    while (match := _STRING.match(reader.rest)) is None:
        if reader.rest[:1] not in ("", '"') or len(reader.rest) > _MAX_NAME_LENGTH:
            raise NotACall
        yield from reader.more()
    try:
        text: str = json.loads(reader.take(match.end()), strict=False)
        text.encode()
    except ValueError as error:
        raise NotACall from error
    return text


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
