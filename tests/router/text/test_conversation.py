"""Normalising step between conversations as clients gave them and their rendering."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidArgumentError
from baton_router.call.generate_call import Conversation, GivenImage, ToolCall, Turn
from baton_router.text.conversation.normalising import normalised
from baton_router.text.conversation.template_messages import template_turns
from baton_router.text.template.chat_template import ChatTemplate
from tests.support.router.templates import (
    ALTERNATING,
    DROPPING,
    GENERIC,
    HARMONY_LIKE,
    LAST_SYSTEM,
    NO_SYSTEM,
    STRICT_SYSTEM,
)

USER = Turn("user", ("Hi.",))
IMAGE = GivenImage("data:", "input[1].content[0].image_url")
CALL = ToolCall("c", "time", "{}")


def thought(text: str) -> Turn:
    return Turn("assistant", reasoning=text)


def said(text: str) -> Turn:
    return Turn("assistant", (text,))


def called(*calls: ToolCall) -> Turn:
    return Turn("assistant", tool_calls=calls)


ITEMS: dict[str, tuple[list[Turn], list[Turn]]] = {
    "one turn of the model": (
        [USER, thought("a"), thought("b"), said("c"), called(CALL), called(CALL), USER],
        [USER, Turn("assistant", ("c",), reasoning="ab", tool_calls=(CALL, CALL)), USER],
    ),
    "a text after a call": (
        [called(CALL), said("c")],
        [Turn("assistant", ("c",), tool_calls=(CALL,))],
    ),
    "two texts": ([said("a"), said("")], [said("a"), said("")]),
    "reasoning after a text": (
        [said("a"), thought(""), called(CALL)],
        [said("a"), called(CALL)],
    ),
    "reasoning alone": ([USER, thought("a"), USER, thought("b")], [USER, USER]),
    "a result between": (
        [called(CALL), Turn("tool", ("x",), tool_call_id="c"), said("a")],
        [called(CALL), Turn("tool", ("x",), tool_call_id="c"), said("a")],
    ),
    "leading instructions": (
        [Turn("system", ("a",)), Turn("developer", ("b", "c")), USER],
        [Turn("system", ("a\n\nb\nc",)), USER],
    ),
    "leading image": (
        [Turn("system", ("a",)), Turn("system", (IMAGE, "b"))],
        [Turn("system", ("a",)), Turn("system", (IMAGE, "b"))],
    ),
    "later instructions": (
        [USER, Turn("developer", (IMAGE, "a")), Turn("system", ("b",))],
        [USER, Turn("system", (IMAGE, "a")), Turn("system", ("b",))],
    ),
}


@pytest.mark.parametrize(("items", "turns"), ITEMS.values(), ids=ITEMS)
def test_normalised_items_are_turns_of_templates(items, turns):
    assert normalised(Conversation(items, is_of_items=True)).turns == turns
    known = [replace(turn, role=turn.role.replace("developer", "system")) for turn in items]
    assert normalised(Conversation(items)).turns == known


def test_normalised_effort_yields_to_variables_of_client():
    none = {"enable_thinking": False, "thinking": False}
    for effort, own, variables in (
        (None, {"x": 1}, {"x": 1}),
        ("high", {"x": 1}, {"reasoning_effort": "high", "x": 1}),
        ("none", {}, none),
        ("none", {"thinking": True}, {**none, "thinking": True}),
    ):
        given = Conversation([USER], variables=own, effort=effort)
        assert normalised(given).variables == variables


def test_normalised_refuses_argument_of_renderer_by_path():
    with pytest.raises(InvalidArgumentError, match="not for clients") as caught:
        normalised(Conversation([USER], variables={"x": 1, "tools": []}))
    assert caught.value.field == "parsing.template_variables.tools"


def user(text: str) -> Turn:
    return Turn("user", (text,))


def rule(text: str, role: str = "system") -> Turn:
    return Turn(role, (text,))


def result(text: str) -> Turn:
    return Turn("tool", (text,), tool_call_id="c")


RENDERED: dict[str, tuple[str, list[Turn], str]] = {
    "a developer is the system": (
        DROPPING,
        [rule("a", "developer"), user("b")],
        "<system>a<user>b",
    ),
    "a developer, where any role is rendered": (
        GENERIC,
        [rule("a", "developer"), user("b")],
        "<system>a<user>b",
    ),
    "a developer, where the template knows one": (
        HARMONY_LIKE,
        [rule("a", "developer"), user("b")],
        "<developer># Instructions a<user>b",
    ),
    "the system and a developer": (
        HARMONY_LIKE,
        [rule("a"), rule("b", "developer"), user("c")],
        "<developer># Instructions a\n\nb<user>c",
    ),
    "later rules, where the template takes them": (
        GENERIC,
        [rule("a"), rule("b"), user("c"), rule("d", "developer")],
        "<system>a<system>b<user>c<system>d",
    ),
    "repeated rules": (
        STRICT_SYSTEM,
        [rule("a"), rule("b", "developer"), user("c")],
        "<system>a\n\nb<user>c",
    ),
    "later rules after the user": (
        STRICT_SYSTEM,
        [rule("a"), user("b"), rule("c"), said("d"), user("e")],
        "<system>a<user>b\n<system>\nc\n</system><assistant>d<user>e",
    ),
    "later rules before the user": (
        LAST_SYSTEM,
        [user("a"), said("b"), rule("c"), rule("d"), user("e")],
        "<user>a<assistant>b<user><system>\nc\n</system>\n<system>\nd\n</system>\ne",
    ),
    "later rules between answers": (
        HARMONY_LIKE,
        [user("a"), said("b"), rule("c", "developer"), said("d"), rule("e")],
        "<user>a<assistant>b<user><system>\nc\n</system><assistant>d<user><system>\ne\n</system>",
    ),
    "later rules after a result": (
        ALTERNATING,
        [user("a"), called(CALL), result("b"), rule("c"), said("d")],
        "<user>a<assistant>[time]<tool>b\n<system>\nc\n</system><assistant>d",
    ),
    "rules without a system": (
        NO_SYSTEM,
        [rule("a"), rule("b"), user("c"), rule("d")],
        "<user>a\n\nb\n\nc\n<system>\nd\n</system>",
    ),
    "no rules but empty ones": (NO_SYSTEM, [rule(""), user("a")], "<user>a"),
    "rules alone": (NO_SYSTEM, [rule("a")], "<user>a\n"),
    "adjacent turns of one role": (
        ALTERNATING,
        [user("a"), user("b"), said("c"), said("d"), user("e")],
        "<user>a\nb<assistant>c\nd<user>e",
    ),
    "a result and a text": (
        ALTERNATING,
        [user("a"), called(CALL), result("b"), result("c"), user("d"), user("e"), said("f")],
        "<user>a<assistant>[time]<tool>b<tool>c\nd\ne<assistant>f",
    ),
    "a text before a result": (
        ALTERNATING,
        [user("a"), called(CALL), user("b"), user("c"), result("d"), result("e"), said("f")],
        "<user>a<assistant>[time]<tool>b\nc\nd<tool>e<assistant>f",
    ),
    "texts around results": (
        ALTERNATING,
        [user("a"), called(CALL), user("b"), result("c"), user("d"), result("e"), user("f")],
        "<user>a<assistant>[time]<tool>b\nc\nd<tool>e\nf",
    ),
    "adjacent turns, where the template takes them": (
        DROPPING,
        [user("a"), user("b"), called(CALL), result("c"), user("d")],
        "<user>a<user>b<assistant>[time]<tool>c<user>d",
    ),
}


def rendered(source: str, turns: list[Turn]) -> str:
    template = ChatTemplate(source)
    made = normalised(Conversation(turns), template)
    return template.render(template_turns(made)).removesuffix("<assistant>")


@pytest.mark.symptom(
    "ogx#6069",
    there="a template refuses the role `developer`",
    here="Gives it to the template as `system`, unless the template names it.",
)
@pytest.mark.symptom(
    "anon-kode#60",
    there="a template fails where turns of users and assistants do not alternate",
    here="Joins adjacent turns of one role on `/v1/messages`, elsewhere for such templates.",
)
@pytest.mark.parametrize(("source", "turns", "text"), RENDERED.values(), ids=RENDERED)
def test_normalised_turns_are_those_that_template_takes(source, turns, text):
    assert rendered(source, turns) == text


TEMPLATES = [
    ALTERNATING,
    DROPPING,
    GENERIC,
    HARMONY_LIKE,
    LAST_SYSTEM,
    NO_SYSTEM,
    STRICT_SYSTEM,
]


@given(
    source=st.sampled_from(TEMPLATES),
    roles=st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), max_size=6),
)
def test_normalised_conversation_loses_no_text(source, roles):
    """Roles come in any order after a turn of the user, which all templates expect."""
    turns = [Turn(role, (f"text{at}",)) for at, role in enumerate(("user", *roles))]
    text = rendered(source, turns)
    places = [text.find(f"text{at}") for at in range(len(turns))]
    assert -1 not in places
    assert places == sorted(places)


def test_normalised_merges_adjacent_turns_if_api_says_so():
    turns = [user("a"), user("b"), result("c"), result("d"), user("e"), said("f"), called(CALL)]
    made = normalised(Conversation(turns, merges_turns=True)).turns
    whole = Turn("assistant", ("f",), tool_calls=(CALL,))
    assert made == [Turn("user", ("a", "b")), result("c"), result("d"), user("e"), whole]


@pytest.mark.parametrize("source", [DROPPING, GENERIC])
def test_normalised_refuses_role_that_nothing_names(source):
    """Also where the template renders any role."""
    turns = [USER, Turn("robot", ("x",), role_field="messages[1].role")]
    with pytest.raises(InvalidArgumentError, match="is 'robot'") as caught:
        normalised(Conversation(turns), ChatTemplate(source))
    assert caught.value.field == "messages[1].role"
    named = ChatTemplate(GENERIC + "{# 'robot' #}")
    assert normalised(Conversation(turns), named).turns == turns


@pytest.mark.parametrize(("source", "role"), [(DROPPING, "function"), (NO_SYSTEM, "tool")])
def test_normalised_refuses_role_that_template_drops(source, role):
    turns = [USER, Turn(role, ("x",), role_field="messages[1].role")]
    with pytest.raises(InvalidArgumentError, match="renders nothing") as caught:
        normalised(Conversation(turns), ChatTemplate(source))
    assert caught.value.field == "messages[1].role"
    assert normalised(Conversation(turns), ChatTemplate(GENERIC)).turns == turns


@pytest.mark.symptom(
    "vllm#47761, vllm#43995",
    there="malformed arguments of an earlier call fail every later turn",
    here="Gives templates an object always, with the text as it is under `arguments`.",
)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": "b"}', {"a": "b"}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ("[]", {"arguments": "[]"}),
        ('"x"', {"arguments": '"x"'}),
        ('{"a": 1}{"b": 2}', {"arguments": '{"a": 1}{"b": 2}'}),
        ('{"a": "Os', {"arguments": '{"a": "Os'}),
        ("not json", {"arguments": "not json"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_template_gets_arguments_as_an_object(written, arguments):
    call = ToolCall("c", "time", written)
    (turn,) = template_turns(Conversation([called(call)]))
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments
    values = "".join(f" {key}={value}" for key, value in arguments.items())
    assert rendered(GENERIC, [called(call)]) == f"<assistant>[time{values}]"


def test_many_adjacent_turns_are_merged_in_one_go():
    """As many as a body may have: joined one by one they would take longer than a test may."""
    thoughts = [Turn("assistant", reasoning="y" * 500) for _ in range(16_000)]
    rules = [Turn("system", ("x",)) for _ in range(16_000)]
    turns = [USER, *rules, *thoughts, USER]
    made = normalised(Conversation(turns, merges_turns=True), ChatTemplate(STRICT_SYSTEM)).turns
    assert [turn.role for turn in made] == ["user", "assistant", "user"]
    assert len(made[0].parts) == 1 + len(rules)
    assert len(made[1].reasoning) == 500 * len(thoughts)
