"""Tool calls written as a Python list of function calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from baton.errors import InvalidArgumentError
from baton_router.call.output_format import Tool
from baton_router.text.output_parsing.json_scanner import quoted, to_json
from baton_router.text.output_parsing.lark import Lark
from baton_router.text.output_parsing.parser import PartCollector
from baton_router.text.output_parsing.reader import CutOff, NotACall, Reader, Steps
from baton_router.text.output_parsing.schemas import Parameter, parameters

_NAME: Final = re.compile(r"[^\W\d][\w.\-]*")
_WORD: Final = re.compile(r"[\w.+\-]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN: Final = re.compile(r"""[^"'\\]*""")
_CONSTANTS: Final = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_ESCAPES: Final = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "0": "\0",
    "/": "/",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_ESCAPE_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Calls of Llama 3.2 and 4: a list of function calls at the beginning, or between marks."""

    marks: tuple[str, ...] = ("<|python_start|>",)
    first_marks: tuple[str, ...] = ("[",)
    tokens: tuple[str, ...] = ("<|python_start|>", "<|python_end|>")

    def read(self, reader: Reader, parts: PartCollector) -> Steps[None]:
        """Reads all calls. Raises `NotACall`."""
        beginning, end = self.tokens
        is_marked = bool((yield from reader.begins_with([beginning])))
        if is_marked:
            yield from reader.literal(beginning)
            yield from reader.spaces()
        yield from reader.literal("[")
        separator = ","
        while separator == ",":
            yield from reader.spaces()
            if not (yield from _read_call(reader, parts, is_marked=is_marked)):
                yield from reader.skip_to([end])
                break
            yield from reader.spaces()
            separator = yield from reader.one_of([",", "]"])
            yield from reader.literal(separator)
        reader.keep()
        yield from reader.spaces()
        if (yield from reader.begins_with([end])):
            yield from reader.literal(end)

    def alone(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches calls of `tools`, at least one."""
        beginning, end = map(lark.literal, self.tokens)
        calls = self._calls(lark, tools, is_one=is_one)
        return f"{calls} | {beginning} {calls} {end}" if lark.is_token(self.tokens[0]) else calls

    def among_text(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Returns an expression that matches any text in which all calls are valid."""
        calls = self._calls(lark, tools, is_one=is_one)
        beginning, end = self.tokens
        return (
            f"{calls} | {lark.text(self.marks, self.first_marks)} | "
            f"{lark.until(beginning, self.first_marks)} {calls} {lark.literal(end)}"
        )

    def _calls(self, lark: Lark, tools: Sequence[Tool], *, is_one: bool) -> str:
        calls = [
            f'{lark.literal(tool.name + "(")} {_arguments(lark, tool, index)} ")"'
            for index, tool in enumerate(tools)
        ]
        call = lark.rule("call", " | ".join(calls))
        more = "" if is_one else f'(", " {call})*'
        return lark.rule("calls", f'"[" {call} {more} "]"')


def _read_call(reader: Reader, parts: PartCollector, *, is_marked: bool) -> Steps[bool]:
    """Reads one call, and adds it. Returns False if its arguments are malformed. Raises `NotACall`.

    Args:
        is_marked: a mark came before it; else a call without arguments is of a known tool.
    """
    name = yield from _read_name(reader, "(")
    yield from reader.spaces()
    if (yield from reader.begins_with([")"])):
        if not (is_marked or name in parts.tools):
            raise NotACall
        yield from reader.literal(")")
        parts.call(name, "{}")
    else:
        key = yield from _read_name(reader, "=")
        reader.release()
        parts.start_call(name)
        try:
            yield from _read_arguments(reader, parts.arguments, key)
        except CutOff:
            raise
        except NotACall:
            return False
    reader.keep()
    return True


def _read_name(reader: Reader, end: str) -> Steps[str]:
    """Reads a name and `end` after it."""
    while (match := _NAME.match(reader.rest)) is None or match.end() == len(reader.rest):
        if match is None and reader.rest:
            raise NotACall
        yield from reader.more()
    name = reader.take(match.end())
    yield from reader.spaces()
    yield from reader.literal(end)
    return name


def _read_arguments(reader: Reader, show: Callable[[str], None], name: str) -> Steps[None]:
    """Reads named arguments from the value of the first one on, and the parenthesis after them;
    shows them as a JSON object.

    Args:
        name: of the first one.
    """
    before = "{"
    while True:
        show(f"{before}{to_json(name)}: ")
        before = ", "
        yield from _read_value(reader, show, 0)
        yield from reader.spaces()
        if not (yield from reader.begins_with([","])):
            break
        yield from reader.literal(",")
        yield from reader.spaces()
        if (yield from reader.begins_with([")"])):
            break
        name = yield from _read_name(reader, "=")
    yield from reader.literal(")")
    show("}")


def _read_value(reader: Reader, show: Callable[[str], None], depth: int) -> Steps[None]:
    yield from reader.spaces()
    opening = yield from reader.begins_with(["[", "(", "{", '"', "'"])
    if depth > _MAX_DEPTH:
        raise NotACall
    if not opening:
        yield from _read_word(reader, show)
    elif opening in "\"'":
        yield from _read_string(reader, show)
    else:
        yield from _read_items(reader, show, depth, opening)


def _read_items(
    reader: Reader, show: Callable[[str], None], depth: int, opening: str
) -> Steps[None]:
    closing = {"[": "]", "(": ")", "{": "}"}[opening]
    yield from reader.literal(opening)
    show("{" if opening == "{" else "[")
    before = ""
    while True:
        yield from reader.spaces()
        if (yield from reader.begins_with([closing])):
            break
        show(before)
        before = ", "
        if opening == "{":
            yield from _read_string(reader, show)
            yield from reader.spaces()
            yield from reader.literal(":")
            show(": ")
        yield from _read_value(reader, show, depth + 1)
        yield from reader.spaces()
        if not (yield from reader.begins_with([","])):
            break
        yield from reader.literal(",")
    yield from reader.literal(closing)
    show("}" if opening == "{" else "]")


def _read_word(reader: Reader, show: Callable[[str], None]) -> Steps[None]:
    """Reads a number or a constant."""
    pieces = []
    while True:
        match = _WORD.match(reader.rest)
        assert match is not None
        pieces.append(reader.take(match.end()))
        if reader.rest:
            break
        yield from reader.more()
    word = "".join(pieces)
    if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
        raise NotACall
    show(_CONSTANTS.get(word, word))


def _read_string(reader: Reader, show: Callable[[str], None]) -> Steps[None]:
    quote = yield from reader.begins_with(['"', "'"])
    yield from reader.literal(quote or '"')
    show('"')
    while True:
        match = _PLAIN.match(reader.rest)
        assert match is not None
        if match.end():
            show(quoted(reader.take(match.end())))
        elif not reader.rest:
            yield from reader.more()
        elif reader.rest[0] == "\\":
            show((yield from _read_escape(reader)))
        elif reader.take(1) == quote:
            show('"')
            return
        else:
            show("'" if quote == '"' else '\\"')


def _read_escape(reader: Reader) -> Steps[str]:
    """Reads an escape sequence, and returns it as one of JSON."""
    while len(reader.rest) < 2:
        yield from reader.more()
    kind = reader.rest[1]
    length = 2 + _ESCAPE_DIGITS.get(kind, 0)
    while len(reader.rest) < length:
        yield from reader.more()
    escape = reader.take(length)
    if kind not in _ESCAPE_DIGITS:
        return quoted(_ESCAPES.get(kind, escape))
    try:
        code = int(escape[2:], 16)
        return f"\\u{code:04x}" if kind == "u" else quoted(chr(code))
    except (ValueError, OverflowError) as error:
        raise NotACall from error


def _arguments(lark: Lark, tool: Tool, index: int) -> str:
    """Returns an expression that matches the arguments of a call of `tool`."""
    known = parameters(tool)
    if known is None:
        # ASCII alone: `\w` of a grammar has letters that Python's has not.
        argument = rf"/[a-zA-Z_][a-zA-Z0-9_]*=/ {lark.rule('value', lark.schema({}))}"
        return f'({argument} (", " {argument})*)?'
    # Two expressions for the arguments from a parameter on: where none comes before, and where one
    # does.
    first, later = "", ""
    for number, parameter in reversed(list(enumerate(known))):
        value = lark.rule(f"value_{index}_{number}", _value(lark, tool, parameter))
        bodies = f"{value} {later}", f'", " {value} {later}'
        if not parameter.is_required:
            rest = first, later
            bodies = (
                f"{bodies[0]} | {rest[0]}" if rest[0] else f"({bodies[0]})?",
                f"{bodies[1]} | {rest[1]}" if rest[1] else f"({bodies[1]})?",
            )
        first = lark.rule(f"first_{index}_{number}", bodies[0])
        later = lark.rule(f"later_{index}_{number}", bodies[1])
    return first


def _value(lark: Lark, tool: Tool, parameter: Parameter) -> str:
    """Returns an expression that matches a named argument."""
    if not _NAME.fullmatch(parameter.name):
        raise InvalidArgumentError(
            "parsing.tools",
            f"{tool.name!r} has a parameter {parameter.name!r}; expected names of letters, digits, "
            "dots, hyphens and underscores, since the model's format writes them as in Python",
        )
    is_bool = parameter.schema.get("type") == "boolean" and not parameter.schema.keys() & {
        "const",
        "enum",
    }
    value = '("True" | "False")' if is_bool else lark.schema(parameter.schema)
    return f"{lark.literal(parameter.name + '=')} {value}"
