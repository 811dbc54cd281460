"""The language check finds what it is to find."""

import pytest

from docs.check_language import (
    findings,
    name_findings,
    private_names,
    public_findings,
    wrong_subjects,
)

GLOSSARY = """
| use | meaning | not |
|---|---|---|
| admission controller | admits | Gate, Turns |
| chunk | tokens of a step | |
"""


def test_private_names_are_the_last_column_of_the_glossary():
    assert private_names(GLOSSARY) == {"Gate", "Turns"}


@pytest.mark.parametrize(
    ("path", "source", "finding"),
    [
        ("router/queue.py", '"""What waits."""', "begins with 'What'"),
        ("router/a.py", 'class A:\n    """Of one router."""', "begins with 'Of'"),
        ("router/a.py", "class _Gate: ...", "class _Gate"),
        ("router/a.py", "def open_door(): ...", "'door' in open_door"),
        ("router/a.py", "self._door = gate = 1", "'door' in _door"),
        ("router/turns.py", '"""Admission queue."""', "private word"),
        ("router/a.py", 'def f():\n    """How it is."""', "begins with 'How'"),
        ("router/a.py", 'raise ValueError("nobody is there")', "'nobody' in a string"),
        ("router/a.py", 'label = "nobody"', "'nobody' in a string"),
        ("router/a.py", "a = 1  # for whom it is", "'whom' in a comment"),
        ("router/a.py", "# Computed anew.", "'anew' in a comment"),
        ("tests/test_turns.py", "", "private word"),
        ("tests/support/shapes.py", "", "private word"),
        ("tests/a.py", '"""What waits."""', "begins with 'What'"),
        ("tests/a.py", "asking = 1", "'asking' in asking"),
    ],
)
def test_findings_name_file_and_reason(path, source, finding):
    (found,) = findings(path, source, {"Asking", "Door", "Gate"})
    assert found.startswith(path)
    assert finding in found


def test_findings_accept_nouns():
    source = '"""Admission queue."""\nclass Queue:\n    """Queue of requests."""'
    assert not list(findings("router/admission_queue.py", source, {"Gate"}))


@pytest.mark.parametrize(
    "name", ["baton_turns_total", "--max-turns", "baton.turns.kind", "router.turnsFile: turns"]
)
def test_public_findings_name_row_and_word(name):
    page = f"| name | labels | meaning |\n|---|---|---|\n| `{name}` | `a`, `b` | of `turns` |\n"
    (found,) = public_findings("docs/a.md", page, {"Turns", "Door"})
    assert found.startswith(f"docs/a.md:3: 'turns' in {name}")


def test_public_findings_read_labels_and_no_sentences():
    page = "| `baton_steps_total` | counter | `way`, `role` | by the way, `way` |\n"
    assert len(list(public_findings("docs/a.md", page, {"Way"}))) == 1


def test_findings_name_line_of_comment():
    (found,) = findings("tests/a.py", "a = '# fine'\n\nb = a  # whoever asks\n", set())
    assert found.startswith("tests/a.py:3: ")


@pytest.mark.parametrize(
    ("subject", "is_wrong"),
    [
        ("router: list workers by role", False),
        (f"router: {'a' * 57}", False),
        (f"router: {'a' * 58}", True),
        ("Workers are listed by role", True),
        ("router:list workers by role", True),
        ("Router: list workers by role", True),
        ("router, client: list workers by role", True),
    ],
)
def test_subjects_are_an_area_and_a_summary(subject, is_wrong):
    assert bool([*wrong_subjects([subject])]) is is_wrong


@pytest.mark.parametrize(
    ("name", "finding"),
    [("what_is_told", "begins with 'what'"), ("router_" + "x" * 49, "has 61 characters")],
)
def test_name_findings_name_test_and_reason(name, finding):
    (found,) = name_findings("tests/a.py", f"async def test_{name}(): ...")
    assert found.startswith(f"tests/a.py:1: test_{name} ")
    assert finding in found


def test_name_findings_accept_units():
    assert not list(name_findings("tests/a.py", f"def test_item_{'x' * 50}(): ..."))
