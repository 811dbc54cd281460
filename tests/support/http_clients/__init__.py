"""Clients of the HTTP APIs, each with a task and pinned requirements in a folder of its own.

    python -m tests.support.http_clients

installs all of them.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

_HERE = Path(__file__).parent
CLIENTS = tuple(sorted(path.parent.name for path in _HERE.glob("*/requirements.txt")))


def task_of(client: str) -> Path:
    """Returns the program that runs a client: `ADDRESS MODEL TASK`, then what the task needs."""
    return _HERE / client / "task.py"


def requirements_of(client: str) -> list[tuple[str, str]]:
    """Returns the packages that a client is installed from, and the exact version of each."""
    lines = (_HERE / client / "requirements.txt").read_text().split()
    return [(name.split("[")[0], version) for name, version in (one.split("==") for one in lines)]


def environment_of(client: str) -> Path:
    """Returns the Python of a virtual environment with the client, which is made once for each
    state of its requirements."""
    requirements = _HERE / client / "requirements.txt"
    constraints = ROOT / "constraints.txt"
    wanted = requirements.read_bytes() + constraints.read_bytes() + sys.version.encode()
    folder = ROOT / ".pytest_cache" / "http_clients" / client
    state, python = folder / "state", folder / "bin" / "python"
    digest = hashlib.sha256(wanted).hexdigest()
    if not state.exists() or state.read_text() != digest:
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        # Of thousands of modules a task imports some, which Python compiles then.
        options = ("--disable-pip-version-check", "--no-compile")
        _run(*pip, *options, "-c", constraints, "-r", requirements)
        state.write_text(digest)
    return python


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
