"""JSON schemas of tools, as grammars can follow them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from baton.errors import InvalidArgumentError
from baton_router.call.output_format import Tool

# Keywords that llguidance does not implement.
_UNSUPPORTED: Final = frozenset(
    {
        "$dynamicRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
# Keywords whose value may be null.
_MAY_BE_NULL: Final = frozenset({"const", "default"})
# Marks a schema for workers: the tool, the path in its schema, and whether it is strict
# (`baton.engine.executor.grammar.tool_schemas`). It is the first key.
MARK: Final = "x-baton"
_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS: Final = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_DEFINITIONS: Final = ("$defs", "definitions")
_MAX_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a tool.

    Attributes:
        schema: of its value, with the definitions that it may refer to.
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Returns a schema for the arguments of `tool`, with the mark for workers. Keywords that no
    grammar can follow are left out of one that need not be followed strictly, and so are others by
    the worker; of a strict one it refuses them."""
    schema = dict(tool.parameters or {})
    if not tool.strict:
        schema = _followed(schema)
    return {**_mark(tool), **schema, **_mark(tool), "type": "object"}


def parameters(tool: Tool) -> list[Parameter] | None:
    """Returns the parameters of `tool` in their order; None if it takes any. Raises
    `InvalidArgumentError` if its schema says more of them than one by one."""
    root = arguments_schema(tool)
    combined = [key for key in ("anyOf", "oneOf", "allOf", "$ref") if key in root]
    if combined and not tool.strict:
        return None
    if combined:
        raise InvalidArgumentError(
            "parsing.tools",
            f"the schema of {tool.name!r} has {combined[0]!r} at its top; expected `properties` "
            "alone, since the model's format writes parameters one by one",
        )
    properties, required = root.get("properties"), root.get("required") or ()
    if not isinstance(properties, dict) or not properties:
        return [] if root.get("additionalProperties") is False else None
    shared: dict[str, Any] = {key: root[key] for key in _DEFINITIONS if key in root}
    return [
        Parameter(
            name,
            {**_mark(tool, name), **shared, **(schema if isinstance(schema, dict) else {})},
            name in required,
        )
        for name, schema in properties.items()
    ]


def type_of(value: Any) -> str:
    """Returns the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


class ValueTypes:
    """JSON types of the values that schemas admit. A type "number" admits integers, too.

    Args:
        root: what the schemas' references refer to.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._of_reference: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Returns the types by the keywords that tell them; all types where none does."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return _TYPES
        types = _TYPES
        for key, value in schema.items():
            match key, value:
                case "type", str():
                    types &= _named([value])
                case "type", list():
                    types &= _named(value)
                case "enum", list():
                    types &= frozenset(map(type_of, value))
                case "const", _:
                    types &= {type_of(value)}
                case "anyOf" | "oneOf", list():
                    types &= frozenset().union(*(self.of(one, depth + 1) for one in value))
                case "allOf", list():
                    for one in value:
                        types &= self.of(one, depth + 1)
                case "$ref", str():
                    types &= self._referred(value, depth)
        return types

    def _referred(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._of_reference:
            # A schema that refers to itself admits nothing more by that.
            self._of_reference[reference] = frozenset()
            schema = _resolved(reference, self._root)
            self._of_reference[reference] = self.of(schema, depth + 1)
        return self._of_reference[reference]


def _named(names: Sequence[Any]) -> frozenset[str]:
    known = _TYPES & {name for name in names if isinstance(name, str)}
    return known | {"integer"} if "number" in known else known


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema that a reference within `root` refers to; any other one admits all."""
    begin, _, pointer = reference.partition("#")
    schema: Any = root
    for key in pointer.split("/")[1:]:
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema if not begin else None


def _mark(tool: Tool, parameter: str = "") -> dict[str, Any]:
    path = {"path": f"properties.{parameter}"} if parameter else {}
    return {MARK: {"tool": tool.name, "strict": tool.strict, **path}}


def _followed(schema: Any) -> Any:
    """Returns a schema without the keywords that no grammar can follow."""
    if isinstance(schema, list):
        return [_followed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    followed = {}
    for key, value in schema.items():
        is_null = value is None and key not in _MAY_BE_NULL
        if is_null or key in _UNSUPPORTED or (key == "type" and not _is_type(value)):
            continue
        if key == "oneOf":  # a grammar cannot tell that only one of them matches
            key = "anyOf" if "anyOf" not in schema else "oneOf"
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            followed[key] = {name: _followed(item) for name, item in value.items()}
        else:
            followed[key] = _followed(value) if key in _SCHEMAS else value
    return followed


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) and name in _TYPES for name in types)
