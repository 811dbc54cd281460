"""Paths and packages that the architecture page, the packages and CONTRIBUTING.md name exist."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.repository import ROOT

# Where paths begin, apart from the package that names them.
FOLDERS = ("router", "prefill_worker", "decode_worker", "kvtransfer", "kernels")
BASES = (
    *("", "protos", "baton", "baton/cli", "baton/engine", "baton/serving/telemetry"),
    *FOLDERS,
    *(f"{folder}/baton_{folder}" for folder in FOLDERS),
)
PACKAGES = [
    path
    for folder in ("baton", *FOLDERS)
    for path in (ROOT / folder).rglob("__init__.py")
    if path.stat().st_size
]
GENERIC = {"service.py", "generate.py", "compile.py", "__init__.py"}


def missing(text: str, *folders: Path) -> set[str]:
    """Returns the paths of files in `text` that are in none of the folders or `BASES`."""
    paths = set(re.findall(r"`([\w/]+\.(?:py|proto|md|json))`", text)) - GENERIC
    places = [*folders, *(ROOT / base for base in BASES)]
    return {path for path in paths if not any((place / path).exists() for place in places)}


def test_paths_of_the_architecture_page_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(page.splitlines()) < 100, "it is a map of one page"
    assert not missing(page)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_paths_of_the_docstring_of_a_package_exist(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert not missing(text, path.parent)


def test_paths_of_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert not missing(text, ROOT)
    folders = re.findall(r"`((?:baton|bench|docs|kvtransfer|router|tests)/[\w/]+)`", text)
    assert len(folders) > 3
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_request_enters_twelve_packages_once_each() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    walk = page.split("## The life of a request\n")[1].split("\n## ")[0]
    packages = re.findall(r"^\d+\. `([a-z_/]+)` ", walk, re.MULTILINE)
    assert 8 <= len(packages) <= 12
    assert all(any((ROOT / b / p / "__init__.py").exists() for b in BASES) for p in packages)
    elsewhere = [package for package in packages if not package.startswith("baton_router/")]
    assert len(set(elsewhere)) == len(elsewhere)
