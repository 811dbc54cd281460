"""Conversions of values of other servers' fields to fields of the router's own API. Each raises
`InvalidArgumentError` for what it does not know."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from baton.errors import InvalidArgumentError

JsonObject = dict[str, Any]

VARIABLES: Final = "chat_template_kwargs"


def grammar(value: Any) -> JsonObject:
    """Returns the grammar of TGI or llama.cpp in the names of vLLM."""
    match value:
        case str():
            return {"guided_grammar": value}
        case {"type": "json" | "json_object", "value": schema}:
            return {"guided_json": schema}
        case {"type": "regex", "value": pattern}:
            return {"guided_regex": pattern}
    raise InvalidArgumentError(
        "grammar", "is neither a text nor an object with `type` json or regex and `value`"
    )


def _variables(is_on: bool) -> JsonObject:
    """Returns the variables that turn thinking on or off in the templates that can."""
    return {VARIABLES: {"enable_thinking": is_on, "thinking": is_on}}


def switch(name: str) -> Callable[[Any], JsonObject]:
    """Returns the conversion of a field that turns thinking on or off."""

    def converted(value: Any) -> JsonObject:
        if not isinstance(value, bool):
            raise InvalidArgumentError(name, "must be true or false")
        return _variables(value)

    return converted


def reasoning_format(value: Any) -> JsonObject:
    """Returns where reasoning comes, by llama.cpp's names that change the default."""
    if value != "none":
        raise InvalidArgumentError("reasoning_format", "must be auto, deepseek or none")
    return {"separate_reasoning": False}


def thinking(value: Any) -> JsonObject:
    """Returns a switch, or options as of Messages."""
    if isinstance(value, bool):
        return _variables(value)
    options = _object("thinking", value, ("type", "budget_tokens"))
    fields: JsonObject = {}
    if "budget_tokens" in options:
        fields["thinking_token_budget"] = options["budget_tokens"]
    match options.get("type"):
        case "enabled" | "disabled" as kind:
            return {**fields, **_variables(kind == "enabled")}
        case "auto" | "adaptive":
            return fields
    raise InvalidArgumentError("thinking.type", "must be enabled, disabled, auto or adaptive")


def reasoning(value: Any) -> JsonObject:
    """Returns options as of OpenRouter."""
    options = _object("reasoning", value, ("effort", "enabled", "exclude", "max_tokens", "summary"))
    fields: JsonObject = {}
    if "enabled" in options:
        fields |= switch("reasoning.enabled")(options["enabled"])
    for given, name in (("effort", "reasoning_effort"), ("max_tokens", "thinking_token_budget")):
        if given in options:
            fields[name] = options[given]
    if options.get("exclude"):
        fields["include_reasoning"] = False
    return fields


def _object(name: str, value: Any, known: Sequence[str]) -> JsonObject:
    """Returns the fields of an object that are not null. Raises `InvalidArgumentError`."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(name, "must be an object")
    fields = {key: inner for key, inner in value.items() if inner is not None}
    for key in fields:
        if key not in known:
            raise InvalidArgumentError(f"{name}.{key}", "is not supported here; leave it out")
    return fields
