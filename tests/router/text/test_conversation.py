"""Normalising step between conversations as clients gave them and their rendering."""

import pytest

from baton.errors import InvalidArgumentError
from baton_router.call.generate_call import Conversation, GivenImage, ToolCall, Turn
from baton_router.text.conversation import normalised

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
    assert normalised(Conversation(items)).turns == items


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
