"""The Dockerfile as tests read it, and its steps in a folder in place of a container.

Knows as much of Dockerfiles as ours uses: stages, continued lines, ARG, ENV, and COPY of files and
folders, without variables but in RUN.
"""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.repository import ROOT

DOCKERFILE = ROOT / "Dockerfile"
# What steps name of a container's files, and the tests have elsewhere.
_IN_SCRATCH = re.compile(r"(?<![\w.$}/])/(?=(?:src|image|dist|opt|cache)\b)")


@dataclass(frozen=True)
class Stage:
    """One FROM with what follows it: pairs of an instruction and what stands behind it."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == keyword]


def read() -> tuple[dict[str, str], dict[str, Stage]]:
    """The ARGs before the first stage, and all stages by name."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        keyword, rest = line.split(maxsplit=1)
        if keyword == "FROM":
            base, as_, name = rest.split()
            assert as_ == "AS"
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            assert keyword == "ARG"
            arguments.update([rest.split("=", 1)])
        else:
            stage.instructions.append((keyword, rest))
    return arguments, stages


def lineage(name: str) -> list[Stage]:
    """A stage and those that it is built on, those first."""
    _, stages = read()
    line = [stages[name]]
    while line[0].base in stages:
        line.insert(0, stages[line[0].base])
    return line


def environment(name: str) -> dict[str, str]:
    """Returns what ENV sets, in a stage or those under it."""
    said: dict[str, str] = {}
    for stage in lineage(name):
        for line in stage.all("ENV"):
            said.update(pair.split("=", 1) for pair in shlex.split(line))
    return said


def context(folder: Path) -> None:
    """Copies what .dockerignore lets through. Its form here: everything, less exceptions."""
    first, *others = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert first == "*"
    kept = [line[1:] for line in others if line.startswith("!")]
    left = [line.removeprefix("**/") for line in others if not line.startswith("!")]

    def ignored(_: str, names: list[str]) -> list[str]:
        return [n for n in names for pattern in left if fnmatch.fnmatch(n, pattern)]

    for name in kept:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy2(source, target)


def build(name: str, scratch: Path, arguments: Mapping[str, str] | None = None) -> None:
    """Runs the steps of a stage and of those under it; `/opt/baton` is `scratch / "opt/baton"`.

    What stages under another name have left is expected to be there.
    """
    for stage in lineage(name):
        known = dict(arguments or {})
        for keyword, rest in stage.instructions:
            if keyword == "ARG":
                key, _, default = rest.partition("=")
                known.setdefault(key, default)
            elif keyword == "COPY" and not rest.startswith("--from"):
                _copy(*rest.split(), scratch)
            elif keyword == "RUN":
                _run(rest, scratch, known)


def _copy(source: str, target: str, scratch: Path) -> None:
    there = scratch / target.lstrip("/")
    if there.exists():
        return
    if source == ".":
        context(there)
    else:
        shutil.copytree(ROOT / source, there)


def _run(step: str, scratch: Path, variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", _IN_SCRATCH.sub(f"{scratch}/", step)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
