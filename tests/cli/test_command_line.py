"""Command line without a cluster: help, errors, exit codes."""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from baton.cli.certs import Authority
from baton.cli.command import HINTS, MAX_SUMMARY, SECTIONS
from baton.cli.local.process import Process
from baton.cli.main import app
from baton.cli.options.workers import DECIDED_BY_UP, SWITCHES
from baton.installation import install_command
from baton.models import INTRODUCTION
from baton.serving.telemetry.placement_terms import LOAD, TERMS
from baton.settings.other_servers import ADVICE
from baton.version import version
from baton.worker.roles import settings_class
from baton_router.settings import RouterSettings
from tests.cli.conftest import baton

HELP = """
import sys
from baton.cli.main import main
sys.argv = ["baton", "--help"]
try:
    main()
finally:
    heavy = {"torch", "transformers", "grpc", "redis", "rich.table", "textual"} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""

COMMANDS = typer.main.get_command(app).commands
HELP_OPTIONS = ["-h", "--help"]


def test_help_lists_commands_without_heavy_imports() -> None:
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    assert all(f"\n  {command} " in ended.stdout for command in COMMANDS)
    assert "heavy: []" in ended.stdout


def test_command_adds_no_lines_of_grpc_to_its_own(tmp_path: Path) -> None:
    """A server without TLS, asked by TLS, which gRPC notes for itself."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority().own.cert)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ended = baton("workers", "--admin", f"127.0.0.1:{port}", "--tls-ca", str(ca))
    server.stop(None)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("baton: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str) -> None:
    outputs = []
    for option in HELP_OPTIONS:
        result = CliRunner().invoke(app, [command, option], prog_name="baton")
        assert result.exit_code == 0
        assert f"baton {command}" in result.output.split("Example")[1]
        outputs.append(result.output)
    assert outputs[0] == outputs[1]


def test_help_cuts_no_summary_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["-h"])
    lines = result.output.splitlines()
    for name, found in COMMANDS.items():
        summary = found.help.split("\n")[0]
        assert len(summary) < MAX_SUMMARY, name
        assert any(re.fullmatch(f"  {name} +{re.escape(summary)}", line) for line in lines), name
    assert [line[:-1] for line in lines if line[:-1] in SECTIONS] == [*SECTIONS]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ["explain", "top"])
def test_help_lists_every_term_at_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [command, "--help"])
    assert max(map(len, result.output.splitlines())) <= 80
    for term, meaning in {"explain": TERMS, "top": LOAD}[command].items():
        assert re.search(rf"^    {re.escape(term)} +{re.escape(meaning)}$", result.output, re.M)


@pytest.mark.parametrize("command", ["workers", "top", "doctor", "replay", "simulate"])
def test_help_says_which_commands_print_json_lines(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert "--json" in result.output
    assert "Print JSON lines: one object a line." in " ".join(result.output.split())


def test_version_is_an_option_and_a_command() -> None:
    for argument in ("--version", "version"):
        result = CliRunner().invoke(app, [argument])
        assert result.exit_code == 0
        assert result.output == f"baton {version()}\n"


def test_serve_takes_the_model_and_options_of_up() -> None:
    arguments = ["Qwen/Qwen3-0.6B", "--dry-run", "--device", "cpu"]
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0
    assert result.stdout.count("--model Qwen/Qwen3-0.6B") == 3


@pytest.mark.parametrize("name", HINTS)
def test_unknown_command_names_the_right_one(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--some", "option"])
    assert result.exit_code == 2
    assert f"No such command {name!r}: " in result.stderr
    named = re.findall(r"`baton ([\w-]+)", result.stderr)
    assert named
    assert {*named} - {"--help", "COMMAND"} <= COMMANDS.keys()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_variable_that_baton_reads(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0
    assert f"_BATON_COMPLETE=complete_{shell}" in result.stdout


def test_completion_in_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "baton").write_text(f'#!/bin/sh\nexec {sys.executable} -m baton.__main__ "$@"\n')
    (tmp_path / "baton").chmod(0o755)
    script = """
PATH=$1:$PATH
source <(baton completion bash)
for line in "baton wor" "baton generate --max"; do
    read -ra COMP_WORDS <<< "$line"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) _baton_completion baton
    echo "${COMPREPLY[*]}"
done
"""
    command = ["bash", "-c", script, "bash", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["workers", "--max-tokens"], ended.stderr


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["generate", "x"], "--address or BATON_ADDRESS"),
        (["chat"], "--address or BATON_ADDRESS"),
        (["workers"], "--admin or BATON_ADMIN_ADDRESS"),
        (["top"], "--admin or BATON_ADMIN_ADDRESS"),
    ],
    ids=lambda a: a[0],
)
def test_commands_name_unreachable_address_and_remedy(arguments: list[str], options: str) -> None:
    nowhere = "127.0.0.1:1"
    ended = baton(*arguments, BATON_ADDRESS=nowhere, BATON_ADMIN_ADDRESS=nowhere)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.strip() == (
        "baton: no router answers at 127.0.0.1:1; start a cluster with `baton up`, or give its "
        f"address with {options}"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence", "options"),
    [
        (
            ["workers", "--admin", "nohost.invalid:50052"],
            "the host name 'nohost.invalid' does not resolve; give another",
            "--admin or BATON_ADMIN_ADDRESS",
        ),
        (
            ["generate", "x", "--address", "127.0.0.1"],
            "'127.0.0.1' is no address; expected HOST:PORT, such as 127.0.0.1:50051",
            "--address or BATON_ADDRESS",
        ),
        (
            ["generate", "x", "--address", "http://127.0.0.1:1"],
            "'http://127.0.0.1:1' begins with http://; expected HOST:PORT, such as "
            "127.0.0.1:50051: leave out http:// in",
            "--address or BATON_ADDRESS",
        ),
    ],
    ids=["unknown host", "no port", "a URL"],
)
def test_commands_name_an_address_that_cannot_be_one(
    arguments: list[str], sentence: str, options: str
) -> None:
    ended = baton(*arguments)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"baton: {sentence}")
    assert options in ended.stderr


def test_router_names_a_wrong_setting_as_its_flag() -> None:
    ended = baton("router", "--redis-url", "127.0.0.1:6379")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("router: --redis-url: it begins with none of")


def test_doctor_names_the_port_that_it_asks_for() -> None:
    ended = baton("doctor", "--admin", "127.0.0.1:1")
    assert ended.returncode == 1
    assert "--admin is a router's port for administration, 127.0.0.1:50053" in ended.stdout
    assert "see the router's log" not in ended.stdout


def test_generate_rejects_bad_parameter_in_one_line() -> None:
    result = CliRunner().invoke(app, ["generate", "x", "--top-p", "2"])
    assert result.exit_code == 1
    assert "--top-p: is 2.0; must be in (0, 1]" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_dry_run_prints_commands_and_starts_nothing() -> None:
    arguments = ["--prefill", "2", "--num-blocks", "64", "--worker-arg", "prefix-caching=false"]
    arguments += ["--kv-cache-dtype", "fp8_e4m3"]
    (command,) = re.findall(r"A real one: baton (.+)", INTRODUCTION)
    result = CliRunner().invoke(app, [*command.split(), "--dry-run", "--device", "cpu", *arguments])
    assert result.exit_code == 0
    redis, server, router, *workers = result.stdout.splitlines()
    url = redis.split()[-1]
    assert redis.startswith("# an embedded Redis at redis://127.0.0.1:")
    assert f"-server --port {url.split(':')[2].split('/')[0]} --bind 127.0.0.1 " in server
    assert "-m baton router --host 127.0.0.1 --port 50051" in router
    assert [line.split(" -m baton ")[1].split()[0] for line in workers] == [
        "prefill-worker",
        "prefill-worker",
        "decode-worker",
    ]
    for line in workers:
        assert f"--redis-url {url} --model Qwen/Qwen3-0.6B" in line
        assert "--device cpu --kv-cache-dtype fp8_e4m3 --num-blocks 64 --no-prefix-c" in line
    assert len({line.split("--port ")[1].split()[0] for line in workers}) == len(workers)


def test_dry_run_puts_encode_workers_before_prefill_workers() -> None:
    result = CliRunner().invoke(app, ["up", "--dry-run", "--device", "cpu", "--encode", "2"])
    assert result.exit_code == 0
    workers = result.stdout.splitlines()[-4:]
    named = [re.findall(r"-m baton (\S+)-worker .* --worker-id (\S+)", line) for line in workers]
    ids = ("encode-0", "encode-1", "prefill-0", "decode-0")
    assert named == [[(name.partition("-")[0], name)] for name in ids]


def test_up_refuses_encode_workers_when_model_has_no_encoder() -> None:
    ports = ["--port", "0", "--admin-port", "0", "--http-port", "0"]
    result = CliRunner().invoke(app, ["up", "tiny", "--encode", "1", *ports])
    assert result.exit_code == 1
    assert "has no encoder; expected a vision-language model for encode" in result.stderr


def test_up_serves_no_http_when_its_extra_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`None` is what Python has of a module that is not to be had."""
    monkeypatch.setitem(sys.modules, "starlette", None)

    def dry_run(*arguments: str) -> Result:
        result = CliRunner().invoke(app, ["up", "--dry-run", *arguments])
        assert "--http-port" not in result.stdout
        return result

    how = f"needs starlette; {install_command('http')}\n"
    unasked = dry_run()
    assert (unasked.exit_code, unasked.stderr) == (0, f"baton: no HTTP: it {how}")
    unwanted = dry_run("--no-http")
    assert (unwanted.exit_code, unwanted.stderr) == (0, "")
    asked = dry_run("--http-port", "0")
    assert (asked.exit_code, asked.stderr) == (1, f"baton: --http-port {how}")


def test_redis_password_appears_in_no_command_line() -> None:
    url = "redis://me:s3cret@127.0.0.1:1/0"
    result = CliRunner().invoke(app, ["up", "--dry-run", "--redis-url", url])
    assert result.stdout.startswith("# with BATON_REDIS_URL in the environment")
    assert "s3cret" not in result.stdout
    assert "--redis-url" not in result.stdout
    process = Process("router", "router", 1, {"redis_url": url})
    assert process.environment == {"BATON_REDIS_URL": url}


def test_workers_share_cpu_cores_unless_num_threads_is_set() -> None:
    def threads(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["up", "--dry-run", "--decode", "99", *arguments])
        return result.stdout.splitlines()[-1]

    assert "--num-threads 1" in threads("--device", "cpu")
    assert "--num-threads 7" in threads("--device", "cpu", "--num-threads", "7")
    assert "--num-threads" not in threads("--device", "cuda")


def commands_of_workers(*arguments: str) -> dict[str, str]:
    """Returns the command line of each worker that `up` would start, by its name."""
    result = CliRunner().invoke(app, ["up", "--dry-run", "--device", "cpu", *arguments])
    assert result.exit_code == 0, result.stderr
    found = (re.search(r"--worker-id (\S+)", line) for line in result.stdout.splitlines())
    return {match[1]: match.string for match in found if match}


def test_up_gives_settings_to_all_workers_or_those_of_one_role() -> None:
    given = ["--max-num-seqs", "32", "--decode.max-num-seqs=8", "--prefill.num-blocks", "77"]
    given += ["--no-prefix-caching", "--decode.device", "cuda:1", "--encode", "1", "tiny"]
    lines = commands_of_workers(*given)
    assert lines.keys() == {"encode-0", "prefill-0", "decode-0"}
    assert all(" --no-prefix-caching" in line for line in lines.values())
    seqs = {name: re.findall(r"--max-num-seqs (\S+)", line) for name, line in lines.items()}
    assert seqs == {"encode-0": ["32"], "prefill-0": ["32"], "decode-0": ["8"]}
    assert [name for name, line in lines.items() if "--num-blocks 77" in line] == ["prefill-0"]
    assert [name for name, line in lines.items() if "--device cuda:1" in line] == ["decode-0"]


def test_up_starts_only_workers_of_both_roles_when_told() -> None:
    cores = len(os.sched_getaffinity(0))
    for count in (1, 2):
        lines = commands_of_workers("--workers", str(count), "--decode.max-num-seqs", "8")
        assert lines.keys() == {f"decode-{i}" for i in range(count)}
        threads = f"--num-threads {max(1, cores // count)} "
        assert all("--max-num-seqs 8" in line and threads in f"{line} " for line in lines.values())
    several = commands_of_workers("--workers", "1", "--model", "a=tiny", "--model", "b=tiny")
    assert several.keys() == {"decode-0", "decode-1"}


def test_up_decides_router_settings_that_workers_imply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONDITIONAL_DISAGGREGATION", "false")
    monkeypatch.setenv("BATON_ELASTIC", "true")
    result = CliRunner().invoke(app, ["up", "--dry-run", "--device", "cpu", "--workers", "1"])
    (router,) = (line for line in result.stdout.splitlines() if " router " in line)
    assert "--conditional-disaggregation --no-elastic" in router


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--workers 0", "--workers: is 0; must be at least 1 ("),
        ("--prefill 0", "--prefill: is 0; must be at least 1 (--workers 1 starts one worker for"),
        ("--decode -1", "--decode: is -1; must be at least 1 ("),
        ("--workers 1 --prefill 2", "--workers: is 1 beside --prefill 2; each of its workers"),
        ("--workers 2 --decode 1", "--workers: is 2 beside --decode 1; each of its workers"),
        ("--workers 1 --elastic", "--workers: is 1 beside elastic=true of the router; there are"),
        (
            "--workers 1 --router-arg conditional-disaggregation=false",
            "--workers: is 1 beside conditional-disaggregation=false of the router; without",
        ),
        (
            "--workers 1 --prefill.num-blocks 64",
            "--prefill.num-blocks: is 64, and no prefill worker is started; leave --workers out, "
            "or give --num-blocks to all workers",
        ),
        (
            "--encode.no-prefix-caching",
            "--encode.prefix-caching: is False, and no encode worker is started; start one with",
        ),
    ],
)
def test_up_refuses_workers_that_contradict_each_other(arguments: str, error: str) -> None:
    result = CliRunner().invoke(app, ["up", "--dry-run", *arguments.split()])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"baton: {error}")


SETTINGS_OF_WORKERS = sorted(
    name for name in settings_class().model_fields if name not in DECIDED_BY_UP
)


@pytest.mark.parametrize("name", SETTINGS_OF_WORKERS)
def test_every_setting_of_a_worker_is_an_option_of_up(name: str) -> None:
    """Each as one value that means what is so without it, or is refused by the setting's name."""
    field = settings_class().model_fields[name]
    flag = f"--decode.{name.replace('_', '-')}"
    value = field.default if field.default is not None else "1"
    is_switch = field.annotation in SWITCHES
    given = [flag if value else flag.replace(".", ".no-")] if is_switch else [flag, str(value)]
    result = CliRunner().invoke(app, ["up", "--dry-run", *given])
    assert given[0].replace("decode.", "") in (result.stderr or result.stdout.splitlines()[-1])


def test_advice_on_flags_of_other_servers_names_flags_that_exist() -> None:
    up = {option for parameter in COMMANDS["up"].params for option in parameter.opts}
    fields = [*settings_class().model_fields, *RouterSettings.model_fields]
    settings = {f"--{name.replace('_', '-')}" for name in fields}
    unset = {f"--no-{name.removeprefix('--')}" for name in settings}
    told = {flag for advice in ADVICE.values() for flag in re.findall(r"--[\w-]+", advice)}
    assert told - up - settings - unset == set()
    taken = set(settings_class().model_fields)
    assert not {name for name in ADVICE if name[2:].replace("-", "_") in taken}


REFUSED_OPTIONS = {
    "misspelt": (["--max-num-seq", "4"], "No such option: --max-num-seq; did you mean --max-num-s"),
    "misspelt role": (["--prefil.num-blocks", "4"], "No such option: --prefil.num-blocks; did you"),
    "without a value": (["--max-num-seqs"], "Option '--max-num-seqs' requires an argument"),
    "of vLLM": (["--tensor-parallel-size", "2"], "; a worker computes on one device; `baton up"),
    "of SGLang": (["--decode.mem-fraction-static=0.8"], "; --gpu-memory-utilization is the share"),
    "of llama.cpp": (["--ctx-size", "4096"], "No such option: --ctx-size; --max-model-len is its"),
    "decided by up": (["--worker-id", "own"], "No such option: --worker-id; "),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED_OPTIONS.values(), ids=REFUSED_OPTIONS)
def test_up_refuses_unknown_options_with_advice(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["up", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr


def test_up_rejects_worker_argument_without_value() -> None:
    result = CliRunner().invoke(app, ["up", "--worker-arg", "num-blocks"])
    assert result.exit_code == 1
    assert "--worker-arg: is 'num-blocks'; must be KEY=VALUE" in result.stderr


def test_up_passes_settings_to_the_router() -> None:
    arguments = ["up", "--no-http", "--dry-run", "--router-arg"]
    given = CliRunner().invoke(app, [*arguments, "tool-call-parser=hermes"])
    (router,) = (line for line in given.stdout.splitlines() if " -m baton router " in line)
    assert "--tool-call-parser hermes" in router
    as_flag = CliRunner().invoke(app, [*arguments, "--tool-call-parser=hermes", "--num-threads=1"])
    assert "--tool-call-parser hermes" in as_flag.stdout
    wrong = CliRunner().invoke(app, [*arguments, "hermes"])
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "--router-arg: is 'hermes'; must be KEY=VALUE" in wrong.stderr


def test_up_passes_a_chat_template_to_the_router(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    arguments = ["up", "--no-http", "--dry-run", "--chat-template", str(file)]
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    (router,) = (line for line in lines if "--chat-template" in line)
    assert " -m baton router " in router
    assert f"--chat-template {file}" in router


@pytest.mark.parametrize(
    ("arguments", "variable", "models"),
    [
        ([], "", ["tiny"]),
        ([], "shapes", ["shapes"]),
        ([], "a b/c,shapes", ["a b/c", "shapes"]),
        (["tiny"], "shapes", ["tiny"]),
        (["--model", "tiny", "--model", "x=shapes"], "other", ["tiny", "x=shapes"]),
        (["--model", "tiny,x=shapes"], "", ["tiny", "x=shapes"]),
        (["tiny", "--model", "x=shapes"], "", ["tiny", "x=shapes"]),
    ],
)
def test_up_starts_workers_of_each_model(
    arguments: list[str], variable: str, models: list[str]
) -> None:
    of_up = ["up", "--no-http", "--dry-run", "--decode", "2", *arguments]
    lines = CliRunner().invoke(app, of_up, env={"BATON_MODEL": variable}).stdout.splitlines()
    served: dict[str, list[str]] = {}
    for line in map(shlex.split, lines):
        if "baton" in line:
            kind, model = line[line.index("baton") + 1], line[line.index("--model") + 1]
            served.setdefault(kind, []).append(model)
    assert served == {
        "router": [",".join(models)],
        "prefill-worker": models,
        "decode-worker": [model for model in models for _ in range(2)],
    }


def test_up_names_unreachable_redis_before_starting_anything() -> None:
    ended = baton("up", "--redis-url", "redis://127.0.0.1:1/0")
    assert ended.returncode == 1
    assert "baton: Redis does not answer" in ended.stderr
