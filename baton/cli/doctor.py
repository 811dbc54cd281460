"""`baton doctor`: faults of an installation or a cluster, and advice."""

import dataclasses
import json
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from baton.cli.checks.cluster import cluster
from baton.cli.checks.finding import Finding, Level
from baton.cli.checks.machine import NO_WORKER, machine
from baton.cli.checks.store import store
from baton.rpc.tls import Tls
from baton.serving.listening import without_brackets

_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.FAULT: "bold red"}


def installation(address: str, redis_url: str | None) -> Iterator[Finding]:
    """Checks this machine, and the Redis that would be used."""
    host, _, port = address.rpartition(":")
    yield from machine(without_brackets(host), int(port))
    yield from store(redis_url)


def endpoint(
    admin: str, address: str | None, token: str, redis_url: str | None, tls: Tls | None = None
) -> Iterator[Finding]:
    """Checks a running cluster, and its Redis if `redis_url` is given. `address`: router for a
    trial request; None: no trial."""
    yield from cluster(admin, address, token, tls)
    if redis_url is not None:
        yield from store(redis_url)


def report(findings: Iterator[Finding], console: Console, *, as_json: bool) -> int:
    """Prints each finding as it arrives; returns the number of faults."""
    num_faults, can_run_workers = 0, True
    for finding in findings:
        num_faults += finding.level is Level.FAULT
        can_run_workers &= finding.subject != NO_WORKER
        if as_json:
            print(json.dumps(dataclasses.asdict(finding)), flush=True)
            continue
        line = Text.assemble(
            (f"{finding.level:<6}", _STYLES[finding.level]), f"{finding.subject}: {finding.text}"
        )
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"      {finding.advice}", "dim"), soft_wrap=True)
    if not as_json:
        console.print(_summary(num_faults, can_run_workers=can_run_workers))
    return num_faults


def _summary(num_faults: int, *, can_run_workers: bool) -> str:
    if not num_faults:
        limits = (
            "" if can_run_workers else "; this machine can run a router and clients, not workers"
        )
        return f"no faults{limits}"
    return f"{num_faults} {'fault' if num_faults == 1 else 'faults'}; each with its remedy below"
