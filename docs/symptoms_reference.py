"""Reference of symptoms that users of other servers reported, made of the tests that show Baton's
behaviour: each has its symptoms as marks `symptom`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.tables import code, page, prose, table

_ROOT = Path(__file__).resolve().parents[1]
_MARK = "pytest.mark.symptom"
# Marks of tests that may not run, or not pass.
_UNSURE = ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail")

_INTRODUCTION = """Users of other servers reported these symptoms, most of them in 2025 and 2026.
Each row is a mark on the test that shows what Baton does, so that there is no row without one."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """Symptom that a test shows not to be Baton's.

    Attributes:
        reports: issues of other servers, such as "vllm#1".
        there: what their users saw.
        here: what Baton does.
        path: of the file of the test.
    """

    reports: str
    there: str
    here: str
    path: str
    test: str

    @property
    def order(self) -> tuple[str, int]:
        """Key by which symptoms are sorted: repository and number of the first report."""
        name, _, number = self.reports.partition(",")[0].partition("#")
        return name.lower(), int(number)


def reported_symptoms(root: Path = _ROOT) -> str:
    """Returns the page of the symptoms that tests in `root` are marked with. Raises `ValueError`
    for a mark that is no symptom's."""
    rows = [
        (s.reports, prose(s.there), prose(s.here), f"{code(s.test)} in {code(s.path)}")
        for s in sorted(symptoms(root), key=lambda symptom: symptom.order)
    ]
    head = ("report", "symptom there", "Baton", "test")
    return page("Reported symptoms", _INTRODUCTION, table(head, rows))


def symptoms(root: Path = _ROOT) -> Iterator[Symptom]:
    """Yields the symptoms of all tests in `root`, which are not imported. Raises `ValueError`."""
    for file in sorted((root / "tests").rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if _MARK not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _symptoms_of(node, file.relative_to(root).as_posix())


def _symptoms_of(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> Iterator[Symptom]:
    calls = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == _MARK]
    if not marks:
        return
    place = f"{path}::{node.name}"
    names = {ast.unparse(m.func if isinstance(m, ast.Call) else m) for m in node.decorator_list}
    if not node.name.startswith("test_") or names.intersection(_UNSURE):
        raise ValueError(f"{place} has a symptom; expected a test that always runs and passes")
    for mark in marks:
        try:
            (reports,) = map(ast.literal_eval, mark.args)
            named = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
            symptom = Symptom(reports, path=path, test=node.name, **named)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{place} has a symptom that cannot be read: {error}; expected "
                '`symptom("vllm#1", there="...", here="...")`'
            ) from error
        if not re.fullmatch(r"[\w.-]+#\d+(, [\w.-]+#\d+)*", symptom.reports):
            raise ValueError(f"{place} has the report {symptom.reports!r}; expected vllm#1, ...")
        yield symptom
