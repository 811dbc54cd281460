"""JSON schemas of tools within a grammar, each compiled alone: what no grammar can follow is taken
out of those that need not be followed strictly, and named in others.

The router marks such a schema by its first key, `x-baton`, an object: `tool`, the name of the tool;
`path`, where the schema is in that of the tool's arguments, or empty; `strict`.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from llguidance import LLMatcher

MARK: Final = "x-baton"

_MARKED: Final = re.compile(rf'%json (?=\{{"{MARK}": )')
_OPTIONS: Final = "x-guidance"
_MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
_LISTS: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE: Final = ("items", "additionalProperties")
_DEFINITIONS: Final = ("$defs", "definitions")
# Faults that are looked for in one schema, and schemas that are compiled for those of a grammar,
# which takes less than a trial may.
_MAX_FAULTS: Final = 16
_MAX_COMPILED: Final = 400

Path = tuple[str | int, ...]


class ToolSchemaError(ValueError):
    """Schema of a tool that no grammar can follow.

    Attributes:
        field: path of the fault, as `sampling.grammar[weather].properties.city.pattern`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def without_faults(lark: str) -> str:
    """Returns the grammar with schemas that can be followed. Raises `ToolSchemaError` for one that
    cannot, and is strict."""
    decoder, left = json.JSONDecoder(), itertools.count(_MAX_COMPILED, -1)
    pieces, end = [], 0
    for match in _MARKED.finditer(lark):
        schema, stop = decoder.raw_decode(lark, match.end())
        kept = json.dumps(_Schema(schema, left).followed(), ensure_ascii=False)
        pieces += [lark[end : match.end()], kept]
        end = stop
    return "".join([*pieces, lark[end:]])


def without_unknown_formats(schema: Any) -> Any:
    """Returns the schema without values of `format` that are unknown, which assert nothing."""
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "format" or _is_known(value)}
    for path, child in _children(kept):
        _put(kept, path, without_unknown_formats(child))
    return kept


def _is_known(name: Any) -> bool:
    """Returns whether a format is one that is followed, or none at all, which is refused."""
    return not isinstance(name, str) or _is_format(name)


@functools.lru_cache(maxsize=256)
def _is_format(name: str) -> bool:
    return not LLMatcher.validate_grammar(_grammar({"type": "string", "format": name}))


class _Schema:
    """Schema of a tool's arguments, or of one of them.

    Args:
        left: how many parts of schemas may still be compiled.
    """

    def __init__(self, schema: dict[str, Any], left: Iterator[int]) -> None:
        self._mark = schema.pop(MARK)
        self._schema: dict[str, Any] = without_unknown_formats(schema)
        self._options = schema.get(_OPTIONS, {})
        self._left = left
        self._seen: set[str] = set()

    def followed(self) -> dict[str, Any]:
        """Returns the schema, or what of it can be followed. Raises `ToolSchemaError`."""
        for _ in range(_MAX_FAULTS):
            problem = self._problem(self._schema)
            if problem is None:
                return self._schema
            self._seen.clear()
            path, is_keyword = self._fault(self._schema, ())
            if self._mark["strict"]:
                raise self._error(path, problem)
            if not path:
                break
            _put(self._schema, path, None if is_keyword else {})
        any_object = {} if self._mark.get("path") else {"type": "object"}
        return {**any_object, _OPTIONS: self._options}

    def _error(self, path: Path, problem: str) -> ToolSchemaError:
        is_shared = path[:1] in [(key,) for key in _DEFINITIONS]
        steps = ["" if is_shared else self._mark.get("path", ""), *path]
        where = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps if s != "")
        tool = self._mark["tool"]
        return ToolSchemaError(
            f"sampling.grammar[{tool}]{where}",
            f"cannot be followed by a grammar in the strict tool {tool!r}: {problem}. Change it, "
            "or send the tool without strict",
        )

    def _fault(self, schema: Any, place: Path) -> tuple[Path, bool]:
        """Returns the place of the innermost part that does not compile of the schema at `place`,
        and whether it is a keyword and not a schema."""
        if not isinstance(schema, dict):
            return place, False
        for path, child in _children(schema):
            # A definition may be one that nothing refers to.
            if path[0] not in _DEFINITIONS and not self._compiles(child):
                return self._fault(child, (*place, *path))
        reference = str(schema.get("$ref"))
        if reference not in self._seen:
            self._seen.add(reference)
            for path, child in _children(self._schema):
                is_target = f"#/{'/'.join(map(str, path))}" == reference
                if is_target and not self._compiles(child):
                    return self._fault(child, path)
        for key in schema:
            if key == _OPTIONS:
                continue
            others = {name: value for name, value in schema.items() if name != key}
            if self._compiles(others):
                return (*place, key), True
        return place, False

    def _compiles(self, part: Any) -> bool:
        """Returns whether a part of the schema compiles; False, too, if none may be compiled any
        more."""
        return next(self._left) > 0 and self._problem(part) is None

    def _problem(self, schema: Any) -> str | None:
        """Returns why the schema, or a part of it, does not compile; None if it does."""
        if isinstance(schema, dict):
            shared = {k: self._schema[k] for k in _DEFINITIONS if k in self._schema}
            schema = {**shared, **schema, _OPTIONS: self._options}
        error = LLMatcher.validate_grammar(_grammar(schema))
        if not error:
            return None
        lines = error.splitlines()
        found = next((line for line in lines if line.startswith("error: ")), lines[0])
        return found.removeprefix("error: ").rpartition("JSON schema: ")[2]


def _grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the schemas directly within a schema, with their places in it."""
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from [((key, name), child) for name, child in schema[key].items()]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from [((key, at), child) for at, child in enumerate(schema[key])]
    yield from [((key,), schema[key]) for key in _SINGLE if key in schema]


def _put(schema: dict[str, Any], path: Path, value: Any) -> None:
    """Replaces the part at `path` by `value`, in copies of what holds it; None: removes it."""
    key, *rest = path
    holder: Any = schema
    if rest:
        inner = holder[key].copy()
        _put(inner, tuple(rest), value)
        holder[key] = inner
    elif value is None:
        del holder[key]
    else:
        holder[key] = value
