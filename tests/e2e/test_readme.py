"""Commands and programs of the README, run as they stand but for addresses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.local_cluster import LocalCluster
from tests.support.readme import OUTPUTS, PROGRAMS, shows
from tests.support.repository import ROOT

pytestmark = pytest.mark.e2e

RUN_ELSEWHERE = {"make demo", ".venv/bin/baton up"}  # by tests/cli/test_demo.py and test_up.py
# buf is a package of the extra `dev`.
MARKS = {"buf": pytest.mark.slow}
PRINTED = ("def get(self, key):\n", "self):\n", '"finished"')


def run(cluster: LocalCluster, *command: str) -> str:
    addresses = {
        "127.0.0.1:50051": cluster.address,
        "127.0.0.1:8000": cluster.http_address.removeprefix("http://"),
        ".venv/bin/baton": f"{sys.executable} -m baton",
    }
    words = list(command)
    for written, actual in addresses.items():
        words = [word.replace(written, actual) for word in words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PATH": path, "BATON_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", sorted(OUTPUTS.keys() - RUN_ELSEWHERE))
def test_command_prints_what_the_readme_shows(cluster, command):
    assert shows(OUTPUTS[command], run(cluster, "bash", "-c", command))


@pytest.mark.parametrize(
    ("language", "code", "printed"),
    [
        pytest.param(*program, printed, marks=MARKS.get(program[1].split()[0], ()))
        for program, printed in zip(PROGRAMS, PRINTED, strict=True)
    ],
)
def test_program_of_the_readme_runs(cluster, language, code, printed):
    interpreter = sys.executable if language == "python" else "bash"
    assert printed in run(cluster, interpreter, "-c", code)
