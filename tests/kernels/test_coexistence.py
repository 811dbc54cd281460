"""Our package `kernels` and transformers' probe for a third-party package of that name."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT


def test_the_third_party_distribution_called_kernels_is_not_installed() -> None:
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert "kernels" not in names, (
        "the PyPI distribution 'kernels' shares this environment; its package has the same import "
        "name as Baton's kernels/ and one of the two will be imported for the other: "
        "pip uninstall kernels"
    )


def test_the_package_imports_nothing() -> None:
    assert (ROOT / "kernels/__init__.py").read_text() == ""


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "version", [pytest.param("0.9", marks=_SLOW), "0.18.2", pytest.param("1.0", marks=_SLOW)]
)
def test_transformers_imports_whatever_our_version_is(tmp_path: Path, version: str) -> None:
    """Metadata of ours with that version comes first on the path, as a wheel would leave it."""
    folder = tmp_path / f"baton_serve-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: baton-serve\nVersion: {version}\n"
    )
    (folder / "top_level.txt").write_text("baton\nkernels\n")
    (folder / "RECORD").write_text("kernels/__init__.py,,\n")
    program = (
        "import importlib.metadata\n"
        f"assert importlib.metadata.version('baton-serve') == '{version}'\n"
        "from baton.engine.models.hf import AutoModelForCausalLM\n"
        "from transformers import LlamaForCausalLM\n"
        "import kernels\n"
        f"assert kernels.__file__.startswith({str(ROOT)!r})\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
