"""Page of reported symptoms, which is made of marks of tests."""

from pathlib import Path

import pytest

from docs.symptoms_reference import reported_symptoms, symptoms

MARK = """
@pytest.mark.symptom(
    "b#2, a#1",
    there="a <s>",
    here="b",
)
"""
TEST = "async def test_a():\n    pass\n"
BAD = {
    "a function": (MARK + "def make():\n    pass\n", "a test that always runs"),
    "a skipped test": (f"{MARK}@pytest.mark.skip\n{TEST}", "a test that always runs"),
    "a failing test": (f'{MARK}@pytest.mark.xfail(reason="x")\n{TEST}', "a test that always runs"),
    "no report": (MARK.replace('"b#2, a#1",', "") + TEST, "cannot be read"),
    "no behaviour": (MARK.replace('here="b",', "") + TEST, "cannot be read"),
    "another field": (MARK.replace("here", "heer") + TEST, "cannot be read"),
    "a computed text": (MARK.replace('"b",', "TEXT,") + TEST, "cannot be read"),
    "a report without a number": (MARK.replace("a#1", "a") + TEST, "the report"),
}


def written(folder: Path, *tests: str) -> Path:
    (folder / "tests").mkdir()
    for at, source in enumerate(tests):
        (folder / "tests" / f"test_{at}.py").write_text(source)
    return folder


def test_symptoms_are_rows_of_the_tests_that_show_them(tmp_path):
    other = MARK.replace("b#2, a#1", "a#10")
    root = written(tmp_path, MARK + TEST, f"{other}{other.replace('10', '9')}{TEST}", TEST)
    page = reported_symptoms(root)
    assert "| b#2, a#1 | a &lt;s> | b | `test_a` in `tests/test_0.py` |" in page
    places = [page.index(f"| {reports} |") for reports in ("a#9", "a#10", "b#2, a#1")]
    assert places == sorted(places)
    assert page.count("test_a") == 3


@pytest.mark.parametrize(("source", "problem"), BAD.values(), ids=BAD)
def test_symptom_is_refused_with_its_test(tmp_path, source, problem):
    with pytest.raises(ValueError, match=rf"tests/test_0.py::\w+ has .*{problem}"):
        reported_symptoms(written(tmp_path, source))


def test_each_collected_symptom_has_its_test():
    """Number of those that were collected; a test that goes takes its row along."""
    found = list(symptoms())
    reports = [report for symptom in found for report in symptom.reports.split(", ")]
    assert len({*reports}) == len(reports)
    assert len(found) == 50
