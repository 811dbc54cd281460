"""Example programs of `docs/clients`: retries, resumption, cancellation and deadlines, through a
proxy that rejects their first calls and cuts one.

The cancelled request (300 tokens) and the late one (1,500) fit into the decode pool together: the
router may still count the first when the second arrives, and would forecast a wait.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import OverloadedError, UnavailableError
from baton.sampling import SamplingParams
from tests.support.cluster.faulty_router import Disconnect, Fault, FaultyRouter, faulty_router
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.repository import ROOT

pytestmark = pytest.mark.e2e

EXAMPLES = ROOT / "docs" / "clients"
PROTOS = ROOT / "protos"
PROMPT = "def main("
TWO = SamplingParams(max_tokens=24, n=2, temperature=0.8, seed=7, ignore_eos=True)
RETRY_AFTER = 0.4


def built(*command: str | Path, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def program(name: str) -> str:
    """The path of what a test cannot do without."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    assert found, f"{name} is not installed; .ci/run says what of Debian has it"
    return found


async def said_by(
    cluster: LocalCluster, *command: str | Path, cwd: Path, **environment: str
) -> list[dict[str, object]]:
    """Returns the output of a program that gets HOST:PORT and PROMPT after its command line, and
    asserts that its calls are those of a well-behaved client."""
    faults: list[Fault] = [
        OverloadedError("too much to do", RETRY_AFTER),
        UnavailableError("no worker is there"),
        Disconnect(after=6),
    ]
    async with faulty_router(cluster, faults) as (proxy, address):
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            address,
            PROMPT,
            cwd=cwd,
            env={**os.environ, "BATON_TOKEN": "a secret", **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60.0):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
        check_manners(proxy)
    await until_nothing_is_held(cluster)
    return [json.loads(line) for line in out.splitlines()]


def check_manners(proxy: FaultyRouter) -> None:
    """Checks six calls: two rejected, one cut, then one resumed, one cancelled and one late."""
    assert len(proxy.seen) == 6, [(call.seconds_left, call.request) for call in proxy.seen]
    first, _, lost, resumed, *_ = proxy.seen
    # It asks again when it was told to, and no sooner.
    assert proxy.times[1] - proxy.times[0] >= RETRY_AFTER
    for call in proxy.seen:
        assert call.metadata["authorization"] == "Bearer a secret"
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", str(call.metadata["traceparent"]))
        assert call.seconds_left is not None
    traces = [call.metadata["traceparent"] for call in proxy.seen]
    assert traces[0] == traces[1] == traces[2] == traces[3]
    assert first.seconds_left is not None
    assert resumed.seconds_left is not None
    assert resumed.seconds_left < first.seconds_left <= 30.0
    assert not lost.request.continue_from
    # What came before the stream was cut is not asked for again.
    assert len(resumed.request.continue_from) == 2
    assert sum(len(one.ids) for one in resumed.request.continue_from) > 0
    assert proxy.num_left == 2


async def check_said(cluster: LocalCluster, said: Sequence[dict[str, object]]) -> None:
    """The tokens and the text are those of a generation that nothing has disturbed."""
    async with AsyncClient(cluster.address) as client:
        completions = await client.generate(PROMPT, TWO).completions()
    expected = [
        {"sequence": index, "text": one.text, "token_ids": list(one.token_ids)}
        for index, one in enumerate(completions)
    ]
    assert said[:2] == expected
    cancelled, late = said[2:]
    number = cancelled["cancelled_after"]
    assert isinstance(number, int)
    assert 5 <= number < 300
    assert late == {"deadline": "exceeded"}


async def test_python_example_with_library_runs(cluster, tmp_path):
    example = EXAMPLES / "python" / "with_library.py"
    await check_said(cluster, await said_by(cluster, sys.executable, example, cwd=tmp_path))


@pytest.mark.slow
async def test_python_example_with_plain_stubs_runs(cluster, tmp_path):
    """In a folder whose `baton` is what protoc makes, and nothing else."""
    built(
        *(sys.executable, "-m", "grpc_tools.protoc", "-I", PROTOS),
        *("--python_out=.", "--grpc_python_out=."),
        *(PROTOS / "baton" / "v1" / name for name in ("inference.proto", "sampling.proto")),
        cwd=tmp_path,
    )
    for package in ("baton", "baton/v1"):
        (tmp_path / package / "__init__.py").touch()  # where ours is installed, it goes before it
    example = shutil.copy(EXAMPLES / "python" / "with_stubs.py", tmp_path)
    said = await said_by(cluster, sys.executable, example, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    await check_said(cluster, said)


@pytest.mark.nightly
async def test_node_example_runs(cluster, tmp_path):
    for file in ("package.json", "package-lock.json", "generate.mjs"):
        shutil.copy(EXAMPLES / "node" / file, tmp_path)
    built(program("npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=tmp_path)
    said = await said_by(cluster, program("node"), "generate.mjs", PROTOS, cwd=tmp_path)
    await check_said(cluster, said)


@pytest.mark.nightly
async def test_go_example_runs(cluster, tmp_path):
    """By the packages of Debian, which have no modules."""
    folder = tmp_path / "src" / "example.com" / "baton-client"
    shutil.copytree(EXAMPLES / "go", folder)
    built(
        *(program("buf"), "generate", PROTOS, "--path", PROTOS / "baton" / "v1"),
        *("--template", "buf.gen.yaml"),
        cwd=folder,
    )
    path = f"{tmp_path}:/usr/share/gocode"
    built(
        *(program("go"), "build", "-o", tmp_path / "client", "."),
        cwd=folder,
        GO111MODULE="off",
        GOPATH=path,
        GOCACHE=str(tmp_path / "cache"),
    )
    await check_said(cluster, await said_by(cluster, tmp_path / "client", cwd=tmp_path))


def commands_of_buf() -> list[str]:
    """Returns the commands that the page says to type, in its order."""
    section = (EXAMPLES / "README.md").read_text().split("\n## buf curl\n")[1].split("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


async def typed(cluster: LocalCluster, command: str) -> tuple[int, str]:
    """The exit code and the output of a command of the page, at the cluster's address."""
    beside = Path(program("buf")).parent
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command.replace("127.0.0.1:50051", cluster.address)),
        cwd=ROOT,
        env={**os.environ, "PATH": f"{beside}:{os.environ['PATH']}", "BATON_TOKEN": "a secret"},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60.0):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of an output, one behind the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        event, end = decoder.raw_decode(text)
        found.append(event)
        text = text[end:]
    return found


@pytest.mark.nightly
async def test_buf_commands_of_the_client_page_work(cluster):
    reflected, by_schema, timed_out, refused = commands_of_buf()
    code, out = await typed(cluster, reflected)
    assert code == 0
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for event in events(out):
        chunk = event.get("tokens", {})
        of_one = tokens[chunk.get("sequenceIndex", 0)]
        assert chunk.get("position", 0) == len(of_one) or not chunk.get("tokenIds")
        of_one += chunk.get("tokenIds", [])
    async with AsyncClient(cluster.address) as client:
        same = replace(TWO, max_tokens=20, ignore_eos=False)
        expected = await client.generate(PROMPT, same).completions()
    assert tokens == {index: list(one.token_ids) for index, one in enumerate(expected)}

    code, out = await typed(cluster, by_schema)
    assert code == 0
    assert list(events(out)[-1]) == ["finished"]

    code, out = await typed(cluster, timed_out)
    assert code == 124
    assert "finished" not in out
    await until_nothing_is_held(cluster)

    assert await typed(cluster, refused) == (0, "code 3\n")
