"""Installation by `make demo`: what it says first, and where torch comes from."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT

INDEX = "https://index.example/cpu"


def planned(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines of the recipes of `make demo` where nothing is installed."""
    command = ["make", "--dry-run", "demo", f"VENV={folder}/venv", *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("index", "size"), [(INDEX, "0.3 GB to download"), ("", "2.8 GB to download")]
)
def test_demo_says_what_it_downloads_before_it_does(tmp_path: Path, index: str, size: str) -> None:
    lines = planned(tmp_path, f"TORCH_INDEX={index}")
    (said,) = [at for at, line in enumerate(lines) if size in line]
    installs = [at for at, line in enumerate(lines) if "pip install" in line]
    assert said < installs[0]
    assert not [line for line in lines if "--quiet" in line]


def test_demo_takes_torch_alone_from_the_index_for_cpus(tmp_path: Path) -> None:
    lines = planned(tmp_path, f"TORCH_INDEX={INDEX}")
    (torch,) = [line for line in lines if f"--extra-index-url {INDEX} " in line]
    assert re.search(r"-c constraints\.txt --no-deps .* torch$", torch)
    assert INDEX not in "".join(
        line for line in planned(tmp_path, "TORCH_INDEX=") if "pip install" in line
    )
