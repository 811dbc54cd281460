"""The router's environment without what it does not import (`helm/image/strip.py`)."""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from baton.models import read_json
from baton.models.images.families import VISION_TOWERS
from tests.support.image_families import NAMES, outcomes_in, save_families
from tests.support.repository import ROOT

STEPS = ROOT / "helm" / "image"


def link(source: str, target: str) -> None:
    """Copies a file without its content where both are on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def top_level_names() -> Iterator[str]:
    """Yields the files and folders in `site-packages` of what the router's lock names."""
    lock = (STEPS / "router.txt").read_text()
    for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE):
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:  # of another Python
            continue
        yield from (file.parts[0] for file in files if file.parts[0] != "..")


@pytest.fixture(scope="module")
def stripped_root(tmp_path_factory) -> Path:
    """Virtual environment with the router's dependencies, stripped, and with Baton."""
    root = tmp_path_factory.mktemp("router") / "root"
    venv.create(root, symlinks=True)
    (packages,) = root.glob("lib/python*/site-packages")
    installed = Path(distribution("transformers").locate_file(""))
    for name in set(top_level_names()):
        if (installed / name).is_dir():
            shutil.copytree(installed / name, packages / name, copy_function=link)
        else:
            link(str(installed / name), str(packages / name))
    subprocess.run([sys.executable, STEPS / "strip.py", root], check=True, timeout=60)
    for package in (ROOT / "baton", ROOT / "router" / "baton_router"):
        (packages / package.name).symlink_to(package)
    return root


def test_stripped_environment_has_no_sources_of_extensions(stripped_root):
    left = {path.suffix for path in stripped_root.rglob("*") if path.is_file()}
    assert not left & {".a", ".h", ".pxd", ".pyi", ".pyx"}
    assert {".py", ".so"} <= left


def test_stripped_environment_reads_image_of_each_family(stripped_root, tmp_path):
    save_families(tmp_path)
    configs = [read_json(tmp_path / name / "config.json") for name in NAMES]
    covered = {(config["model_type"], config["vision_config"]["model_type"]) for config in configs}
    assert covered == {(kind, tower) for kind, all_ in VISION_TOWERS.items() for tower in all_}
    outcomes = outcomes_in(stripped_root, tmp_path)
    assert outcomes.keys() == {*NAMES, "shapes"}
    assert all(isinstance(outcome, int) and outcome > 0 for outcome in outcomes.values()), outcomes


def test_stripped_environment_has_no_code_of_models(stripped_root):
    (models,) = stripped_root.glob("lib/python*/site-packages/transformers/models")
    assert [file.parent.name for file in models.rglob("modeling_*.py")] == ["auto"]
