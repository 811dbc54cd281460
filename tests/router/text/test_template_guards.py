"""Guards and branches of the families' templates, each as that of the family's own: turns that one
refuses, drops or moves, and what it counts on. Tests on the fixtures tell nothing without them."""

from typing import Any

import pytest

from baton.errors import InvalidArgumentError
from baton_router.text.template.chat_template import ChatTemplate
from baton_router.text.template.template_probe import TemplateAbilities
from tests.support.templates import FAMILIES, template_of_family

ABILITIES = {
    "deepseek_v3": TemplateAbilities(
        takes_later_system=False,
        needs_text_apart=True,
        needs_text_arguments=True,
        needs_null_content=True,
    ),
    "gemma3": TemplateAbilities(
        takes_repeated_system=False,
        takes_later_system=False,
        takes_repeated_users=False,
        takes_repeated_answers=False,
    ),
    "glm4": TemplateAbilities(),
    "gpt_oss": TemplateAbilities(
        knows_developer=True,
        takes_repeated_system=False,
        takes_later_system=False,
        takes_several_calls=False,
    ),
    "llama3": TemplateAbilities(takes_several_calls=False, needs_text_apart=True),
    "mistral": TemplateAbilities(
        takes_repeated_system=False,
        takes_later_system=False,
        takes_repeated_users=False,
        takes_repeated_answers=False,
        takes_user_before_result=False,
        takes_user_after_result=False,
        takes_any_call_id=False,
        needs_text_apart=True,
    ),
    "qwen3": TemplateAbilities(),
    "qwen3_5": TemplateAbilities(takes_repeated_system=False, takes_later_system=False),
    "qwen3_coder": TemplateAbilities(),
}

ASK = {"role": "user", "content": "ask1"}
AGAIN = {"role": "user", "content": "ask2"}
SAID = {"role": "assistant", "content": "say1"}
RULE = {"role": "system", "content": "rule1"}
LATER_RULE = {"role": "system", "content": "rule2"}
ROBOT = {"role": "robot", "content": "beep"}
PART = {"type": "text", "text": "part1"}
THOUGHT = {"role": "assistant", "content": "say1", "reasoning_content": "think1"}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def call(name: str = "read", call_id: str = "call00001", arguments: Any = None) -> Any:
    given = {"path": "a"} if arguments is None else arguments
    function = {"name": name, "arguments": given}
    return {"id": call_id, "type": "function", "function": function}


def calling(*calls: Any, **fields: Any) -> Any:
    return {"role": "assistant", "content": "", "tool_calls": [*calls], **fields}


def result(text: str = "found1", call_id: str = "call00001") -> Any:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


REFUSED: dict[str, tuple[str, list[Any], list[Any], str]] = {
    "deepseek_v3: arguments that are no text": (
        "deepseek_v3",
        [ASK, calling(call(), content=None)],
        [],
        "concatenate",
    ),
    "gemma3: two users": ("gemma3", [ASK, AGAIN], [], "must alternate"),
    "gemma3: two answers": ("gemma3", [ASK, SAID, SAID], [], "must alternate"),
    "gemma3: a later system": ("gemma3", [ASK, RULE, RULE], [], "must alternate"),
    "gemma3: a result": ("gemma3", [ASK, SAID, result()], [], "must alternate"),
    "gemma3: no content": ("gemma3", [{"role": "user", "content": None}], [], "type"),
    "glm4: arguments as text": ("glm4", [ASK, calling(call(arguments="{}"))], [], "items"),
    "gpt_oss: channels": (
        "gpt_oss",
        [ASK, {"role": "assistant", "content": "<|channel|>final"}],
        [],
        "no channels",
    ),
    "gpt_oss: content and a thought": (
        "gpt_oss",
        [ASK, calling(call(), content="a", thinking="b")],
        [],
        "content and a thought",
    ),
    "gpt_oss: a result alone": ("gpt_oss", [ASK, result()], [], "must follow a call"),
    "gpt_oss: a result after an answer": (
        "gpt_oss",
        [ASK, calling(call()), result(), SAID, result()],
        [],
        "must follow a call",
    ),
    "llama3: two calls": ("llama3", [ASK, calling(call(), call())], [], "one call only"),
    "llama3: tools without a user": ("llama3", [RULE], [TOOL], "no user message"),
    "mistral: two users": ("mistral", [ASK, AGAIN], [], "must alternate"),
    "mistral: a user after a result": (
        "mistral",
        [ASK, calling(call()), result(), AGAIN],
        [],
        "must alternate",
    ),
    "mistral: a later system": ("mistral", [ASK, SAID, RULE], [], "must alternate"),
    "mistral: an unknown role": ("mistral", [ASK, ROBOT], [], "roles are"),
    "mistral: a long id of a call": (
        "mistral",
        [ASK, calling(call(call_id="call_1"))],
        [],
        "nine letters",
    ),
    "mistral: a long id of a result": (
        "mistral",
        [ASK, calling(call()), result(call_id="call_1")],
        [],
        "nine letters",
    ),
    "qwen3_5: no messages": ("qwen3_5", [], [], "no messages"),
    "qwen3_5: no question": ("qwen3_5", [RULE, SAID], [], "No question"),
    "qwen3_5: results alone": (
        "qwen3_5",
        [{"role": "user", "content": "<tool_response>a</tool_response>"}],
        [],
        "No question",
    ),
    "qwen3_5: a later system": ("qwen3_5", [ASK, RULE], [], "at the beginning"),
    "qwen3_5: an unknown role": ("qwen3_5", [ASK, ROBOT], [], "not expected"),
    "qwen3_5: an unknown part": (
        "qwen3_5",
        [{"role": "user", "content": [{"type": "audio"}]}],
        [],
        "not known",
    ),
    "qwen3_5: arguments as text": ("qwen3_5", [ASK, calling(call(arguments="{}"))], [], "mapping"),
    "qwen3_coder: arguments as text": (
        "qwen3_coder",
        [ASK, calling(call(arguments="{}"))],
        [],
        "mapping",
    ),
}

# Texts that are not in what a template writes.
DROPPED: dict[str, tuple[str, list[Any], str]] = {
    "deepseek_v3: a thought": (
        "deepseek_v3",
        [ASK, {"role": "assistant", "content": "<think>think1</think>say1"}],
        "think1",
    ),
    "deepseek_v3: calls beside a text": (
        "deepseek_v3",
        [ASK, calling(call(), content="x")],
        "read",
    ),
    "deepseek_v3: calls beside an empty text": ("deepseek_v3", [ASK, calling(call())], "read"),
    "deepseek_v3: an unknown role": ("deepseek_v3", [ASK, ROBOT], "beep"),
    "glm4: an unknown role": ("glm4", [ASK, ROBOT], "beep"),
    "glm4: a thought before the last question": ("glm4", [ASK, THOUGHT, AGAIN], "think1"),
    "gpt_oss: a later system": ("gpt_oss", [ASK, RULE, AGAIN], "rule1"),
    "gpt_oss: an unknown role": ("gpt_oss", [ASK, ROBOT], "beep"),
    "gpt_oss: the second call": ("gpt_oss", [ASK, calling(call(), call("list"))], "list"),
    "gpt_oss: a thought before the next answer": (
        "gpt_oss",
        [ASK, calling(call(), thinking="think1"), result(), SAID, AGAIN],
        "think1",
    ),
    "llama3: a text beside a call": ("llama3", [ASK, calling(call(), content="say1")], "say1"),
    "mistral: a text beside a call": ("mistral", [ASK, calling(call(), content="say1")], "say1"),
    "qwen3: an unknown role": ("qwen3", [ASK, ROBOT], "beep"),
    "qwen3: parts": (
        "qwen3",
        [{"role": "user", "content": [{"type": "text", "text": "x1"}]}],
        "x1",
    ),
    "qwen3: a thought before the last question": ("qwen3", [ASK, THOUGHT, AGAIN], "think1"),
    "qwen3_5: a thought before the last question": ("qwen3_5", [ASK, THOUGHT, AGAIN], "think1"),
    "qwen3_coder: a thought": ("qwen3_coder", [ASK, THOUGHT], "think1"),
}

# Texts in what a template writes.
WRITTEN: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "deepseek_v3: all systems first": (
        "deepseek_v3",
        [RULE, ASK, LATER_RULE],
        {},
        "<s>rule1\n\nrule2<｜User｜>ask1",
    ),
    "deepseek_v3: outputs as one block": (
        "deepseek_v3",
        [ASK, result("a"), result("b"), SAID],
        {},
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a<｜tool▁output▁end｜>"
        "<｜tool▁output▁begin｜>b<｜tool▁output▁end｜><｜tool▁outputs▁end｜>say1",
    ),
    "gemma3: the system in the first user": (
        "gemma3",
        [RULE, ASK],
        {},
        "<start_of_turn>user\nrule1\n\nask1<end_of_turn>",
    ),
    "gemma3: the model's own role": ("gemma3", [ASK, SAID], {}, "<start_of_turn>model\nsay1"),
    "glm4: a thought after the last question": (
        "glm4",
        [ASK, THOUGHT],
        {},
        "<think>think1</think>",
    ),
    "glm4: results as one block": (
        "glm4",
        [ASK, calling(call(), call()), result("a"), result("b")],
        {},
        "<|observation|>\n<tool_response>\na\n</tool_response>\n<tool_response>\nb",
    ),
    "glm4: no thinking": ("glm4", [ASK], {"enable_thinking": False}, "ask1/nothink<|assistant|>"),
    "gpt_oss: a developer": (
        "gpt_oss",
        [{**RULE, "role": "developer"}, ASK],
        {},
        "<|start|>developer<|message|># Instructions\n\nrule1",
    ),
    "gpt_oss: a system as a developer": (
        "gpt_oss",
        [RULE, ASK],
        {},
        "<|start|>developer<|message|># Instructions\n\nrule1",
    ),
    "gpt_oss: an effort": ("gpt_oss", [ASK], {"reasoning_effort": "high"}, "Reasoning: high"),
    "gpt_oss: a text before a call as a thought": (
        "gpt_oss",
        [ASK, calling(call(), content="say1")],
        {},
        "<|channel|>analysis<|message|>say1<|end|>",
    ),
    "gpt_oss: a result as JSON": (
        "gpt_oss",
        [ASK, calling(call()), result('a"b')],
        {},
        'functions.read to=assistant<|channel|>commentary<|message|>"a\\"b"',
    ),
    "llama3: tools in the first user": (
        "llama3",
        [RULE, ASK],
        {"tools": [TOOL]},
        "}\n\nask1<|eot_id|>",
    ),
    "llama3: tools in the system": (
        "llama3",
        [RULE, ASK],
        {"tools": [TOOL], "tools_in_user_message": False},
        "}\n\nrule1<|eot_id|>",
    ),
    "llama3: a result as JSON": (
        "llama3",
        [ASK, calling(call()), result('a"b')],
        {},
        'ipython<|end_header_id|>\n\n"a\\"b"',
    ),
    "mistral: tools before the last user": (
        "mistral",
        [ASK, SAID, AGAIN],
        {"tools": [TOOL]},
        "[INST] ask1[/INST] say1</s>[AVAILABLE_TOOLS]",
    ),
    "mistral: the system in the last user": (
        "mistral",
        [RULE, ASK, SAID, AGAIN],
        {},
        "[INST] ask1[/INST] say1</s>[INST] rule1\n\nask2[/INST]",
    ),
    "qwen3: a thought after the last question": (
        "qwen3",
        [ASK, THOUGHT],
        {},
        "<think>\nthink1\n</think>\n\nsay1",
    ),
    "qwen3: a thought within the text": (
        "qwen3",
        [ASK, {"role": "assistant", "content": "<think>\nthink1\n</think>\n\nsay1"}, AGAIN],
        {},
        "<|im_start|>assistant\nsay1<|im_end|>",
    ),
    "qwen3: results as a turn of the user": (
        "qwen3",
        [ASK, calling(call(), call()), result("a"), result("b")],
        {},
        "user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>",
    ),
    "qwen3: no question in results": (
        "qwen3",
        [ASK, THOUGHT, {"role": "user", "content": "<tool_response>a</tool_response>"}],
        {},
        "<think>\nthink1\n</think>",
    ),
    "qwen3: no thinking": ("qwen3", [ASK], {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    "qwen3_5: an open thought": ("qwen3_5", [ASK], {}, "<|im_start|>assistant\n<think>\n"),
    "qwen3_5: no thinking": ("qwen3_5", [ASK], {"enable_thinking": False}, "<think>\n\n</think>"),
    "qwen3_5: parts": (
        "qwen3_5",
        [{"role": "user", "content": [{"type": "image"}, PART]}],
        {},
        "<|vision_start|><|image_pad|><|vision_end|>part1",
    ),
    "qwen3_5: arguments by their names": (
        "qwen3_5",
        [ASK, calling(call())],
        {},
        "<function=read>\n<parameter=path>\na\n</parameter>\n</function>",
    ),
    "qwen3_coder: a system of its own": (
        "qwen3_coder",
        [ASK],
        {"tools": [TOOL]},
        "<|im_start|>system\nYou write programs.",
    ),
    "qwen3_coder: any role": ("qwen3_coder", [ASK, ROBOT], {}, "<|im_start|>robot\nbeep"),
    "qwen3_coder: arguments by their names": (
        "qwen3_coder",
        [ASK, calling(call())],
        {},
        "<function=read>\n<parameter=path>\na\n</parameter>\n</function>",
    ),
}


def template_of(family: str) -> ChatTemplate:
    return ChatTemplate(template_of_family(family), (("bos_token", "<s>"), ("eos_token", "</s>")))


def test_every_family_has_its_guards_tested():
    assert {*ABILITIES} == {*FAMILIES}
    assert {family for family, *_ in WRITTEN.values()} == {*FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_takes_the_turns_of_its_own_template(family):
    assert template_of(family).abilities == ABILITIES[family]


@pytest.mark.parametrize(("family", "messages", "tools", "problem"), REFUSED.values(), ids=REFUSED)
def test_family_refuses_what_its_own_template_refuses(family, messages, tools, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        template_of(family).render(messages, tools)


@pytest.mark.parametrize(("family", "messages", "text"), DROPPED.values(), ids=DROPPED)
def test_family_drops_what_its_own_template_drops(family, messages, text):
    assert text not in template_of(family).render(messages)


@pytest.mark.parametrize(("family", "messages", "given", "text"), WRITTEN.values(), ids=WRITTEN)
def test_family_writes_as_its_own_template_does(family, messages, given, text):
    variables = {name: value for name, value in given.items() if name != "tools"}
    assert text in template_of(family).render(messages, given.get("tools", ()), variables)
