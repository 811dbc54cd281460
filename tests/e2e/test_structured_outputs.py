"""Structured outputs of a sampled model over HTTP: they end, and are what was asked for."""

import json
import re
from typing import Any

import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster

pytestmark = pytest.mark.e2e

SEEDS = range(1, 9)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["list", "tree"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
}


def texts(cluster: LocalCluster, fields: dict[str, Any], *, chat: bool = False) -> list[str]:
    """Returns a text for each seed, at temperature 1. Fails if one does not end by itself."""
    asked: dict[str, Any] = {"prompt": "Describe it:", "max_tokens": 150}
    if chat:
        asked = {"messages": [{"role": "user", "content": "Describe it."}], "max_tokens": 150}
    path = "chat/completions" if chat else "completions"
    found = []
    with httpx.Client(base_url=f"{cluster.http_address}/v1/", timeout=60) as client:
        for seed in SEEDS:
            answer = client.post(path, json={**asked, **fields, "temperature": 1, "seed": seed})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] == "stop", choice
            found.append(choice["message"]["content"] if chat else choice["text"])
    return found


@pytest.mark.parametrize(
    ("form", "chat"),
    [
        ("response_format", True),
        pytest.param("structured_outputs", False, marks=pytest.mark.nightly),
        pytest.param("guided_json", False, marks=pytest.mark.nightly),
    ],
)
def test_json_of_bounded_schema_ends_for_every_seed(cluster, form, chat):
    for text in texts(cluster, FORMS[form], chat=chat):
        found = json.loads(text)
        assert found.keys() == {"name", "kind", "sizes"}
        assert text == json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def test_choice_over_http_is_one_of_its_texts(cluster):
    choice = ["yes", "yes, (really)", 'a "quoted" | one', "no.", "né\n🙂"]
    for form in ({"structured_outputs": {"choice": choice}}, {"guided_choice": choice}):
        assert set(texts(cluster, form)) <= set(choice)


def test_regex_and_ebnf_over_http_are_matched(cluster):
    for text in texts(cluster, {"guided_regex": "[ab]{3}c"}):
        assert re.fullmatch("[ab]{3}c", text)
    ebnf = 'root ::= "x" ("y" | "z")'
    assert set(texts(cluster, {"structured_outputs": {"grammar": ebnf}})) <= {"xy", "xz"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_malformed_grammar_is_refused_by_its_own_field(cluster, fields, param):
    asked = {"prompt": "x", **fields}
    answer = httpx.post(f"{cluster.http_address}/v1/completions", json=asked, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
