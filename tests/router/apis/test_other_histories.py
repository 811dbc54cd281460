"""Histories that other servers made: items and blocks of their own tools.

The examples have every type that the packages of OpenAI and Anthropic know, so that a new one is
missed here before a client sends it.
"""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.content_block_param import ContentBlockParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from pydantic import BaseModel

from baton_router.apis.edge.body.unknown_fields import UnknownFields
from baton_router.text.model_card import ModelCard
from tests.support.router.front import front_of
from tests.support.router.scripted import decode, prefill
from tests.support.router.written import writing

USER = {"role": "user", "content": "Hi."}
# Items by their types: what the model is told of one, in the words of the test's template.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "custom_tool_call": (
        {"call_id": "c", "name": "patch", "input": "*** Begin"},
        "calls patch input=*** Begin",
    ),
    "custom_tool_call_output": ({"call_id": "c", "output": "Done."}, "## toolDone."),
    "local_shell_call": (
        {"id": "ls_1", "call_id": "s", "action": {"type": "exec", "command": ["ls"]}},
        "calls local_shell type=exec command=['ls']",
    ),
    "local_shell_call_output": ({"id": "ls_1", "output": "a.txt"}, "## toola.txt"),
    "shell_call": ({"call_id": "h", "action": {"commands": ["pwd"]}}, "calls shell commands="),
    "shell_call_output": (
        {"call_id": "h", "output": [{"stdout": "/tmp", "stderr": "", "outcome": {"type": "exit"}}]},
        '## tool[{"stdout": "/tmp"',
    ),
    "apply_patch_call": (
        {"call_id": "p", "operation": {"type": "delete_file", "path": "a.txt"}},
        "calls apply_patch type=delete_file path=a.txt",
    ),
    "apply_patch_call_output": ({"call_id": "p", "status": "failed"}, "## toolfailed"),
    "program": ({"id": "x", "call_id": "g", "code": "f()"}, "calls program code=f()"),
    "program_output": ({"id": "y", "call_id": "g", "result": "3"}, "## tool3"),
    "mcp_call": (
        {"id": "m", "name": "search", "arguments": '{"q": 1}', "output": "Two."},
        "calls search q=1<|im_end|>\n## toolTwo.",
    ),
    "code_interpreter_call": (
        {"id": "i", "code": "1 + 1", "outputs": [{"type": "logs", "logs": "2"}]},
        "calls code_interpreter code=1 + 1<|im_end|>\n## tool2",
    ),
    "file_search_call": (
        {"id": "f", "queries": ["rain"], "results": [{"filename": "a.md", "text": "It rains."}]},
        "calls file_search queries=['rain']<|im_end|>\n## tool[{",
    ),
}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "additional_tools": {"role": "developer", "tools": []},
    "compaction": {"encrypted_content": "x"},
    "compaction_trigger": {},
    "computer_call": {"id": "a", "call_id": "a", "action": {"type": "wait"}},
    "computer_call_output": {"call_id": "a", "output": {"type": "computer_screenshot"}},
    "image_generation_call": {"id": "a", "result": "aGk="},
    "mcp_approval_request": {"id": "a", "name": "f", "arguments": "{}"},
    "mcp_approval_response": {"approval_request_id": "a", "approve": True},
    "mcp_list_tools": {"id": "a", "server_label": "s", "tools": []},
    "tool_search_call": {"arguments": {"q": "x"}},
    "tool_search_output": {"tools": []},
    "web_search_call": {"id": "a", "status": "completed", "action": {"type": "search"}},
}
OWN = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}

# Blocks by their types, in the same way.
USES: dict[str, tuple[dict[str, Any], str]] = {
    "server_tool_use": (
        {"id": "w", "name": "web_search", "input": {"query": "rain"}},
        "calls web_search query=rain",
    ),
    "web_search_tool_result": (
        {
            "tool_use_id": "w",
            "content": [{"url": "https://a", "title": "Rain", "encrypted_content": "SECRET"}],
        },
        '## tool[{"url": "https://a", "title": "Rain"}]',
    ),
    "mcp_tool_use": ({"id": "m", "name": "time", "server_name": "s", "input": {}}, "calls time"),
    "mcp_tool_result": (
        {"tool_use_id": "m", "content": [{"type": "text", "text": "Noon."}]},
        "## toolNoon.",
    ),
    "web_fetch_tool_result": (
        {
            "tool_use_id": "w",
            "content": {
                "type": "web_fetch_result",
                "url": "https://a",
                "content": {"source": {"type": "base64", "data": "SECRET"}},
            },
        },
        '"url": "https://a"',
    ),
    "code_execution_tool_result": (
        {"tool_use_id": "w", "content": {"stdout": "2", "return_code": 0, "content": []}},
        '"stdout": "2"',
    ),
    "bash_code_execution_tool_result": (
        {"tool_use_id": "w", "content": {"error_code": "unavailable"}},
        '"error_code": "unavailable"',
    ),
    "text_editor_code_execution_tool_result": (
        {"tool_use_id": "w", "content": {"content": "line"}},
        '"content": "line"',
    ),
    "tool_search_tool_result": (
        {"tool_use_id": "w", "content": {"tool_references": [{"tool_name": "f"}]}},
        '"tool_name": "f"',
    ),
    "advisor_tool_result": (
        {"tool_use_id": "w", "content": {"text": "Do it."}},
        '"text": "Do it."',
    ),
    "compaction": ({"content": "They spoke of rain."}, "They spoke of rain."),
}
LEFT_OUT_BLOCKS: dict[str, dict[str, Any]] = {
    "container_upload": {"file_id": "f"},
    "fallback": {"from": {}, "to": {}},
    "mcp_tool_listing": {"mcp_server_name": "s", "tools": []},
    "tool_addition": {"tool": {}},
    "tool_removal": {"tool": {}},
}
OWN_BLOCKS = {
    *("text", "image", "document", "search_result", "thinking", "redacted_thinking"),
    *("tool_use", "tool_result"),
}


def types_of(union: Any) -> Iterator[str]:
    """The values of the field `type` of each kind in a union of a package."""
    for kind in get_args(union):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _literals(kind.model_fields["type"].annotation)
        elif isinstance(kind, type):
            yield from _literals(get_type_hints(kind)["type"])
        else:  # another union, with a note
            yield from types_of(kind)


def _literals(hint: Any) -> Iterator[Any]:
    for argument in get_args(hint):
        yield from [argument] if isinstance(argument, str) else _literals(argument)


def test_examples_have_every_type_of_the_packages():
    assert {*types_of(ResponseInputItemParam)} <= {*CALLS, *LEFT_OUT, *OWN}
    blocks = {*types_of(ContentBlockParam), *types_of(BetaContentBlockParam)}
    assert blocks <= {*USES, *LEFT_OUT_BLOCKS, *OWN_BLOCKS}


async def sent(
    model: ModelCard, path: str, body: dict[str, Any], unknown: UnknownFields | None = None
) -> tuple[str, Any]:
    """Returns the prompt that the workers get, and the answer."""
    computing, decoding = writing("a", model=model)
    async with front_of(computing, decoding, model=model, unknown=unknown) as front:
        answer = await front.post(path, json={"model": model.name, **body})
    if answer.status_code != 200:
        return "", answer
    (asked,) = computing.requests
    ids = list(asked.token_ids)
    return str(model.tokenizer.decode(ids, skip_special_tokens=False)), answer


async def test_calls_of_other_tools_are_told_to_the_model(model):
    items = [{"type": name, **item} for name, (item, _) in CALLS.items()]
    prompt, answer = await sent(model, "/v1/responses", {"input": [USER, *items, USER]})
    assert answer.status_code == 200, answer.text
    at = 0
    for _, told in CALLS.values():
        assert told in prompt[at:]
        at = prompt.index(told, at)
    assert "x-baton-ignored" not in answer.headers


async def test_items_without_text_are_left_out_and_named(model):
    items = [{"type": name, **item} for name, item in LEFT_OUT.items()]
    own, _ = await sent(model, "/v1/responses", {"input": [USER, USER]})
    prompt, answer = await sent(model, "/v1/responses", {"input": [USER, *items, *items, USER]})
    assert answer.status_code == 200, answer.text
    assert prompt == own
    named = answer.headers["x-baton-ignored"].split(", ")
    assert named == [f"input[].{name}" for name in LEFT_OUT]
    refusing = UnknownFields(refuses=True)
    _, refused = await sent(model, "/v1/responses", {"input": [USER, items[0]]}, refusing)
    assert refused.json()["error"]["param"] == "input[1].additional_tools"


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith("_output")])
async def test_output_without_its_call_is_refused(model, name):
    item, _ = CALLS[name]
    body = {"input": [USER, {"type": name, **item}]}
    _, answer = await sent(model, "/v1/responses", body)
    id_field = "id" if name == "local_shell_call_output" else "call_id"
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"input[1].{id_field}")


async def test_function_output_may_be_of_another_call(model):
    """Codex sends the output of a call of its shell so."""
    call = {"type": "local_shell_call", **CALLS["local_shell_call"][0]}
    output = {"type": "function_call_output", "call_id": "s", "output": "a.txt"}
    prompt, answer = await sent(model, "/v1/responses", {"input": [USER, call, output]})
    assert answer.status_code == 200, answer.text
    assert "## toola.txt" in prompt


async def test_blocks_of_other_tools_are_told_to_the_model(model):
    blocks = [{"type": name, **block} for name, (block, _) in USES.items()]
    text = {"type": "text", "text": "So it rains."}
    messages = [USER, {"role": "assistant", "content": [*blocks, text]}, USER]
    prompt, answer = await sent(model, "/v1/messages", {"messages": messages, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    at = 0
    for told in (*(told for _, told in USES.values()), "So it rains.", "## user"):
        at = prompt.index(told, at)
    assert "SECRET" not in prompt


async def test_blocks_without_text_are_left_out_and_named(model):
    blocks = [{"type": name, **block} for name, block in LEFT_OUT_BLOCKS.items()]
    text = {"type": "text", "text": "It rains."}

    def body_of(content: list[Any]) -> dict[str, Any]:
        said = {"role": "assistant", "content": content}
        return {"messages": [USER, said, USER], "max_tokens": 9}

    own, _ = await sent(model, "/v1/messages", body_of([text]))
    prompt, answer = await sent(model, "/v1/messages", body_of([*blocks, text, *blocks]))
    assert answer.status_code == 200, answer.text
    assert prompt == own
    named = answer.headers["x-baton-ignored"].split(", ")
    assert named == [f"messages[].content[].{name}" for name in LEFT_OUT_BLOCKS]


async def test_answer_may_follow_the_result_of_another_servers_tool(model):
    """As after `pause_turn`: the last message is the model's, and nothing of it is to continue."""
    use, result = (
        {"type": name, **USES[name][0]} for name in ("server_tool_use", "web_search_tool_result")
    )
    messages = [USER, {"role": "assistant", "content": [use, result]}]
    prompt, answer = await sent(model, "/v1/messages", {"messages": messages, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    assert prompt.endswith("## assistant\n")


async def test_custom_call_of_a_chat_is_told_to_the_model(model):
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "Done."}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, result]
    prompt, answer = await sent(model, "/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert CALLS["custom_tool_call"][1] in prompt
    async with front_of(prefill(), decode(), model=model) as front:
        del call["custom"]
        answer = await front.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].custom"


async def test_compaction_without_text_changes_nothing(model):
    messages = [USER, {"role": "assistant", "content": [{"type": "compaction", "content": None}]}]
    _, answer = await sent(model, "/v1/messages", {"messages": [*messages, USER], "max_tokens": 9})
    assert answer.status_code == 200, json.dumps(answer.json())
