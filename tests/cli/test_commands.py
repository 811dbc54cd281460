"""The commands against a real cluster."""

import json
import os
import pty
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner, Result

from baton import Client, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from baton.models import INTRODUCTION
from baton.serving.telemetry.placement_terms import TERMS
from baton.version import version
from tests.cli.conftest import BATON
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

PROMPT = "def fibonacci(n):"


def invoke(cluster: LocalCluster, *arguments: str, stdin: str = "") -> Result:
    return CliRunner(
        env={"BATON_ADDRESS": cluster.address, "BATON_ADMIN_ADDRESS": cluster.admin_address}
    ).invoke(app, arguments, input=stdin)


def expected(cluster: LocalCluster, max_tokens: int) -> str:
    with Client(cluster.address) as client:
        return client.generate(PROMPT, SamplingParams(max_tokens=max_tokens)).text()


def test_generate_streams_the_text_of_the_client(cluster: LocalCluster) -> None:
    result = invoke(cluster, "generate", PROMPT, "--max-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == expected(cluster, 12).rstrip("\n")
    assert result.stderr == ""


@pytest.mark.parametrize("command", [("generate", PROMPT), ("chat",)])
def test_commands_ask_the_model_that_they_are_told(cluster: LocalCluster, command) -> None:
    served = invoke(cluster, *command, "--max-tokens", "12", "--model", "tiny", stdin=PROMPT)
    assert served.exit_code == 0, served.stderr
    unknown = invoke(cluster, *command, "--model", "coder", stdin=PROMPT)
    assert unknown.exit_code != 0
    assert "model is 'coder'; expected" in unknown.stderr


def test_generate_reads_stdin_and_prints_stats(cluster: LocalCluster) -> None:
    result = invoke(cluster, "generate", "-", "--max-tokens", "12", "--stats", stdin=PROMPT)
    assert result.stdout.rstrip("\n") == expected(cluster, 12).rstrip("\n")
    assert "12 output tokens" in result.stderr
    assert "ended by length" in result.stderr


def test_generate_prints_all_fields_as_json(cluster: LocalCluster) -> None:
    result = invoke(cluster, "generate", PROMPT, "--max-tokens", "4", "--json")
    answer = json.loads(result.stdout)
    (completion,) = answer["completions"]
    assert completion["text"] == expected(cluster, 4)
    assert len(completion["token_ids"]) == answer["usage"]["num_output_tokens"] == 4
    assert (answer["prefill_worker"], answer["decode_worker"]) == ("prefill-0", "decode-0")
    assert completion["finish_reason"] == "length"
    assert answer["seconds"]["total"] > 0


def test_generate_prints_scored_completions(cluster: LocalCluster) -> None:
    arguments = ["generate", PROMPT, "--max-tokens", "6", "--beam-width", "3", "--n", "2"]
    answer = json.loads(invoke(cluster, *arguments, "--json").stdout)
    scores = [completion["score"] for completion in answer["completions"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2
    assert invoke(cluster, *arguments).stdout.startswith(f"[1, score {scores[0]:.4f}]\n")


def test_generate_follows_a_regex(cluster: LocalCluster) -> None:
    result = invoke(cluster, "generate", PROMPT, "--regex", "(yes|no), [0-9]+!", "--seed", "3")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split(",")[0] in ("yes", "no")
    refused = invoke(cluster, "generate", PROMPT, "--regex", "([")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("baton: grammar: ")
    assert len(refused.stderr.splitlines()) == 1


def test_generate_prints_logprobs_as_json(cluster: LocalCluster) -> None:
    arguments = ["--max-tokens", "3", "--logprobs", "2", "--prompt-logprobs", "0", "--json"]
    answer = json.loads(invoke(cluster, "generate", PROMPT, *arguments).stdout)
    (completion,) = answer["completions"]
    assert [len(token["top"]) for token in completion["logprobs"]] == [2, 2, 2]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["num_prompt_tokens"] - 1


def test_generate_stops_at_a_stop_string(cluster: LocalCluster) -> None:
    stop = expected(cluster, 24).split()[1]
    result = invoke(cluster, "generate", PROMPT, "--max-tokens", "24", "--stop", stop, "--json")
    (completion,) = json.loads(result.stdout)["completions"]
    assert completion["finish_reason"] == "stop_string"
    assert stop not in completion["text"]


def test_generate_prints_rejection_in_one_line(cluster: LocalCluster) -> None:
    result = invoke(cluster, "generate", "", "--max-tokens", "4")
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: ")
    assert len(result.stderr.splitlines()) == 1


def test_chat_answers_each_line_of_a_pipe(cluster: LocalCluster, wide: None) -> None:
    (question,) = re.findall(r"echo '(.+)' \| baton chat", invoke(cluster, "chat", "--help").stdout)
    arguments = ["chat", "--max-tokens", "12", "--temperature", "0"]
    result = invoke(cluster, *arguments, stdin=f"{question}\n\nAnd another.\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("def get(self, key):\n")


def test_chat_at_a_terminal_says_once_that_tiny_is_a_toy(cluster: LocalCluster) -> None:
    user, terminal = pty.openpty()
    command = [*BATON, "chat", "--address", cluster.address, "--max-tokens", "1"]
    chat = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, text=True)
    os.close(terminal)
    for line in (b"one\n", b"two\n", b"\x04"):
        os.write(user, line)
    stdout, _ = chat.communicate(timeout=60)
    os.close(user)
    assert chat.returncode == 0
    assert stdout.count(INTRODUCTION) == 1


def test_workers_prints_table_and_json(cluster: LocalCluster, wide: None) -> None:
    table = invoke(cluster, "workers").stdout
    for process in cluster.processes[1:]:
        assert process.name in table
        assert process.endpoint in table
    assert table.count("ready") == 2
    assert table.count(version()) == 2
    lines = invoke(cluster, "workers", "--json").stdout.splitlines()
    assert [json.loads(line)["role"] for line in lines] == ["decode", "prefill"]


def test_pause_holds_new_requests_until_resume(cluster: LocalCluster) -> None:
    with ThreadPoolExecutor() as pool:
        paused = invoke(cluster, "pause")
        try:
            assert paused.stdout == "admission is paused; requests waiting: 0\n"
            answer = pool.submit(expected, cluster, 4)
            with Client(cluster.admin_address) as client:
                wait_until(lambda: [r.phase for r in client.list_requests()] == ["waiting"])
                assert client.get_load().is_paused
        finally:
            resumed = invoke(cluster, "resume")
        assert resumed.stdout == "admission has resumed; requests that waited: 1\n"
        assert answer.result()


def test_flush_drops_blocks_of_a_prompt_or_all(cluster: LocalCluster) -> None:
    text = PROMPT * 8

    def num_flushed(*arguments: str) -> int:
        flushed = invoke(cluster, "flush", *arguments, stdin=text)
        return int(flushed.stdout.removeprefix("cached blocks dropped: "))

    for arguments in (["-"], []):
        invoke(cluster, "generate", text, "--max-tokens", "1")
        assert num_flushed(*arguments) > 0
        assert num_flushed(text) == 0


def test_workers_shows_memory_as_table_and_json(cluster: LocalCluster, wide: None) -> None:
    invoke(cluster, "generate", PROMPT * 8, "--max-tokens", "1")
    table = invoke(cluster, "workers", "--memory").stdout
    assert "reserved tokens" in table
    assert all(process.name in table for process in cluster.processes[1:])
    lines = invoke(cluster, "workers", "--memory", "--json").stdout.splitlines()
    decode, prefill = map(json.loads, lines)
    assert (decode["num_blocks"], decode["num_host_blocks"]) == (130, 0)
    assert prefill["num_cached_blocks"] > 0
    assert decode["pool_bytes"] % decode["num_blocks"] == 0


def test_role_shows_balance_and_rejects_taking_the_last_worker(cluster: LocalCluster, wide: None):
    shown = invoke(cluster, "role").stdout
    assert re.match(r"pressure: encode [0-9.]+, prefill [0-9.]+, decode [0-9.]+ \(", shown)
    assert "no role change is proposed: " in shown
    balance = json.loads(invoke(cluster, "role", "--json").stdout)
    assert (balance["proposal"], balance["is_elastic"]) == (None, False)
    refused = invoke(cluster, "role", cluster.process("decode-0").worker_id, "prefill")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "is the only decode worker" in refused.stderr
    for arguments in (["decode-0"], ["decode-0", "router"]):
        refused = invoke(cluster, "role", *arguments)
        assert refused.exit_code == 1
        assert refused.stderr.startswith("baton: role")


def test_explain_shows_placement_of_a_prompt_without_running_it(cluster: LocalCluster, wide: None):
    shown = invoke(cluster, "explain", PROMPT).stdout
    for process in cluster.processes[1:]:
        assert f"> {process.name}" in " ".join(shown.split())
    assert "prefill-0 with decode-0 cost" in shown
    explained = json.loads(invoke(cluster, "explain", PROMPT, "--json").stdout)
    assert explained["placement"]["prefill_worker"] == "prefill-0"
    assert {c["worker"] for c in explained["placement"]["candidates"]} == {"prefill-0", "decode-0"}
    assert all(c["terms"] for c in explained["placement"]["candidates"])
    before = [json.loads(line) for line in invoke(cluster, "workers", "--json").stdout.splitlines()]
    assert [worker["num_requests"] for worker in before] == [0, 0]


def test_explain_prints_the_meaning_of_each_term_shown(cluster: LocalCluster, wide: None) -> None:
    explained = json.loads(invoke(cluster, "explain", PROMPT, "--json").stdout)
    shown = {term for c in explained["placement"]["candidates"] for term in c["terms"]}
    printed_all = invoke(cluster, "explain", PROMPT, "--legend").stdout
    legend = re.split(r"^terms *\n", printed_all, flags=re.MULTILINE)[1]
    printed = dict(re.findall(r"^ (\S.*?) {2,}(\S.*?) *$", legend, re.MULTILINE))
    assert printed == {name: TERMS[name] for name in TERMS if name in shown | {"cached", "cost"}}


def test_explain_shows_placement_of_a_finished_request(cluster: LocalCluster):
    arguments = ["generate", PROMPT, "--max-tokens", "2", "--json"]
    answer = json.loads(invoke(cluster, *arguments).stdout)
    arguments = ["explain", "--request-id", answer["request_id"], "--json"]
    explained = json.loads(invoke(cluster, *arguments).stdout)
    assert explained["num_tokens"] == answer["usage"]["num_prompt_tokens"]
    assert explained["placement"]["decode_worker"] == answer["decode_worker"]
    forgotten = invoke(cluster, "explain", "--request-id", "stranger's")
    assert (forgotten.exit_code, forgotten.stdout) == (1, "")
    assert "stranger's" in forgotten.stderr


def test_explain_takes_either_a_prompt_or_a_request_id(cluster: LocalCluster):
    for arguments in ((), (PROMPT, "--request-id", "r")):
        refused = invoke(cluster, "explain", *arguments)
        assert refused.exit_code == 1
        assert "--request-id" in refused.stderr


@pytest.mark.parametrize("command", [["generate", PROMPT], ["workers"]], ids=lambda c: c[0])
def test_commands_name_the_port_of_http_when_asked_there(
    cluster: LocalCluster, command: list[str]
) -> None:
    http = cluster.http_address.removeprefix("http://")
    variables = {"BATON_ADDRESS": http, "BATON_ADMIN_ADDRESS": http}
    result = CliRunner(env=variables).invoke(app, command)
    assert (result.exit_code, result.stdout) == (1, "")
    flag, port = {"generate": ("--port", 50051), "workers": ("--admin-port", 50053)}[command[0]]
    assert re.match(
        f"baton: {http} answers HTTP; gRPC is at (the router's {flag}, )?127.0.0.1:{port}",
        result.stderr,
    )


@pytest.mark.parametrize(
    "command", [["generate", PROMPT], ["workers"], ["role"]], ids=lambda c: c[0]
)
def test_commands_name_the_right_port_when_ports_are_swapped(
    cluster: LocalCluster, command: list[str]
) -> None:
    swapped = {"BATON_ADDRESS": cluster.admin_address, "BATON_ADMIN_ADDRESS": cluster.address}
    result = CliRunner(env=swapped).invoke(app, command)
    assert result.exit_code == 1
    assert "serves its clients at --port and those who look after it at --admin-port" in (
        result.stderr
    )
