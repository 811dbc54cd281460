"""Deferred device of `make deferred`: in every process, or none runs; in both modes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.cli.local.fork_server import ForkServer
from tests.support.engine.deferred_stream import VARIABLE
from tests.support.repository import ROOT

SITE = ROOT / "tests" / "support" / "deferred_site"
_MODES = """
from baton.engine.executor.device_stream import stream_of
streams = [stream_of(None) for _ in range({})]
print(*(type(s).__name__ + ("-late" if s._dice is None else "-faster") for s in streams))
"""
LATE, FASTER = "DeferredStream-late", "DeferredStream-faster"


@pytest.fixture
def _is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("BATON_TEST_SEED", "0")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.usefixtures("_is_deferred")
def test_deferred_engines_of_a_process_draw_own_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("-P", "-c", _MODES.format(8))
    modes = done.stdout.split()
    assert done.returncode == 0, done.stderr
    assert len(modes) == 8
    for i in range(6):
        assert {LATE, FASTER} == set(modes[i : i + 3])
    monkeypatch.setenv("BATON_DEFERRED_FIRST", "5")
    assert run("-P", "-c", _MODES.format(2)).stdout.split() == modes[5:7]


@pytest.mark.usefixtures("_is_deferred")
def test_deferred_device_is_in_forked_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forked_modes.py").write_text(_MODES.format(1))
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    found = []
    server = ForkServer(["baton.engine.executor.device_stream"])
    try:
        for i in range(3):
            log = tmp_path / str(i)
            with log.open("wb") as file:
                assert server.start("forked_modes", [], dict(os.environ), file).wait(60.0) == 0
            found += [word for word in log.read_text().split() if word.startswith("Deferred")]
    finally:
        server.close()
    assert len(found) == 3
    assert set(found) == {LATE, FASTER}


def broken(folder: Path, content: str) -> Sequence[str]:
    package = folder / "tests" / "support" / "engine"
    package.mkdir(parents=True)
    for parent in [*list(package.parents)[:2], package]:
        (parent / "__init__.py").touch()
    (package / "deferred_stream.py").write_text(content)
    return (str(folder), str(SITE), str(ROOT))


@pytest.mark.parametrize("content", ["import missing", "def install(): raise RuntimeError('no')"])
def test_process_ends_if_deferred_device_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(broken(tmp_path, content)))
    done = run("-P", "-c", "print('it ran')")
    assert done.returncode == os.EX_SOFTWARE
    assert done.stdout == ""
    assert "cannot be installed" in done.stderr


def test_pytest_refuses_a_deferred_run_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run("-m", "pytest", "--collect-only", "-q", "tests/test_randomness.py")
    assert done.returncode != 0
    assert "deferred device is not installed" in done.stderr + done.stdout
