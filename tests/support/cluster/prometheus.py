"""A real Prometheus that scrapes a cluster, on loopback, for the length of a test."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from baton.cli.local.ports import HOST, free_port
from baton.cluster.parent_death import dying_with_parent
from tests.support.repository import ROOT

RULES = ROOT / "helm" / "baton" / "rules" / "baton.yaml"
_START_SECONDS = 30.0


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    assert found, f"{name} is not installed; on Debian: apt-get install prometheus"
    return found


class Prometheus:
    """Client of a Prometheus server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now, each with its `metric` and `value`."""
        result: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return result

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Those of the last hour."""
        now = time.time()
        found: list[dict[str, Any]] = self._get(
            "query_exemplars", query=expression, start=str(now - 3600), end=str(now)
        )
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        active: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return active

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error


@contextmanager
def prometheus(folder: Path, router: str) -> Iterator[Prometheus]:
    """Runs a Prometheus that every second scrapes all processes that the router at this metrics
    endpoint lists, and evaluates the rules. All that it keeps is in `folder`."""
    config = folder / "prometheus.yaml"
    discovery = {"url": f"http://{router}/targets", "refresh_interval": "1s"}
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [{"job_name": "baton", "http_sd_configs": [discovery]}],
            }
        )
    )
    address = f"{HOST}:{free_port(set())}"
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            dying_with_parent(command), stdout=out, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        _wait_ready(address, process, log)
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait()


def _wait_ready(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{address}/-/ready", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"Prometheus did not start:\n{log.read_text()[-2000:]}")


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Runs it to its end."""
    command: Sequence[str | Path] = [tool("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
