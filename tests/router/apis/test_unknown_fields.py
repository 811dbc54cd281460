"""Unknown fields of HTTP bodies: ignored and named, or refused; never in silence."""

import logging
from typing import Any

import httpx
import pytest

from baton_router.apis.edge.body.unknown_fields import (
    HINTS,
    OTHER,
    UnknownFields,
    find_unknown,
)
from baton_router.apis.edge.headers import IGNORED as HEADER
from baton_router.apis.edge.metrics import HttpMetrics
from baton_router.apis.openai.schemas import ChatRequest, CompletionRequest
from tests.support.router.bodies import parsed_body
from tests.support.router.front import front_of
from tests.support.router.scripted import answering

HINTS_OF_CLIENTS: dict[str, Any] = {
    "metadata": {"kind": "test"},
    "prediction": {"type": "content", "content": "x"},
    "service_tier": "flex",
    "store": True,
    "user": "someone",
    "verbosity": "low",
}


RESPONSE = {"input": "x", "max_output_tokens": 20}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}


async def complete(
    fields: dict[str, Any], unknown: UnknownFields | None = None, **body: Any
) -> httpx.Response:
    """Returns the answer to a request with these fields beside those that it needs."""
    needed = body or {"prompt": "x", "max_tokens": 20}
    return await post(
        "chat/completions" if "messages" in needed else "completions", needed, fields, unknown
    )


async def post(
    path: str, needed: dict[str, Any], fields: dict[str, Any], unknown: UnknownFields | None = None
) -> httpx.Response:
    workers = answering()
    async with front_of(*workers, unknown=unknown) as front:
        return await front.post(f"/v1/{path}", json={**needed, **fields})


async def test_front_ignores_hints_and_names_them_in_header():
    answer = await complete(HINTS_OF_CLIENTS)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == ", ".join(HINTS_OF_CLIENTS)


async def test_front_has_no_ignored_header_without_unknown_fields():
    answer = await complete({"seed": None, "temperature": 1, "flavour": None})
    assert answer.status_code == 200
    assert HEADER not in answer.headers


async def test_front_names_unknown_fields_in_messages():
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "id": at} for at in range(3)]
    answer = await complete({}, messages=messages, max_tokens=2)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "messages[].id, messages[].content[].cache_control"


async def test_refused_request_names_ignored_fields_too():
    answer = await complete({"top_p": 9, "flavour": "sweet"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")
    assert answer.headers[HEADER] == "flavour"


async def test_front_guesses_misspelt_field_in_header_and_log(caplog):
    with caplog.at_level(logging.WARNING, "baton_router.apis.edge.body.unknown_fields"):
        answer = await complete({"temperatur": 0})
    assert answer.headers[HEADER] == "temperatur (did you mean temperature?)"
    assert "temperatur (did you mean temperature?)" in caplog.text


async def test_unknown_field_is_logged_once_a_minute_by_name(caplog):
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, "baton_router.apis.edge.body.unknown_fields"):
        for _ in range(3):
            for name in ("flavour", "colour"):
                unknown.note({}, find_unknown({"prompt": "x", name: 1}, CompletionRequest))
    assert len(caplog.records) == 2


async def test_log_of_unknown_fields_is_bounded(caplog):
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, "baton_router.apis.edge.body.unknown_fields"):
        for at in range(1000):
            unknown.note({}, find_unknown({f"field {at}": 1}, CompletionRequest))
    assert len(caplog.records) < 300


async def test_ignored_header_is_bounded_and_sanitised():
    fields = {f"évil\r\nset-cookie: {at}" + "x" * 500: at for at in range(100)}
    answer = await complete(fields)
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    header = answer.headers[HEADER]
    assert len(header) < 16 * 100
    assert header.startswith("?vil??set-cookie?")
    assert header.endswith(", and 48 more")


async def test_metric_counts_hints_by_name_and_others_together():
    unknown = UnknownFields()
    await complete({"user": "a", "store": True, "flavour": 1, "colour": 2}, unknown)
    (family,) = HttpMetrics(unknown).collect()
    counts = {sample.labels["field"]: sample.value for sample in family.samples}
    assert (counts["user"], counts["store"], counts[OTHER]) == (1, 1, 2)
    assert counts.keys() == {*HINTS, OTHER}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"flavour": "sweet"}, "flavour", "is not supported here; leave it out"),
        ({"temperatur": 1}, "temperatur", "did you mean temperature?"),
        ({"store": True}, "store", "is not supported here"),
        ({"verbosity": "low"}, "verbosity", "is not supported here"),
    ],
)
async def test_front_refuses_unknown_field_if_told_to(fields, param, told):
    answer = await complete(fields, UnknownFields(refuses=True))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]


async def test_strict_front_names_index_of_unknown_message_field():
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "hi", "mood": 1}]
    answer = await complete({}, UnknownFields(refuses=True), messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].mood")


async def test_strict_front_takes_hints_that_change_nothing():
    hints = {"user": "a", "metadata": {}, "store": False, "service_tier": "auto"}
    assert (await complete(hints, UnknownFields(refuses=True))).status_code == 200


async def test_front_takes_neutral_value_of_unsupported_field():
    fields = {"suffix": "", "details": False, "skip_special_tokens": True}
    answer = await complete(fields)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == ", ".join(fields)


@pytest.mark.parametrize(("name", "inner"), [("baton", "timeout"), ("stream_options", "usage")])
async def test_front_refuses_unknown_option_by_path(name, inner):
    answer = await complete({name: {inner: 1}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"{name}.{inner}")


def test_unsupported_field_is_refused_behind_many_unknown_ones():
    many = b",".join(b'"f%d":1' % at for at in range(100))
    with pytest.raises(Exception, match="suffix: is not supported here, and would change"):
        parsed_body(b'{"prompt":"x",' + many + b',"suffix":"y"}', CompletionRequest)


def test_unknown_fields_of_deep_messages_are_found():
    content = {"messages": [{"role": "a", "tool_calls": [{"id": "1", "index": 0}]}]}
    assert [u.path for u in find_unknown(content, ChatRequest)] == [
        "messages[0].tool_calls[0].index"
    ]


@pytest.mark.parametrize(
    ("path", "needed", "fields", "header"),
    [
        (
            "responses",
            RESPONSE,
            {
                "flavour": 1,
                "include": ["reasoning.encrypted_content"],
                "service_tier": "flex",
                "text": {"verbosity": "low"},
                "reasoning": {"summary": "auto"},
            },
            "flavour, include, service_tier, text.verbosity, reasoning.summary",
        ),
        (
            "messages",
            MESSAGE,
            {
                "flavour": 1,
                "top_kk": 1,
                "metadata": {"user_id": "a"},
                "system": [{"type": "text", "text": "Hi.", "cache_control": {}}],
                "tools": [],
            },
            "flavour, top_kk (did you mean top_k?), metadata, system[].cache_control",
        ),
        (
            "messages",
            {"max_tokens": 20},
            {
                "messages": [
                    {"role": "user", "id": 1, "content": [{"type": "text", "text": "a", "mood": 1}]}
                ]
            },
            "messages[].id, messages[].content[].mood",
        ),
        (
            "messages",
            MESSAGE,
            {
                "output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9}},
                "thinking": {"type": "between_tools", "mood": 1},
                "tool_choice": {"type": "auto", "mood": 1},
            },
            "output_config.task_budget, thinking.mood, tool_choice.mood",
        ),
        ("messages/count_tokens", {"messages": MESSAGE["messages"]}, {"seed": 1}, "seed"),
    ],
)
async def test_other_apis_ignore_and_name_unknown_fields(path, needed, fields, header):
    answer = await post(path, needed, fields)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) == set(header.split(", "))


@pytest.mark.parametrize(("path", "needed"), [("responses", RESPONSE), ("messages", MESSAGE)])
async def test_other_apis_refuse_unknown_fields_if_told_to(path, needed):
    strict = UnknownFields(refuses=True)
    answer = await post(path, needed, {"flavour": 1}, strict)
    assert answer.status_code == 400
    assert "flavour" in answer.json()["error"]["message"]
    hints = {"metadata": {"a": "b"}, "service_tier": "auto"}
    assert (await post(path, needed, hints, strict)).status_code == 200


@pytest.mark.parametrize(
    ("path", "needed", "fields"),
    [
        ("responses", RESPONSE, {"n": 2}),
        ("responses", RESPONSE, {"max_tokens": 5}),
        ("responses", RESPONSE, {"echo": True}),
        ("messages", MESSAGE, {"seed": 5}),
        ("messages", MESSAGE, {"response_format": {"type": "json_object"}}),
    ],
)
async def test_other_apis_refuse_what_would_change_the_answer(path, needed, fields):
    answer = await post(path, needed, fields)
    (name,) = fields
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


async def test_other_apis_take_neutral_values_of_chat_completions():
    answer = await post("responses", RESPONSE, {"n": 1, "logit_bias": {}})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "n, logit_bias"


async def test_strict_front_takes_its_own_message_back():
    turn = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [
        *MESSAGE["messages"],
        {"role": "assistant", "content": [turn]},
        *MESSAGE["messages"],
    ]
    strict = UnknownFields(refuses=True)
    answer = await post("messages", {**MESSAGE, "messages": messages}, {}, strict)
    assert answer.status_code == 200, answer.text


async def test_metric_counts_hints_of_other_apis_by_name():
    unknown = UnknownFields()
    await post("messages", MESSAGE, {"metadata": {}, "flavour": 1}, unknown)
    assert (unknown.num_ignored["metadata"], unknown.num_ignored[OTHER]) == (1, 1)
