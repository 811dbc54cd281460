"""Paths and packages of the architecture page exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where the page's paths begin.
FOLDERS = ("router", "prefill_worker", "decode_worker", "kvtransfer", "kernels")
BASES = (
    *("", "protos", "baton", "baton/cli", "baton/engine", "baton/serving/telemetry"),
    *FOLDERS,
    *(f"{folder}/baton_{folder}" for folder in FOLDERS),
)


def test_paths_of_the_architecture_page_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    paths = set(re.findall(r"`([a-z_/]+\.py)`", page))
    assert len(paths) > 40
    generic = {"service.py", "wire.py", "generate.py", "compile.py"}
    missing = {p for p in paths - generic if not any((ROOT / b / p).exists() for b in BASES)}
    assert not missing


def test_request_enters_twelve_packages_once_each():
    page = (ROOT / "docs/architecture.md").read_text()
    walk = page.split("## The life of a request\n")[1].split("\n## ")[0]
    packages = re.findall(r"^\d+\. `([a-z_/]+)` ", walk, re.MULTILINE)
    assert 8 <= len(packages) <= 12
    assert all(any((ROOT / b / p / "__init__.py").exists() for b in BASES) for p in packages)
    elsewhere = [package for package in packages if not package.startswith("baton_router/")]
    assert len(set(elsewhere)) == len(elsewhere)
