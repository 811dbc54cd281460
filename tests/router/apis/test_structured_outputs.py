"""Structured outputs over HTTP: forms of other servers, as grammars of the engine."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.executor.grammar.compiler import GrammarCompiler
from baton.engine.executor.grammar.judge import GrammarLimits
from baton.errors import InvalidArgumentError
from baton.models import locate
from baton.sampling import NO_DEFAULTS, Grammar, GrammarKind
from baton_router.apis.openai.field_names import COMPLETIONS
from baton_router.apis.openai.sampling import completion_sampling
from baton_router.apis.openai.schemas import CompletionRequest
from baton_router.apis.openai.structured_outputs import grammar_of
from tests.support.router.bodies import parsed_body
from tests.support.router.scripted import card

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPACT = {"whitespace_flexible": False}


def grammar(**fields: Any) -> Grammar | None:
    return grammar_of(
        parsed_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)
    )


def json_grammar(schema: dict[str, Any], options: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"x-guidance": options, **schema}))


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_json_schema_is_compact_by_default(schema):
    expected = json_grammar(SCHEMA, COMPACT)
    named = {"name": "x", "schema": SCHEMA}
    assert grammar(structured_outputs={"json": schema}) == expected
    assert grammar(guided_json=schema) == expected
    assert grammar(response_format={"type": "json_schema", "json_schema": named}) == expected


def test_json_object_is_compact_by_default():
    expected = json_grammar({"type": "object"}, COMPACT)
    assert grammar(structured_outputs={"json_object": True}) == expected
    assert grammar(response_format={"type": "json_object"}) == expected


def test_schema_keeps_its_own_whitespace_options():
    schema = {**SCHEMA, "x-guidance": {"key_separator": ": "}}
    found = grammar(guided_json=schema)
    assert found is not None
    assert json.loads(found.text) == schema


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"disable_any_whitespace": True}, COMPACT),
        ({"disable_any_whitespace": False}, {"whitespace_flexible": True}),
        ({"whitespace_pattern": "[ ]?"}, {"whitespace_pattern": "[ ]?"}),
    ],
)
def test_structured_outputs_set_whitespace(fields, options):
    outputs = {"json": SCHEMA, **fields}
    assert grammar(structured_outputs=outputs) == json_grammar(SCHEMA, options)


def test_guided_whitespace_pattern_is_that_of_json():
    found = grammar(guided_json=SCHEMA, guided_whitespace_pattern=" ")
    assert found == json_grammar(SCHEMA, {"whitespace_pattern": " "})


def test_regex_and_ebnf_are_passed_on():
    ebnf = 'root ::= "a"'
    for form in ({"structured_outputs": {"regex": "a+"}}, {"guided_regex": "a+"}):
        assert grammar(**form) == Grammar(GrammarKind.REGEX, "a+")
    for form in ({"structured_outputs": {"grammar": ebnf}}, {"guided_grammar": ebnf}):
        assert grammar(**form) == Grammar(GrammarKind.EBNF, ebnf)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.text())
def test_choice_matches_its_texts_alone(choice, other):
    found = grammar(structured_outputs={"choice": choice})
    assert found == grammar(guided_choice=choice)
    assert found is not None
    assert found.kind is GrammarKind.REGEX
    for text in [*choice, other]:
        assert bool(re.fullmatch(found.text, text)) == (text in choice)


def test_no_constraint_is_no_grammar():
    assert grammar() is None
    assert grammar(response_format={"type": "text"}, structured_outputs=None) is None


def tag(begin: str, name: str, end: str) -> dict[str, Any]:
    properties = {name: {"type": "integer"}}
    schema = {"properties": properties, "required": [name], "additionalProperties": False}
    return {"begin": begin, "schema": {"type": "object", **schema}, "end": end}


TAGS = [tag("<f=add>", "a", "</f>"), tag("<f=sub>", "b", "</f>"), tag("[x]", "c", "")]


def tags(**fields: Any) -> dict[str, Any]:
    """A format of text with JSON between tags."""
    given = {"type": "structural_tag", "structures": TAGS, "triggers": ["<f=", "["], **fields}
    return {"response_format": given}


def newer_tags(**fields: Any) -> dict[str, Any]:
    """The same in the form that vLLM has now."""
    made = [
        {
            **({"type": "tag"} if at else {}),
            "begin": tag["begin"],
            "content": {"type": "json_schema", "json_schema": tag["schema"]},
            "end": tag["end"],
        }
        for at, tag in enumerate(TAGS)
    ]
    format_ = {"type": "triggered_tags", "triggers": ["<f=", "["], "tags": made, **fields}
    return {"response_format": {"type": "structural_tag", "format": format_, "triggers": None}}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """Compiles as the workers of the shipped model do."""
    tiny = card()
    limits = GrammarLimits(time_s=60.0)  # a busy machine takes longer
    made = GrammarCompiler(locate("tiny"), tiny.vocab_size, frozenset({0}), limits=limits)
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("No tags, f=1 <f x.", True),
        ('Sum: <f=add>{"a":1}</f> and <f=sub>{"b": 2}</f>.', True),
        ('[x]{"c":1}<f=add>{"a":1}</f>', True),
        ("<f=", False),
        ("an [index]", False),
        ('<f=mul>{"a":1}</f>', False),
        ('<f=add>{"b":1}</f>', False),
        ('<f=add>{"a":1}', False),
        ('[ <f=add>{"a":1}</f>', False),
        ('<f=add>{"a":1}</f> <f=add>1</f>', False),
    ],
)
def test_structural_tags_bind_text_between_them_alone(compiler, text, is_allowed):
    found = grammar(**tags())
    for form in (tags()["response_format"], newer_tags()["response_format"]):
        as_text = json.dumps(form)
        assert found == grammar(response_format=form)
        assert found == grammar(structured_outputs={"structural_tag": as_text})
        assert found == grammar(structural_tag=as_text)
        assert found == grammar(guided_structural_tag=as_text)
    assert found is not None
    state = compiler.compile(found).start()
    ids = card().tokenizer.encode(text, add_special_tokens=False).ids
    assert all(map(state.accept, [*ids, 0])) == is_allowed


def test_structural_tag_belongs_to_its_shortest_trigger(compiler):
    found = grammar(**tags(triggers=["<f=s", "<", "[x]"]))
    assert found is not None
    for text, is_allowed in (
        ('<f=sub>{"b":1}</f> [ [x]{"c":1}', True),
        ("a < b", False),
    ):
        state = compiler.compile(found).start()
        ids = card().tokenizer.encode(text, add_special_tokens=False).ids
        assert all(map(state.accept, [*ids, 0])) == is_allowed


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two forms": (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
    ),
    "two constraints": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "choice"),
    "no constraint": ({"structured_outputs": {}}, "structured_outputs"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    "no JSON": ({"guided_json": "{"}, "guided_json"),
    "no schema": ({"guided_json": "3"}, "guided_json"),
    "tags that are no JSON": (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
    ),
    "tags without triggers": (tags(triggers=[]), "response_format.triggers"),
    "no tags": (tags(structures=[]), "response_format.structures"),
    "an empty trigger": (tags(triggers=["<f=", ""]), "response_format.triggers[1]"),
    "a tag without a trigger": (tags(triggers=["["]), "response_format.structures[0].begin"),
    "newer tags without triggers": (newer_tags(triggers=[]), "response_format.format.triggers"),
    "no newer tags": (newer_tags(tags=[]), "response_format.format.tags"),
    "newer tags of another kind": (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        "response_format.format.type",
    ),
    "newer tags of other content": (
        newer_tags(tags=[{"begin": "[", "content": {"type": "any_text"}, "end": "]"}]),
        "response_format.format.tags[0].content.type",
    ),
    "one newer tag at least": (
        newer_tags(at_least_one=True),
        "response_format.format.at_least_one",
    ),
    "one newer tag alone": (
        newer_tags(stop_after_first=True),
        "response_format.format.stop_after_first",
    ),
    "a newer tag without a trigger": (
        newer_tags(triggers=["["]),
        "response_format.format.tags[0].begin",
    ),
    "two forms of tags": (
        {"response_format": {**newer_tags()["response_format"], "triggers": ["["]}},
        "response_format.format",
    ),
    "many tags": (tags(structures=[*TAGS] * 200), "response_format.structures"),
    "newer tags as text": (
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "regex"}}'},
        "structured_outputs.structural_tag.format.type",
    ),
    "tags at two places": (
        {"structural_tag": "{}", "structured_outputs": {"regex": "a"}},
        "structural_tag",
    ),
    "tags that are no text": (
        {"structural_tag": {"type": "structural_tag"}},
        "structured_outputs.structural_tag",
    ),
    "tags beside a schema": (
        {**tags(), "guided_json": SCHEMA},
        "guided_json",
    ),
    "a large one": ({"guided_grammar": "x" * 70_000}, "guided_grammar"),
    "an empty one": ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    "closed objects": (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
def test_structured_outputs_are_refused_by_field(fields, param):
    with pytest.raises(InvalidArgumentError) as caught:
        sampling_of(json.dumps({"prompt": "x", **fields}).encode())
    assert caught.value.field.endswith(param)


def sampling_of(body: bytes) -> None:
    """Reads the sampling parameters of a body, as a route does."""
    request = parsed_body(body, CompletionRequest)
    try:
        completion_sampling(request, NO_DEFAULTS)
    except InvalidArgumentError as error:
        raise COMPLETIONS.renamed(request, error) from error
