"""Null in bodies of requests: in every object that a schema has, it equals an absent field.

The cases are made of the schemas themselves: each object that one can hold, with the fields that it
has to have, and in turn null in each of its other fields.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import Struct, inspect

from baton.errors import InvalidArgumentError
from baton_router.apis.anthropic.schemas import Conversation, MessagesRequest
from baton_router.apis.edge.body.bodies import convert, request_of
from baton_router.apis.edge.body.unknown_fields import Unknown
from baton_router.apis.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from baton_router.apis.responses.schemas import Item, ResponsesRequest
from tests.support.router.front import front_of
from tests.support.router.written import writing

Wrap = Callable[[Any], Any]

SCHEMAS = (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    EmbeddingRequest,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)
ITEMS = list[Item]
"""Schema of the items of `ResponsesRequest`, which says no more than that they are a list."""

UNKNOWN = "mood"


def value_of(kind: inspect.Type) -> Any:
    """A value of this type, with nothing in it that may be absent."""
    match kind:
        case inspect.Metadata():
            return value_of(kind.type)
        case inspect.UnionType():
            return value_of(kind.types[0])
        case inspect.StructType():
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            return {**tag, **{f.encode_name: value_of(f.type) for f in kind.fields if f.required}}
        case inspect.ListType():
            return [value_of(kind.item_type)]
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType():
            return 1
        case inspect.DictType():
            return {}
    return "a"


def objects_in(
    kind: inspect.Type, wrap: Wrap, path: str
) -> Iterator[tuple[str, inspect.StructType, Wrap]]:
    """Yields each object that values of this type can hold: its path, its type, and the function
    that makes a body with a value in its place."""
    match kind:
        case inspect.Metadata():
            yield from objects_in(kind.type, wrap, path)
        case inspect.UnionType():
            for one in kind.types:
                yield from objects_in(one, wrap, path)
        case inspect.ListType():
            yield from objects_in(kind.item_type, lambda value: wrap([value]), f"{path}[]")
        case inspect.StructType():
            path += f"<{kind.tag}>" if kind.tag else ""
            yield path, kind, wrap
            for field in kind.fields:
                yield from objects_in(
                    field.type,
                    lambda value, name=field.encode_name: wrap({**value_of(kind), name: value}),
                    f"{path}.{field.encode_name}",
                )


def outcome_of(body: Any, schema: Any) -> Any:
    """The parsed body and its unknown fields, or the error."""
    unknown: list[Unknown] = []
    try:
        if schema in SCHEMAS:
            return request_of(body, schema, unknown), unknown
        return convert(copy.deepcopy(body), schema)
    except InvalidArgumentError as error:
        return str(error)


@pytest.mark.symptom(
    "llama.cpp#25515, text-generation-inference#3155, vllm#19862",
    there="fields that are null are refused",
    here="Takes null as absent, at every depth.",
)
@pytest.mark.parametrize("schema", [*SCHEMAS, ITEMS], ids=lambda kind: kind.__name__)
def test_null_equals_absent_in_every_object_of_a_body(schema):
    for path, kind, wrap in objects_in(inspect.type_info(schema), lambda value: value, "body"):
        bare = value_of(kind)
        assert not isinstance(outcome_of(wrap(bare), schema), str), path
        for name in (*(f.encode_name for f in kind.fields), UNKNOWN):
            rest = {key: value for key, value in bare.items() if key != name}
            null = outcome_of(wrap({**rest, name: None}), schema)
            assert null == outcome_of(wrap(rest), schema), f"{path}.{name}"


async def test_null_is_tried_in_every_schema_of_the_front(model):
    async with front_of(*writing("a", model=model), model=model) as front:
        document = (await front.get("/openapi.json")).json()
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for operations in document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    }
    assert {ref.rpartition("/")[2] for ref in bodies} == {schema.__name__ for schema in SCHEMAS}


# Within them null is a value.
SCHEMA = {"type": "object", "default": None}
OF_CHAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
VALUES: dict[str, tuple[type[Struct], Any, Callable[[Any], Any], Any]] = {
    "parameters of a chat's tool": (
        ChatRequest,
        {
            "messages": [],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
        lambda body: body.tools[0].function.parameters,
        SCHEMA,
    ),
    "schema of a chat's answer": (
        ChatRequest,
        {"messages": [], "response_format": OF_CHAT},
        lambda body: body.response_format.json_schema.json_schema,
        SCHEMA,
    ),
    "variables of the template": (
        ChatRequest,
        {"messages": [], "chat_template_kwargs": SCHEMA},
        lambda body: body.chat_template_kwargs,
        SCHEMA,
    ),
    "parameters of a response's tool": (
        ResponsesRequest,
        {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        lambda body: body.tools[0].parameters,
        SCHEMA,
    ),
    "schema of a message's tool": (
        MessagesRequest,
        {"messages": [], "max_tokens": 1, "tools": [{"name": "f", "input_schema": SCHEMA}]},
        lambda body: body.tools[0].input_schema,
        SCHEMA,
    ),
    "arguments of a message's call": (
        MessagesRequest,
        {
            "max_tokens": 1,
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": None}}],
                }
            ],
        },
        lambda body: body.messages[0].content[0].input,
        {"a": None},
    ),
}


@pytest.mark.parametrize(("schema", "body", "of", "value"), VALUES.values(), ids=VALUES)
def test_null_is_a_value_in_schemas_and_arguments(schema, body, of, value):
    assert of(request_of(body, schema, [])) == value


# Objects of other servers, which no schema has.
OTHERS: list[Any] = [
    {"reasoning": {"effort": "low"}},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"exclude": True}},
    {"reasoning": {"max_tokens": 9}},
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "disabled", "budget_tokens": 9}},
    {"grammar": {"type": "json", "value": {}}},
]
OF_OTHERS = ("effort", "enabled", "exclude", "max_tokens", "summary", "budget_tokens", UNKNOWN)


@pytest.mark.parametrize("given", OTHERS, ids=str)
def test_null_equals_absent_in_objects_of_other_servers(given):
    ((field, value),) = given.items()
    bare = request_of({"messages": [], **given}, ChatRequest, [])
    for name in OF_OTHERS:
        null = {field: {name: None, **value}}
        assert request_of({"messages": [], **null}, ChatRequest, []) == bare
