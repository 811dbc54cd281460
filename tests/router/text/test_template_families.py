"""Conversations of agents, rendered by the templates of the families that they use."""

import json

import pytest

from baton.errors import InvalidArgumentError
from baton_router.call.arguments import arguments_object
from baton_router.call.generate_call import Conversation, ToolCall, Turn
from baton_router.call.output_format import Tool
from baton_router.text.conversation.calls import with_taken_calls
from baton_router.text.conversation.normalising import normalised
from baton_router.text.conversation.template_messages import template_tools, template_turns
from baton_router.text.template.chat_template import ChatTemplate
from baton_router.text.template.template_probe import TemplateAbilities
from tests.support.templates import FAMILIES, template_of_family

WITHOUT_TOOLS = ("gemma3",)
TOOLS = [
    Tool("read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    Tool("list", "Lists all files."),
]


def turn(role: str, *texts: str, **fields: object) -> Turn:
    return Turn(role, texts, role_field="messages[0].role", **fields)  # type: ignore[arg-type]


def calls(*arguments: str, text: str = "") -> Turn:
    made = tuple(ToolCall(f"call_{at}_of_many", "read", one) for at, one in enumerate(arguments))
    return turn("assistant", *([text] if text else []), tool_calls=made)


def result(text: str, at: int = 0) -> Turn:
    return turn("tool", text, tool_call_id=f"call_{at}_of_many", name="read")


PATH = '{"path": "a.txt"}'
TALKS = {
    "developer first": [turn("developer", "rule1"), turn("user", "ask1")],
    "two systems": [turn("system", "rule1"), turn("system", "rule2"), turn("user", "ask1")],
    "system and developer": [
        turn("system", "rule1"),
        turn("developer", "rule2"),
        turn("user", "ask1"),
    ],
    "system after the question": [turn("user", "ask1"), turn("system", "rule1")],
    "system later": [
        turn("system", "rule1"),
        turn("user", "ask1"),
        turn("assistant", "say1"),
        turn("system", "rule2"),
        turn("user", "ask2"),
    ],
    "two users": [turn("user", "ask1"), turn("user", "ask2")],
    "two answers": [
        turn("user", "ask1"),
        turn("assistant", "say1"),
        turn("assistant", "say2"),
        turn("user", "ask2"),
    ],
}
USES = {
    "one call": [turn("user", "ask1"), calls(PATH), result("found1")],
    "a text and a call": [turn("user", "ask1"), calls(PATH, text="say1"), result("found1")],
    "two calls": [
        turn("user", "ask1"),
        calls(PATH, '{"path": "b.txt"}'),
        result("found1"),
        result("found2", 1),
        turn("assistant", "say1"),
        turn("user", "ask2"),
    ],
    "a text after the result": [
        turn("user", "ask1"),
        calls(PATH),
        result("found1"),
        turn("user", "ask2"),
    ],
    "a system after the result": [
        turn("user", "ask1"),
        turn("system", "rule1"),
        calls(PATH),
        result("found1"),
        turn("system", "rule2"),
    ],
    **{
        f"arguments {arguments!r}": [turn("user", "ask1"), calls(arguments), result("found1")]
        for arguments in ("", "null", "[]", '{"path": "a', "not JSON", '"x"', "{}")
    },
}


def rendered(family: str, turns: list[Turn], tools: list[Tool]) -> str:
    template = ChatTemplate(
        template_of_family(family), (("bos_token", "<s>"), ("eos_token", "</s>"))
    )
    conversation = normalised(Conversation(turns, tools), template)
    return template.render(template_turns(conversation, template), template_tools(conversation))


def texts_of(turns: list[Turn]) -> list[str]:
    """Returns the texts, those of instructions last: some templates move them to the beginning."""
    texts = [(one.role in ("system", "developer"), part) for one in turns for part in one.parts]
    return [str(part) for is_rule, part in sorted(texts, key=lambda text: text[0])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", TALKS)
def test_family_renders_each_text_of_a_talk(family, name):
    check(family, TALKS[name], [])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT_TOOLS])
@pytest.mark.parametrize("name", USES)
def test_family_renders_each_text_of_uses_of_tools(family, name):
    check(family, USES[name], TOOLS)


def check(family: str, turns: list[Turn], tools: list[Tool]) -> None:
    text = rendered(family, turns, tools)
    for part in texts_of(turns):
        assert text.count(part) == 1, (part, text)
    places = [text.index(part) for part in texts_of(turns) if not part.startswith("rule")]
    assert places == sorted(places)
    for tool in tools:
        assert tool.name in text
    for call in (call for one in turns for call in one.tool_calls):
        for value in arguments_object(call.arguments).values():
            assert value in text or json.dumps(value)[1:-1] in text


def test_family_that_drops_unknown_roles_refuses_them():
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\].role"):
        rendered("qwen3", [turn("critic", "x"), turn("user", "ask1")], [])


def test_calls_of_a_turn_get_each_result_once_and_after_its_call():
    ids = [f"call{at}" for at in range(3000)]
    made = tuple(ToolCall(one, "read", PATH) for one in [*ids, ids[0]])
    results = [turn("tool", f"result of {one}", tool_call_id=one) for one in reversed(ids)]
    turns = [
        turn("user", "ask"),
        turn("assistant", tool_calls=made),
        *results,
        turn("tool", "last"),
    ]
    split = list(with_taken_calls(turns, TemplateAbilities(takes_several_calls=False)))
    pairs = [(split[1 + 2 * at], split[2 + 2 * at]) for at in range(len(ids))]
    assert [call.tool_calls[0].id for call, _ in pairs] == ids
    assert [found.parts for _, found in pairs] == [(f"result of {one}",) for one in ids]
    assert [one.parts for one in split[1 + 2 * len(ids) :]] == [(), ("last",)]
