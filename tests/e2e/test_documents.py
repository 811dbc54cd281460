"""Commands and programs of the README and the other pages, run as they stand but for addresses."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from baton.cli.local.demo import PROMPTS
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import HOST, free_port
from tests.support.documents import OUTPUTS, PROGRAMS, shows
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

RUN_ELSEWHERE = {"make demo", "baton demo", ".venv/bin/baton up"}  # tests/cli: test_demo, test_up
LATE = "baton workers"  # the router learns of cached blocks by events
NO_CLUSTER = "docs/guides/troubleshooting.md"
PRINTED = ("def get(self, key):\n", "self):\n")


def run(cluster: LocalCluster, admin_address: str, *command: str) -> str:
    """Returns what a command prints, on both streams. `$PROMPT` is the first one of the demo."""
    addresses = {
        "127.0.0.1:50051": cluster.address,
        "127.0.0.1:50053": admin_address,
        "127.0.0.1:8000": cluster.http_address.removeprefix("http://"),
        ".venv/bin/baton": f"{sys.executable} -m baton",
    }
    words = list(command)
    for written, actual in addresses.items():
        words = [word.replace(written, actual) for word in words]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATON_ADDRESS": cluster.address,
            "BATON_ADMIN_ADDRESS": admin_address,
            "COLUMNS": "200",
            "PROMPT": str(PROMPTS[0][2]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == (admin_address != cluster.admin_address), done.stdout
    return done.stdout


@pytest.mark.parametrize("page", OUTPUTS)
def test_commands_print_what_the_page_shows(cluster: LocalCluster, page: str) -> None:
    admin_address = cluster.admin_address
    if page == NO_CLUSTER:
        admin_address = f"{HOST}:{free_port(set())}"
    else:
        run(cluster, admin_address, "baton", "flush")
    for command, output in OUTPUTS[page]:
        if command in RUN_ELSEWHERE:
            continue
        assert "baton " in command, "tests run no other commands of pages"
        execute = partial(run, cluster, admin_address, "bash", "-c", command)
        if command == LATE:
            wait_until(lambda shown=output, again=execute: shows(shown, again()), what=command)
        else:
            printed = execute()
            assert shows(output, printed), printed


@pytest.mark.parametrize(("code", "printed"), list(zip(PROGRAMS, PRINTED, strict=True)))
def test_program_of_the_readme_runs(cluster: LocalCluster, code: str, printed: str) -> None:
    assert printed in run(cluster, cluster.admin_address, sys.executable, "-c", code)
