"""Commands that install what an installation of Baton lacks."""

import json
from importlib.metadata import distribution
from pathlib import Path

import pytest

from baton.installation import command_for, install_command

WHEEL = "baton_serve-0.1.0-py3-none-any.whl"


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """An environment without a pip of its own, as an image has it."""
    return str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("kind", "installed", "command"),
    [
        ({"dir_info": {"editable": True}}, "checkout", "pip install -e '{0}[vision]'"),
        ({"dir_info": {}}, "checkout", "pip install '{0}[vision]'"),
        ({"archive_info": {}}, WHEEL, "pip install '{0}[vision]'"),
        ({"archive_info": {}}, "lost.whl", "pip install 'baton-serve[vision]'"),
    ],
    ids=["editable", "folder", "wheel", "lost wheel"],
)
def test_command_fits_the_origin_of_the_installation(
    tmp_path: Path, prefix: str, kind: dict[str, object], installed: str, command: str
) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / WHEEL).touch()
    path = tmp_path / installed
    origin = {"url": path.as_uri(), **kind}
    assert command_for(origin, "vision", prefix) == command.format(path)


def test_command_names_the_package_of_an_index(prefix: str) -> None:
    assert command_for({}, "http", prefix) == "pip install 'baton-serve[http]'"
    assert command_for({}, prefix=prefix) == "pip install baton-serve"


def test_command_of_this_installation_reads_its_metadata() -> None:
    origin = json.loads(distribution("baton-serve").read_text("direct_url.json") or "{}")
    assert install_command("http") == command_for(origin, "http")


def test_command_runs_the_pip_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "bin" / "pip"
    own.parent.mkdir()
    own.touch(mode=0o755)
    assert command_for({}, prefix=str(tmp_path)) == f"{own} install baton-serve"
    monkeypatch.setenv("PATH", str(own.parent))
    assert command_for({}, prefix=str(tmp_path)) == "pip install baton-serve"
