"""Another version of Baton, installed beside this one: a wheel of the same sources."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support.repository import ROOT

VERSION = "99.0"


def install(folder: Path) -> Path:
    """Builds it in `folder`; returns where its packages are."""
    sources, packages = folder / "sources", folder / "packages"
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)
    for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, sources / name, ignore=unwanted)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    own = f'version = "{project["project"]["version"]}"'
    assert text.count(own) == 1
    (sources / "pyproject.toml").write_text(text.replace(own, f'version = "{VERSION}"'))
    python = (sys.executable, "-m")
    _run(*python, "build", "--wheel", "--outdir", folder, sources)
    (wheel,) = folder.glob("*.whl")
    _run(*python, "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel)
    return packages


def environment_of(packages: Path) -> dict[str, str]:
    """Variables with which a process is of that version."""
    behind = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(packages), behind)))}


def version_in(packages: Path) -> str:
    """Returns the output of `baton --version` there."""
    command = (sys.executable, "-P", "-m", "baton", "--version")
    return _run(*command, env={**os.environ, **environment_of(packages)}).strip()


def _run(*command: object, env: dict[str, str] | None = None) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
