"""Clients of the HTTP APIs, each with a task and pinned packages in a folder of its own.

    python -m tests.support.http_clients

installs all of them: of Python from a `requirements.txt`, of JavaScript from a `package.json`.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

_HERE = Path(__file__).parent
_INSTALLED = ROOT / ".pytest_cache" / "http_clients"


def _with(name: str) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in _HERE.glob(f"*/{name}")))


OF_NODE = _with("package.json")
CLIENTS = (*_with("requirements.txt"), *OF_NODE)


def packages_of(client: str) -> list[tuple[str, str]]:
    """Returns the packages that a client is installed from, and the exact version of each."""
    if client in OF_NODE:
        package = json.loads((_HERE / client / "package.json").read_text())
        return list(package["dependencies"].items())
    lines = (_HERE / client / "requirements.txt").read_text().split()
    return [(name.split("[")[0], version) for name, version in (one.split("==") for one in lines)]


def program_of(client: str) -> tuple[str, str]:
    """Returns the command line of a client's task, which takes `ADDRESS MODEL TASK`, then what the
    task needs. Installs the client once for each state of its packages."""
    return _with_node(client) if client in OF_NODE else _with_python(client)


def _with_python(client: str) -> tuple[str, str]:
    """In a virtual environment."""
    requirements = _HERE / client / "requirements.txt"
    constraints = ROOT / "constraints.txt"
    wanted = requirements.read_bytes() + constraints.read_bytes() + sys.version.encode()
    folder = _INSTALLED / client
    python = folder / "bin" / "python"
    if not _is_installed(folder, wanted):
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        # Of thousands of modules a task imports some, which Python compiles then.
        options = ("--disable-pip-version-check", "--no-compile")
        _run(*pip, *options, "-c", constraints, "-r", requirements)
        _note_installed(folder, wanted)
    return str(python), str(_HERE / client / "task.py")


def _with_node(client: str) -> tuple[str, str]:
    """In a folder with the packages, since a module imports only those beside it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node, "node is not installed; on Debian: apt-get install nodejs"
    assert npm, "npm is not installed; on Debian: apt-get install npm"
    folder = _INSTALLED / client
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "task.mjs"):
        shutil.copy(_HERE / client / name, folder)
    wanted = (folder / "package-lock.json").read_bytes()
    if not _is_installed(folder, wanted):
        _run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder)
        _note_installed(folder, wanted)
    return node, str(folder / "task.mjs")


def _is_installed(folder: Path, wanted: bytes) -> bool:
    state = folder / "state"
    return state.exists() and state.read_text() == hashlib.sha256(wanted).hexdigest()


def _note_installed(folder: Path, wanted: bytes) -> None:
    (folder / "state").write_text(hashlib.sha256(wanted).hexdigest())


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
