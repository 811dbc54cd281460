"""Language check of names, docstrings, messages and commits: `python docs/check_language.py`.

Names are checked against the glossary, those of the public surface too (settings, metrics, labels,
spans, attributes, terms of placements, values of the chart), as the tables of its reference pages
list them. Docstrings are checked by their first word, strings and comments for words that name no
actor, names of tests by their unit and length, and commits by their subject. Generated stubs are
not read.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "*_worker baton bench docs helm kernels kvtransfer protos router tests"
GENERATED = (ROOT / "baton/v1", ROOT / "baton/envoy")
HAS_BAD_WORDS = (Path(__file__), ROOT / "tests/docs/test_language.py")
"""Files that contain the words on purpose."""
PUBLIC = ("docs/reference/**/*.md", "docs/telemetry.md", "docs/glossary.md", "helm/baton/README.md")
"""Pages whose tables list public names."""
PUBLIC_PLAIN = {"bucket", "budget"}
"""Private words that are part of a public one, such as the token budget of a step."""
NAMES = re.compile(r"(?:`[^`]+`(?:,\s*)?)+")
"""Cell of a table that has names alone."""
NOT_FIRST = {"What", "Who", "Whose", "How", "Where", "Which", "Of", "Whether", "Why", "When"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTION
NO_ACTOR = re.compile(r"\b(anew|anybody|everybody|nobody|of late|somebody|whoever|whom)\b", re.I)
"""Words that hide the actor, or for which the field has another."""
NO_UNIT = re.compile("test_(how|it|of|what|where|whether|which|who|whose)_")
"""Beginnings of test names that do not name the unit."""
MAX_TEST_NAME = 60
PRIVATE_FILE = re.compile(
    "about|bucket|calling_off|edges|extent|extras|gate|keeping|loan|mirror|notices|pace|patience|"
    "pending|pieces|pins|pressure|prospects|pulling|recent|roster|saga|seats|setback|shapes|targets|"
    "turns?|work"
)
PLAIN = {"bucket", "budget", "circuit", "gate", "recent", "targets", "turns", "way"}
"""Words that are private as the name of a class alone."""

SUBJECT = re.compile(r"(?=.{1,65}$)[a-z][\w./-]*: \S.*")
UNCHECKED = "0ee588928726"
"""The last commit that is older than the check of subjects."""


def private_names(glossary: str) -> set[str]:
    """The last column of the glossary's second table."""
    rows = re.findall(r"^\|[^|\n]+\|[^|\n]+\|([^|\n]*)\|$", glossary, re.MULTILINE)
    return {name.strip() for row in rows for name in row.split(",")} - {"", "not", "---"}


def defined_name(node: ast.AST) -> str:
    """Returns the name of the function, parameter, attribute or variable that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
            return name
    return ""


def file_findings(path: str) -> Iterator[str]:
    """Yields one sentence if the name of a file is a private word."""
    if PRIVATE_FILE.fullmatch(Path(path).stem.removeprefix("test_")):
        yield f"{path}: the file's name is a private word; use one of docs/glossary.md"


def comment_findings(path: str, source: str) -> Iterator[str]:
    """Yields one sentence for each comment that names no actor."""
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT and (found := NO_ACTOR.search(token.string)):
            yield f"{path}:{token.start[0]}: {found[0]!r} in a comment; name the actor"


def findings(path: str, source: str, private: set[str]) -> Iterator[str]:
    """Yields one sentence for each violation in a file."""
    yield from file_findings(path)
    yield from comment_findings(path, source)
    words = {name.lower().replace(" ", "_") for name in private} - PLAIN
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = NO_ACTOR.search(node.value)
            if found:
                yield f"{path}:{line}: {found[0]!r} in a string; name the actor"
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in private:
            yield f"{path}:{line}: class {node.name}; docs/glossary.md has the word for it"
        name = defined_name(node)
        for word in words if name else ():
            if f"_{word}_" in f"_{name.lower()}_":
                yield f"{path}:{line}: {word!r} in {name}; docs/glossary.md has the word for it"
        if isinstance(node, DOCUMENTED):
            first = (ast.get_docstring(node) or "A").split()[0].strip("`,.:")
            if first in NOT_FIRST and not (isinstance(node, FUNCTION) and first == "Whether"):
                yield f"{path}:{line}: docstring begins with {first!r}; begin with a noun or a verb"


def public_findings(path: str, page: str, private: set[str]) -> Iterator[str]:
    """Yields one sentence for each private word in the names that a page's tables list."""
    words = {name.lower().replace(" ", "_") for name in private} - PUBLIC_PLAIN
    for number, row in enumerate(page.splitlines(), 1):
        cells = row.strip("|").split("|") if row.startswith("|") else []
        for cell in (cell for cell in map(str.strip, cells) if NAMES.fullmatch(cell)):
            for name in re.findall("`([^`]+)`", cell):
                parts = "_".join(["", *re.findall(r"[a-z0-9]+", name.lower()), ""])
                for word in sorted(word for word in words if f"_{word}_" in parts):
                    reason = f"{word!r} in {name}; docs/glossary.md has the word for it"
                    yield f"{path}:{number}: {reason}"


def name_findings(path: str, source: str) -> Iterator[str]:
    """Yields one sentence for each violation in the name of a test."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, FUNCTION) and node.name.startswith("test_")):
            continue
        if (length := len(node.name)) > MAX_TEST_NAME:
            yield (
                f"{path}:{node.lineno}: {node.name} has {length} characters; "
                f"expected at most {MAX_TEST_NAME}"
            )
        if found := NO_UNIT.match(node.name):
            yield f"{path}:{node.lineno}: {node.name} begins with {found[1]!r}; begin with the unit"


def subjects() -> list[str]:
    """Returns the newest subjects since the last release; none where the history is missing."""
    if not (ROOT / ".git").exists():
        return []
    command = ["git", "log", "--no-merges", "--max-count=50", "--format=%s", "HEAD", "--not"]
    command += [UNCHECKED, "--tags"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # noqa: S603 - constant
    return log.stdout.splitlines()


def wrong_subjects(subjects: Iterable[str]) -> Iterator[str]:
    """Yields one sentence for each subject in another form."""
    for subject in subjects:
        if not SUBJECT.fullmatch(subject):
            yield f"commit {subject!r}; expected `area: imperative summary`, 65 characters at most"


def main() -> int:
    private = private_names((ROOT / "docs/glossary.md").read_text())
    folders = [folder for name in FOLDERS.split() for folder in ROOT.glob(name)]
    found = [
        finding
        for path in sorted(path for folder in folders for path in folder.rglob("*.py"))
        if not {*GENERATED, *HAS_BAD_WORDS} & {path, *path.parents}
        for finding in findings(str(path.relative_to(ROOT)), path.read_text(), private)
    ] + [
        finding
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for finding in name_findings(str(path.relative_to(ROOT)), path.read_text())
    ]
    found += [
        finding
        for path in sorted(path for pages in PUBLIC for path in ROOT.glob(pages))
        for finding in public_findings(str(path.relative_to(ROOT)), path.read_text(), private)
    ]
    found += wrong_subjects(subjects())
    print("\n".join(found) or f"Language: {len(private)} private names, none in use.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
