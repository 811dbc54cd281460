"""What the README says to OpenAI's clients, run as it stands but for the address."""

import re
import shutil
import subprocess
import sys

import pytest

from baton.cli.local_cluster import LocalCluster
from tests.support.repository import ROOT

pytestmark = pytest.mark.e2e

README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    """The code of one language in the section about OpenAI's clients."""
    section = README.read_text().split("\n## From OpenAI's clients\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def run(cluster: LocalCluster, *command: str) -> str:
    address = cluster.http_address.removeprefix("http://")
    done = subprocess.run(
        [word.replace("127.0.0.1:8000", address) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
def test_the_line_of_curl(cluster):
    assert shutil.which("curl"), "curl is not installed; on Debian: apt-get install curl"
    (line,) = blocks("")
    assert '"text":"self):\\n        ' in run(cluster, "bash", "-c", line)


def test_the_program_in_python(cluster):
    (program,) = blocks("python")
    assert len(run(cluster, sys.executable, "-c", program)) > 20
