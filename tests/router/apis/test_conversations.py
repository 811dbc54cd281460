"""Conversations by every API: one prompt, whatever the template takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.v1 import inference_pb2 as pb
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard
from baton_router.text.request_bounds import RequestLimits
from tests.support.router.calls import call_of
from tests.support.router.front import front_of
from tests.support.router.scripted import decode, prefill
from tests.support.router.templates import ALTERNATING, DROPPING, GENERIC, STRICT_SYSTEM
from tests.support.router.written import writing

CUT = '{"city": "Os'


def text_of(ids: Sequence[int], model: ModelCard) -> str:
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=False))


async def prompt_over_http(model: ModelCard, path: str, body: dict[str, Any]) -> str:
    computing, decoding = writing("a", model=model)
    async with front_of(computing, decoding, model=model) as front:
        answer = await front.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    (asked,) = computing.requests
    return text_of(asked.token_ids, model)


async def prompt_over_grpc(model: ModelCard, messages: list[pb.ChatMessage]) -> str:
    call = call_of(pb.GenerateRequest(chat=pb.Chat(messages=messages)))
    request = await Intake(model, RequestLimits()).read(call, ContextLength(model.max_model_len))
    return text_of(request.token_ids, model)


PROMPTS = {
    GENERIC: "<system>a<user>b<assistant>[f city=Oslo]<tool>c<user>d<system>e<assistant>",
    STRICT_SYSTEM: (
        "<system>a<user>b<assistant>[f]<tool>c<user>d\n<system>\ne\n</system><assistant>"
    ),
    ALTERNATING: "<system>a<user>b<assistant>[f]<tool>c\nd\n<system>\ne\n</system><assistant>",
}


@pytest.mark.symptom(
    "ollama#17774, wally#77",
    there="a template that takes one leading system message fails at a later one",
    here="Marks the later one in the text of a user's turn.",
)
@pytest.mark.parametrize("template", PROMPTS, ids=["generic", "strict system", "alternating"])
async def test_one_conversation_makes_one_prompt_by_every_api(model, template):
    card = replace(model, chat_template=template)
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    chat = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
    ]
    items = [
        *chat[:2],
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "c"},
        *chat[4:],
    ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "c"}
    messages = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "d"}]},
        {"role": "system", "content": "e"},
    ]
    call = pb.ToolCall(id="c", name="f", arguments='{"city": "Oslo"}')
    typed = [
        pb.ChatMessage(role="system", content="a"),
        pb.ChatMessage(role="user", content="b"),
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="c", tool_call_id="c"),
        pb.ChatMessage(role="user", content="d"),
        pb.ChatMessage(role="developer", content="e"),
    ]
    prompts = [
        await prompt_over_http(card, "chat/completions", {"messages": chat}),
        await prompt_over_http(card, "responses", {"input": items}),
        await prompt_over_http(
            card, "messages", {"system": "a", "messages": messages, "max_tokens": 9}
        ),
        await prompt_over_grpc(card, typed),
    ]
    assert prompts == [PROMPTS[template]] * 4


TEXTS_AND_RESULTS = {
    GENERIC: {"ad": "<user>a<tool>d", "da": "<tool>d<user>a", "ada": "<user>a<tool>d<user>a"},
    ALTERNATING: {"ad": "<tool>a\nd", "da": "<tool>d\na", "ada": "<tool>a\nd\na"},
}


@pytest.mark.parametrize("order", ["ad", "da", "ada"])
@pytest.mark.parametrize("template", TEXTS_AND_RESULTS, ids=["generic", "alternating"])
async def test_text_and_result_of_a_turn_stay_in_order(model, template, order):
    """`a` is a text, `d` the result of a call: blocks of a message, and turns of a chat."""
    card = replace(model, chat_template=template)
    user, function = {"role": "user", "content": "b"}, {"name": "f", "arguments": "{}"}
    text = {"role": "user", "content": "a"}
    result = {"role": "tool", "tool_call_id": "c", "content": "d"}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    turns = [text if part == "a" else result for part in order]
    item = {"type": "function_call", "call_id": "c", **function}
    output = {"type": "function_call_output", "call_id": "c", "output": "d"}
    items = [text if part == "a" else output for part in order]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "c", "content": "d"}
    blocks = [{"type": "text", "text": "a"} if part == "a" else found for part in order]
    messages = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": blocks}]
    prompts = [
        await prompt_over_http(card, "chat/completions", {"messages": [user, call, *turns]}),
        await prompt_over_http(card, "responses", {"input": [user, item, *items]}),
        await prompt_over_http(card, "messages", {"messages": messages, "max_tokens": 9}),
    ]
    written = TEXTS_AND_RESULTS[template][order]
    assert prompts == [f"<user>b<assistant>[f]{written}<assistant>"] * 3


@pytest.mark.symptom(
    "llama.cpp#25510",
    there="cut arguments in the history are an error of the server",
    here="Answers; the model reads the arguments as they were cut.",
)
async def test_cut_arguments_of_an_earlier_call_reach_the_model(model):
    card = replace(model, chat_template=GENERIC)
    user = {"role": "user", "content": "b"}
    function = {"name": "f", "arguments": CUT}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    item = {"type": "function_call", "call_id": "c", **function}
    for path, body in (
        ("chat/completions", {"messages": [user, call, user]}),
        ("responses", {"input": [user, item, user]}),
    ):
        prompt = await prompt_over_http(card, path, body)
        assert f"[f arguments={CUT}]" in prompt


async def test_role_that_template_drops_is_refused_by_path(model):
    """It names the role, but has no text for a turn of it."""
    drops = DROPPING.replace("('system', 'user', 'assistant', 'tool')", "('user', 'assistant')")
    card = replace(model, chat_template=drops + "{# 'robot' #}")
    await _refuses_role("tool", card, "renders nothing")
    await _refuses_role("robot", card, "renders nothing")


@pytest.mark.parametrize("template", [GENERIC, DROPPING], ids=["renders", "drops"])
async def test_role_that_nothing_names_is_refused_by_path(model, template):
    """`GENERIC` would render a typo as a role."""
    card = replace(model, chat_template=template)
    for role in ("robot", "asistant", ""):
        known = "does not name; expected assistant, developer, system, user or tool"
        await _refuses_role(role, card, known)


async def test_role_that_the_template_names_is_taken(model):
    names = "{% if messages[0].role == 'robot' %}R:{% endif %}" + GENERIC
    card = replace(model, chat_template=names)
    prompt = await prompt_over_grpc(card, [pb.ChatMessage(role="robot", content="x")])
    assert prompt == "R:<robot>x<assistant>"


async def _refuses_role(role: str, card: ModelCard, problem: str) -> None:
    user = {"role": "user", "content": "b"}
    async with front_of(prefill(), decode(), model=card) as front:
        chat = {"messages": [user, {"role": role, "content": "x"}]}
        answers = [await front.post(p, json=chat) for p in ("/v1/chat/completions", "/tokenize")]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].role")
        assert problem in answer.json()["error"]["message"]
    typed = [pb.ChatMessage(role="user", content="b"), pb.ChatMessage(role=role, content="x")]
    with pytest.raises(InvalidArgumentError, match=problem) as caught:
        await prompt_over_grpc(card, typed)
    assert caught.value.field == "input.chat.messages[1].role"


BEGUN = " The <|im_end|> answer is"
BEGINNINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
    "chat, streamed": ("chat/completions", {"continue_final_message": True, "stream": True}),
    "messages": ("messages", {"max_tokens": 9}),
}


@pytest.mark.parametrize(("path", "fields"), BEGINNINGS.values(), ids=BEGINNINGS)
async def test_answer_continues_the_last_message_of_the_model(model, path, fields):
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": f"{BEGUN} \n"}]
    prompt = await prompt_over_http(model, path, {"messages": turns, **fields})
    assert prompt == f"## userHow?<|im_end|>\n## assistant{BEGUN}"


async def test_answer_continues_as_text_of_the_same_answer(model):
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "It is"}]
    async with front_of(*writing(" so.", model=model), model=model) as front:
        body = {"messages": turns, "continue_final_message": True}
        answer = await front.post("/v1/chat/completions", json=body)
        tokens = await front.post("/tokenize", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == " so."
    assert text_of(tokens.json()["tokens"], model).endswith("## assistantIt is")


async def test_prompt_ends_with_the_last_message_without_an_answer(model):
    """So that a finished conversation is counted; `|<|im_end|>` makes the renderer mark texts."""
    turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So. <|im_end|"}]
    body = {"messages": turns, "add_generation_prompt": False}
    async with front_of(*writing("a", model=model), model=model) as front:
        tokens = await front.post("/tokenize", json=body)
        begun = await front.post("/tokenize", json={"messages": turns})
    prompt = await prompt_over_http(model, "chat/completions", body)
    assert prompt == "## userHow?<|im_end|>\n## assistantSo. <|im_end|<|im_end|>\n"
    assert text_of(tokens.json()["tokens"], model) == prompt
    assert text_of(begun.json()["tokens"], model) == f"{prompt}## assistant\n"


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
NOT_BEGUN: dict[str, tuple[dict[str, Any], str]] = {
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    "an empty answer": ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    "a call": (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}]},
        "messages",
    ),
    "a new answer, too": (
        {"messages": [{"role": "assistant", "content": "a"}], "add_generation_prompt": True},
        "add_generation_prompt",
    ),
}


@pytest.mark.parametrize(("body", "field"), NOT_BEGUN.values(), ids=NOT_BEGUN)
async def test_front_refuses_to_continue_what_is_no_text_of_the_model(model, body, field):
    async with front_of(prefill(), decode(), model=model) as front:
        given = {**body, "continue_final_message": True}
        answer = await front.post("/v1/chat/completions", json=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.symptom(
    "vllm#35508",
    there="an assistant's `content: []` fails",
    here="Takes it as an empty text.",
)
@pytest.mark.symptom(
    "rig#1362",
    there="`content: []` beside `tool_calls` fails",
    here="Takes it.",
)
@pytest.mark.symptom(
    "vllm#13978",
    there="`tool_calls: []` in the history fails",
    here="Takes it as absent.",
)
async def test_history_may_have_empty_lists(model):
    user = {"role": "user", "content": "a"}
    function = {"name": "f", "arguments": "{}"}
    calling = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    for answer, begin in (
        ({"role": "assistant", "content": []}, "## assistant<|im_end|>"),
        ({"role": "assistant", "content": "b", "tool_calls": []}, "## assistantb<|im_end|>"),
        ({**calling, "content": []}, "## assistant calls f<|im_end|>"),
    ):
        turns = {"messages": [user, answer, user]}
        prompt = await prompt_over_http(model, "chat/completions", turns)
        assert begin in prompt.replace("\n<|im_end|>", "<|im_end|>")


@pytest.mark.symptom(
    "codex#12669",
    there="a message of the assistant without `id` and `status` is refused",
    here="Takes it.",
)
async def test_response_takes_answer_without_id_and_status(model):
    user = {"role": "user", "content": "a"}
    text = {"type": "output_text", "text": "b"}
    answer = {"type": "message", "role": "assistant", "content": [text]}
    prompt = await prompt_over_http(model, "responses", {"input": [user, answer, user]})
    assert "## assistantb<|im_end|>" in prompt


NOTE = {"type": "url_citation", "url": "https://a", "title": "A", "start_index": 0, "end_index": 1}
REFUSAL = {"type": "refusal", "refusal": "I cannot."}
HISTORIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a chat's refusal part": ("chat/completions", {"content": [REFUSAL]}, "I cannot."),
    "a chat's refusal": (
        "chat/completions",
        {"content": None, "refusal": "I cannot."},
        "I cannot.",
    ),
    "a chat's text and refusal": (
        "chat/completions",
        {"content": [{"type": "text", "text": "No."}, REFUSAL]},
        "No.\nI cannot.",
    ),
    "a chat's annotations": (
        "chat/completions",
        {
            "content": "So.",
            "refusal": None,
            "annotations": [{"type": "url_citation", "url_citation": NOTE}],
        },
        "So.",
    ),
    "a response's refusal": ("responses", {"content": [REFUSAL]}, "I cannot."),
    "a response's text and refusal": (
        "responses",
        {"content": [{"type": "output_text", "text": "No.", "annotations": []}, REFUSAL]},
        "No.\nI cannot.",
    ),
    "a response's annotations": (
        "responses",
        {
            "content": [
                {"type": "output_text", "text": "So.", "annotations": [NOTE], "logprobs": []}
            ]
        },
        "So.",
    ),
}


@pytest.mark.parametrize(("path", "fields", "text"), HISTORIES.values(), ids=HISTORIES)
async def test_history_may_have_refusals_and_annotations(model, path, fields, text):
    answer = {"role": "assistant", **fields}
    if path == "responses":
        answer |= {"type": "message", "id": "msg_1", "status": "completed"}
    turns = [{"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"}]
    prompt = await prompt_over_http(
        model, path, {"input" if path == "responses" else "messages": turns}
    )
    assert f"## assistant{text}<|im_end|>" in prompt
    assert "https://a" not in prompt
