"""Tools of requests: functions are described to the model, without what says no more than absence;
tools of other types are left out and named."""

from typing import Any

import httpx
import pytest

from baton_router.apis.edge.body.unknown_fields import UnknownFields
from baton_router.apis.edge.headers import IGNORED as HEADER
from baton_router.text.model_card import ModelCard
from tests.support.router.front import front_of
from tests.support.router.written import writing

USER: Any = {"messages": [{"role": "user", "content": "x"}]}
NEEDED: dict[str, Any] = {
    "v1/chat/completions": {**USER, "max_tokens": 20},
    "tokenize": USER,
    "v1/responses": {"input": "x", "max_output_tokens": 20},
    "v1/responses/input_tokens": {"input": "x"},
    "v1/messages": {**USER, "max_tokens": 20},
    "v1/messages/count_tokens": USER,
}
SCHEMA = {"type": "object"}
CHAT_CUSTOM = {"type": "custom", "custom": {"name": "patch"}}
CUSTOM = {"type": "custom", "name": "patch", "format": {"type": "text"}}
NAMESPACE = {"type": "namespace", "name": "clock", "tools": [{"type": "function", "name": "f"}]}
OTHER_TOOLS: list[Any] = [
    {"type": kind, "name": kind, "max_uses": 3}
    for kind in ("web_search", "code_interpreter", "image_generation", "computer", "mcp")
]
# Of types that another API serves.
TOOLS_OF_OTHERS: dict[str, list[Any]] = {
    "v1/chat/completions": [CHAT_CUSTOM, NAMESPACE],
    "tokenize": [CHAT_CUSTOM, NAMESPACE],
    "v1/responses": [CUSTOM],
    "v1/responses/input_tokens": [CUSTOM],
    "v1/messages": [NAMESPACE],
    "v1/messages/count_tokens": [NAMESPACE],
}


def tool_of(path: str, function: dict[str, Any]) -> Any:
    """A function as a tool of an API."""
    if path in ("v1/chat/completions", "tokenize"):
        return {"type": "function", "function": function}
    if path.startswith("v1/responses"):
        return {"type": "function", **function}
    parameters = function.get("parameters", SCHEMA)
    rest = {name: value for name, value in function.items() if name != "parameters"}
    return {**rest, "input_schema": parameters}


async def ask(
    model: ModelCard, path: str, tools: list[Any], unknown: UnknownFields | None = None
) -> tuple[httpx.Response, str]:
    """The answer to a request with these tools, and its prompt if it has one."""
    computing, decoding = writing("Hello.", model=model)
    async with front_of(computing, decoding, model=model, unknown=unknown) as front:
        answer = await front.post(f"/{path}", json={**NEEDED[path], "tools": tools})
    ids = [list(asked.token_ids) for asked in computing.requests]
    return answer, model.tokenizer.decode(ids[0], skip_special_tokens=False) if ids else ""


@pytest.mark.symptom(
    "llama.cpp#20156, command-code#885",
    there="tools that are no functions fail the request",
    here="Leaves them out, and names them in `x-baton-ignored`.",
)
@pytest.mark.parametrize("path", NEEDED)
async def test_tools_that_are_no_functions_are_left_out_and_named(model, path):
    others = [*OTHER_TOOLS, *TOOLS_OF_OTHERS[path]]
    given = [others[0], tool_of(path, {"name": "time"}), *others[1:]]
    answer, prompt = await ask(model, path, given)
    assert answer.status_code == 200, answer.text
    places = [f"tools[{at}].{tool['type']}" for at, tool in enumerate(given) if tool in others]
    assert answer.headers[HEADER] == ", ".join(places)
    _, alone = await ask(model, path, [tool_of(path, {"name": "time"})])
    assert prompt == alone
    refused, _ = await ask(model, path, given, UnknownFields(refuses=True))
    assert refused.status_code == 400
    assert places[0] in refused.json()["error"]["message"]


async def test_other_tools_of_a_namespace_are_left_out_and_named(model):
    tools = [*NAMESPACE["tools"], CUSTOM, {"type": "web_search"}]
    answer, prompt = await ask(model, "v1/responses", [{**NAMESPACE, "tools": tools}])
    assert answer.headers[HEADER] == "tools[0].tools[1].custom, tools[0].tools[2].web_search"
    _, alone = await ask(model, "v1/responses", [NAMESPACE])
    assert prompt == alone


async def test_misspelt_type_of_a_tool_is_guessed(model):
    answer, _ = await ask(model, "v1/responses", [{"type": "functions", "name": "f"}])
    assert answer.headers[HEADER] == "tools[0].functions (did you mean function?)"


async def test_function_to_be_loaded_later_is_described_and_named(model):
    deferred = {"type": "function", "name": "time", "defer_loading": True}
    answer, prompt = await ask(model, "v1/responses", [deferred])
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "tools[0].defer_loading"
    assert '"name": "time"' in prompt


NEUTRAL: dict[str, list[Any]] = {
    "allowed_callers": [None, [], ["direct"]],
    "async": [None, False],
    "defer_loading": [None, False],
    "description": [None, ""],
    "flavour": [None],
    "output_schema": [None],
    "parameters": [None, {}],
    "strict": [None, False],
}


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages"])
async def test_neutral_fields_of_a_function_are_not_in_the_prompt(model, path):
    """Nor is `strict`, whatever it is: the grammar follows it."""
    _, bare = await ask(model, path, [tool_of(path, {"name": "time"})])
    (described,) = (line for line in bare.splitlines() if '"time"' in line)
    schema = ', "parameters": {"type": "object"}' if path == "v1/messages" else ""
    assert described.endswith(f'{{"type": "function", "function": {{"name": "time"{schema}}}}}')
    for name, values in {**NEUTRAL, "strict": [None, False, True]}.items():
        if path == "v1/messages" and name == "parameters":
            continue  # it has to have a schema
        for value in values:
            answer, prompt = await ask(model, path, [tool_of(path, {"name": "time", name: value})])
            assert answer.status_code == 200, (name, value, answer.text)
            assert HEADER not in answer.headers
            assert prompt == bare, (name, value)
