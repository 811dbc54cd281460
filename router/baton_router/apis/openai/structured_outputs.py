"""Grammars of `response_format`, and of `structured_outputs` and `guided_*` as vLLM takes them.

JSON is compact by default: a model that may write whitespace at each step often never ends.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind
from baton_router.apis.edge.body.bodies import convert
from baton_router.apis.openai.schemas import (
    GenerationRequest,
    JsonObject,
    ObjectFormat,
    SchemaFormat,
    StructuralTag,
    StructuredOutputs,
    TagsFormat,
)
from baton_router.text.output_parsing.lark import Lark

_ANY_OBJECT = {"type": "object"}
# Key of a schema for llguidance, under which clients may set how JSON is written.
_OPTIONS = "x-guidance"


def grammar_of(body: GenerationRequest) -> Grammar | None:
    """Returns the grammar that the output has to match, if there is one. Raises
    `InvalidArgumentError` if there are several, or if it is malformed."""
    given = _given(body)
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidArgumentError(second, f"is set beside {first}; give one of them")
    for field, value in given.items():
        return _grammar(field, value, _json_options(body))
    return None


def field_of_grammar(body: GenerationRequest) -> str:
    """Returns the path of the field that the grammar is from."""
    return next(iter(_given(body)), "structured_outputs")


def _given(body: GenerationRequest) -> dict[str, Any]:
    """Returns the constraints that are set, by their paths."""
    found: dict[str, Any] = {}
    if isinstance(body.response_format, SchemaFormat | ObjectFormat | TagsFormat):
        found["response_format"] = body.response_format
    outputs = body.structured_outputs
    for name in ("json", "regex", "choice", "grammar"):
        found[f"structured_outputs.{name}"] = getattr(outputs, name, None)
        found[f"guided_{name}"] = getattr(body, f"guided_{name}")
    if outputs is not None:
        found["structured_outputs.structural_tag"] = outputs.structural_tag
    if outputs is not None and outputs.json_object:
        found["structured_outputs.json_object"] = _ANY_OBJECT
    found = {name: value for name, value in found.items() if value is not None}
    if outputs is not None and not any(name.startswith("structured_") for name in found):
        raise InvalidArgumentError(
            "structured_outputs",
            "has no constraint; set one of json, regex, choice, grammar, json_object or "
            "structural_tag",
        )
    return found


def _json_options(body: GenerationRequest) -> JsonObject:
    """Returns how JSON is written, in llguidance's terms."""
    outputs = body.structured_outputs or StructuredOutputs()
    pattern = outputs.whitespace_pattern
    if pattern is None:
        pattern = body.guided_whitespace_pattern
    if pattern is not None:
        return {"whitespace_pattern": pattern}
    return {"whitespace_flexible": outputs.disable_any_whitespace is False}


def _grammar(field: str, value: Any, options: JsonObject) -> Grammar:
    if isinstance(value, TagsFormat):
        return Grammar(GrammarKind.EBNF, _tags(field, value))
    match field.rpartition(".")[2].removeprefix("guided_"):
        case "regex":
            return Grammar(GrammarKind.REGEX, value)
        case "grammar":
            return Grammar(GrammarKind.EBNF, value)
        case "choice":
            return Grammar(GrammarKind.REGEX, _alternatives(field, value))
        case "structural_tag":
            return Grammar(GrammarKind.EBNF, _tags(field, _read_tags(field, value)))
    schema = _schema(field, value)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({_OPTIONS: options, **schema}))


def _alternatives(field: str, choice: list[str]) -> str:
    """Returns a regular expression that matches these texts alone."""
    if not choice:
        raise InvalidArgumentError(field, "is empty; expected at least 1 text")
    if "" in choice:
        raise InvalidArgumentError(
            f"{field}[{choice.index('')}]", "is empty; expected at least 1 character"
        )
    return "|".join(map(re.escape, choice))


def _read_tags(field: str, text: str) -> TagsFormat:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            field, f"is not a response_format of the type structural_tag as JSON: {error}"
        ) from None
    tags: TagsFormat = convert(content, TagsFormat, field)
    return tags


def _tags(field: str, given: TagsFormat) -> str:
    """Returns a grammar of text in which each trigger begins one of the structures."""
    newer = given.format
    if newer is None:
        return _triggered(field, "structures", given.triggers, given.structures)
    if given.structures or given.triggers:
        raise InvalidArgumentError(
            f"{field}.format", "is set beside structures or triggers; give one form"
        )
    structures = [
        StructuralTag(begin=tag.begin, json_schema=tag.content.json_schema, end=tag.end)
        for tag in newer.tags
    ]
    return _triggered(f"{field}.format", "tags", newer.triggers, structures)


def _triggered(
    field: str, name: str, triggers: Sequence[str], structures: Sequence[StructuralTag]
) -> str:
    """Returns the grammar of structures, which are at `name` in `field`."""
    for what, texts in (("triggers", triggers), (name, structures)):
        if not texts:
            raise InvalidArgumentError(f"{field}.{what}", "is empty; expected at least 1")
    if "" in triggers:
        raise InvalidArgumentError(
            f"{field}.triggers[{triggers.index('')}]", "is empty; expected at least 1 character"
        )
    # Marks are text here: special tokens are not in the text of an answer.
    lark = Lark({})
    tags: dict[str, list[str]] = {}
    for at, tag in enumerate(structures):
        fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if not fitting:
            raise InvalidArgumentError(
                f"{field}.{name}[{at}].begin",
                f"is {tag.begin!r}; expected a text that begins with one of the triggers",
            )
        trigger = min(fitting, key=len)
        begin = lark.literal(tag.begin.removeprefix(trigger))
        body = f"{begin} {lark.schema(tag.json_schema)} {lark.literal(tag.end)}"
        tags.setdefault(trigger, []).append(lark.rule(f"tag_{at}", body))
    forms = [f"{lark.until(trigger)} ({' | '.join(names)})" for trigger, names in tags.items()]
    start = f"({' | '.join(forms)})* {lark.text(triggers)}"
    return lark.grammar(start, f"{field}.{name}", name)


def _schema(field: str, given: SchemaFormat | ObjectFormat | JsonObject | str) -> JsonObject:
    if isinstance(given, SchemaFormat):
        return given.json_schema.json_schema
    if isinstance(given, ObjectFormat):
        return _ANY_OBJECT
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidArgumentError(field, "is not a JSON object; expected a JSON schema")
    return schema
