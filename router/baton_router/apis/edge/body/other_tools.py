"""Tools of types that the router does not serve, such as `web_search`: left out of a request, and
named like its unknown fields.

Agents send tools that run at another provider beside functions of their own, which alone are
described to the model. A schema lists in `tool_types` the types that it takes.
"""

from collections.abc import Collection, Mapping
from typing import Any

from baton_router.apis.edge.body.unknown_fields import Unknown

_FUNCTIONS = frozenset({"function"})

# Fields of functions that concern other tools, with the values that say no more than absence.
_NEUTRAL: Mapping[str, Collection[Any]] = {
    "allowed_callers": ([], ["direct"]),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}


def served_tools(
    tools: list[Any], types: frozenset[str], found: list[Unknown], path: str = "tools"
) -> list[Any]:
    """Returns the tools with None in the places of those of other types than `types`, which it adds
    to `found`; so the index of each stays that of the request. Nulls and neutral fields of
    functions are left out."""
    return [_served(tool, types, found, f"{path}[{at}]") for at, tool in enumerate(tools)]


def _served(tool: Any, types: frozenset[str], found: list[Unknown], path: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    kind = tool.get("type")
    # A function in the form of another API is an error, which the schema names.
    if isinstance(kind, str) and kind not in types | _FUNCTIONS:
        found.append(_unknown(f"{path}.{kind}", kind, tool, types))
        return None
    kept = _without_neutral(tool, found, path)
    if isinstance(kept.get("function"), dict):
        kept["function"] = _without_neutral(kept["function"], found, f"{path}.function")
    if isinstance(kept.get("tools"), list):
        kept["tools"] = served_tools(kept["tools"], _FUNCTIONS, found, f"{path}.tools")
    return kept


def _without_neutral(function: dict[str, Any], found: list[Unknown], path: str) -> dict[str, Any]:
    kept = {}
    for name, value in function.items():
        if name == "defer_loading" and value is True:
            # The model is told of every function at once, which is more than was asked for.
            found.append(_unknown(f"{path}.{name}", name, value, frozenset()))
        elif value is not None and value not in _NEUTRAL.get(name, ()):
            kept[name] = value
    return kept


def _unknown(path: str, name: str, value: Any, known: frozenset[str]) -> Unknown:
    return Unknown(path, path, name, value, known)
