"""JSON schemas of tools, as grammars can follow them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
_MAPS_OF_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS: Final = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_DEFINITIONS: Final = ("$defs", "definitions")


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
    """Returns a schema for the arguments of `tool`. Keywords that no grammar can follow are left
    out of one that need not be followed strictly; else the worker refuses them."""
    schema = dict(tool.parameters or {})
    if not tool.strict:
        schema = _followed(schema)
    return {**schema, "type": "object"}


def parameters(tool: Tool) -> list[Parameter] | None:
    """Returns the parameters of `tool` in their order; None if it takes any. Raises
    `InvalidArgumentError` if its schema says more of them than one by one."""
    root = arguments_schema(tool)
    combined = [key for key in ("anyOf", "oneOf", "allOf", "$ref") if key in root]
    if combined:
        raise InvalidArgumentError(
            "parsing.tools",
            f"the schema of {tool.name!r} has {combined[0]!r} at its top; expected `properties` "
            "alone, since the model's format writes parameters one by one",
        )
    if not root.get("properties"):
        return [] if root.get("additionalProperties") is False else None
    shared: dict[str, Any] = {key: root[key] for key in _DEFINITIONS if key in root}
    required = root.get("required", ())
    return [
        Parameter(name, shared | (schema if isinstance(schema, dict) else {}), name in required)
        for name, schema in root["properties"].items()
    ]


def _followed(schema: Any) -> Any:
    """Returns a schema without the keywords that no grammar can follow."""
    if isinstance(schema, list):
        return [_followed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    followed = {}
    for key, value in schema.items():
        if key in _UNSUPPORTED or (key == "format" and value not in _FORMATS):
            continue
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            followed[key] = {name: _followed(item) for name, item in value.items()}
        else:
            followed[key] = _followed(value) if key in _SCHEMAS else value
    return followed
