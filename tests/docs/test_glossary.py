"""Meanings of shown terms: complete, and the same in the code and the glossary."""

import re
from pathlib import Path

import pytest

from baton.cli.top.tables import REQUEST_COLUMNS, WORKER_COLUMNS
from baton.serving.telemetry.placement_terms import LOAD, TERMS, TIMINGS
from baton.v1 import inference_pb2 as pb
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.policy import POLICY_NAMES, alone_policy_named, policy_named

GLOSSARY = (Path(__file__).resolve().parents[2] / "docs/glossary.md").read_text()
# Columns whose titles are what they show.
PLAIN = {"worker", "role", "state", "request", "age", "phase", "prompt", "output", "first token"}
PLAIN |= {"prefill", "decode"}


@pytest.mark.parametrize(
    ("section", "meanings"),
    [
        ("Terms of a placement", TERMS),
        ("Durations of a request", TIMINGS),
        ("Columns of `baton top`", LOAD),
    ],
    ids=["placement", "timings", "top"],
)
def test_glossary_has_the_meanings_of_the_code(section, meanings):
    text = GLOSSARY.split(f"## {section}\n")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `(.+)` \| (.+) \|$", text, re.MULTILINE)) == meanings


def test_terms_have_each_cost_of_each_policy():
    names = set()
    for policy in POLICY_NAMES:
        for role in ("prefill", "decode"):
            candidate = Candidate("w", role, b"", num_source_tokens=10_000)
            names |= policy_named(policy)(candidate, 10_000).keys()
            if role == "decode" and (alone := alone_policy_named(policy)) is not None:
                names |= alone(candidate, 10_000).keys()
    assert "fetch" in names
    assert names <= TERMS.keys()


def test_timings_have_each_field_of_the_message():
    assert {field.name for field in pb.Timings.DESCRIPTOR.fields} == TIMINGS.keys()


def test_load_has_each_column_of_top():
    assert {*WORKER_COLUMNS, *REQUEST_COLUMNS} - PLAIN <= LOAD.keys()
