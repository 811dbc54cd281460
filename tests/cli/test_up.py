import json
import re
import signal
import socket
import urllib.request

import psutil
import pytest

from baton.cli.ports import is_free
from tests.cli.conftest import baton, gone, interrupt, running, started
from tests.support.readme import OUTPUTS, shows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

ARGUMENTS = ["up", "--port", "0", "--admin-port", "0", "--device", "cpu"]
ARGUMENTS += ["--num-blocks", "64"]


def named(processes: list[psutil.Process], command: str) -> psutil.Process:
    """Waits for the process that runs a command: one that was just forked still bears the command
    line of the process that forked it."""

    def found() -> list[psutil.Process]:
        return [p for p in processes if command in " ".join(p.cmdline())]

    wait_until(found, what=command, ignoring=(psutil.NoSuchProcess,))
    (process,) = found()
    return process


def test_up_serves_until_sigterm_and_leaves_no_process() -> None:
    with running(*ARGUMENTS) as up:
        last = "Ctrl-C stops the cluster.\n"
        lines = "".join(iter(up.stdout.readline, last)) + last
        assert shows(OUTPUTS[".venv/bin/baton up"], lines)
        (address,) = re.findall(r"ready after .* at (\S+)\. ", lines)
        assert f"baton generate --address {address}" in lines
        (admin,) = re.findall(r"baton top --admin (\S+)", lines)
        (http,) = re.findall(r"In a browser: (\S+); ", lines)
        with urllib.request.urlopen(f"{http}/v1/models", timeout=10) as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
        processes = started(up, 5)
        listed = baton("workers", "--json", "--admin", admin).stdout.splitlines()
        assert {json.loads(line)["state"] for line in listed} == {"ready"}
        next(p for p in processes if p.name().endswith("-server")).kill()
        assert "Redis died" in up.stdout.readline()
        stdout, stderr = interrupt(up, signal.SIGTERM)
        assert stdout.endswith("stopping; Ctrl-C again kills\n")
        assert (up.returncode, stderr) == (0, "")
        assert gone(processes)


@pytest.mark.slow
def test_up_ends_with_the_log_of_a_child_that_dies() -> None:
    with running(*ARGUMENTS) as up:
        processes = started(up, 5)
        named(processes, "decode-worker").kill()
        _, stderr = up.communicate(timeout=30)
        assert up.returncode == 1
        assert stderr.startswith("baton: decode-0 was killed by SIGKILL; its log")
        assert gone(processes)


@pytest.mark.slow
def test_up_quotes_the_log_when_the_model_is_missing() -> None:
    ended = baton(*ARGUMENTS, "--model", "no/such/folder")
    assert ended.returncode == 1
    assert "ended with code 1; its log ends:" in ended.stderr
    assert "no/such/folder" in ended.stderr


@pytest.mark.slow
def test_up_leaves_no_children_when_killed() -> None:
    with running(*ARGUMENTS) as up:
        processes = started(up, 5)
        up.kill()
        wait_until(lambda: gone(processes))


def test_up_serves_http_on_a_free_port_unless_disabled() -> None:
    def command_of_router(*flags: str) -> str:
        return next(
            line
            for line in baton(*ARGUMENTS, "--dry-run", *flags).stdout.splitlines()
            if "-m baton router" in line
        )

    assert "--http-port 8123" in command_of_router("--http-port", "8123")
    assert "--http-port" not in command_of_router("--no-http")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert is_free(port) is False
    assert is_free(port)
    (unasked,) = re.findall(r"--http-port (\d+)", command_of_router())
    assert int(unasked) > 0
