"""`baton up --workers 1` beside llama.cpp's server, over the same GGUF files, as one person has it.

Each server starts in its turn, as it comes, with all cores. It is ready with its first answer.
Then it is asked for 64 tokens behind 128, greedily, by one client and by eight at once. Its memory
is that of all of its processes, in which shared pages count once (PSS).
"""

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton.cli.local.ports import HOST, free_port
from bench.peers.gguf_models import KINDS, SIZES, random_model, save
from bench.report import NotPossibleError, Row

COMMAND = "llama-server"
NUM_CLIENTS = 8
AIM = 1.0
_NUM_PROMPT, _NUM_TOKENS = 128, 64
_KINDS = ("bfloat16", "8 bits", "4 bits")
_START_SECONDS, _END_SECONDS = 300.0, 30.0
_POLL_SECONDS = 0.02
_LEAST_TOKEN, _MOST_TOKEN = 5, 3000
_UNITS = ("s", "MB", "MB", "s", "tokens/s", "tokens/s")


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a server: seconds, megabytes, and tokens per second."""

    ready: float
    memory_at_first: float
    memory_at_last: float
    first_token_of_one_client: float
    one_client: float
    eight_clients: float


def run(repeats: int) -> list[Row]:
    """Returns a row for each figure. A ratio above 1 is in favour of Baton. Raises
    `NotPossibleError` if llama.cpp's server is not on the path."""
    its = _its_command()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        for size, sizes in SIZES.items():
            model = random_model(**sizes)
            for name in _KINDS:
                save(model, KINDS[name], file)
                print(f"bench peers: {COMMAND}, {size}, {name}", file=sys.stderr)
                rows += asyncio.run(compare(file, f"{size}, {name}", its, repeats))
    return rows


def our_command(file: Path, port: int) -> list[str]:
    """Returns the command of Baton's server."""
    ports = ["--http-port", str(port), "--port", "0", "--admin-port", "0"]
    return [sys.executable, "-m", "baton", "up", str(file), "--workers", "1", *ports]


async def compare(file: Path, case: str, its: str, repeats: int) -> list[Row]:
    """Returns the rows of one file. `its`: the command of llama.cpp's server."""
    pairs = []
    for _ in range(repeats):
        port = free_port(set())
        ours = await measured(our_command(file, port), port)
        port = free_port(set())
        pairs.append((ours, await measured(_with_options(its, file, port), port)))
    return [
        _row(f"{case}: {field.name.replace('_', ' ')}", unit, values)
        for field, unit, *values in zip(
            fields(Figures), _UNITS, *(zip(*map(astuple, pair), strict=True) for pair in pairs),
            strict=True,
        )
    ]  # fmt: skip


async def measured(command: Sequence[str], port: int) -> Figures:
    """Returns the figures of a server, which it starts and ends."""
    began = time.perf_counter()
    async with _serving(command, port) as (server, client):
        await _first_answer(server, client)
        ready = time.perf_counter() - began
        at_first = _memory(server)
        first_token, of_one = await _one_client(client)
        of_eight = await _eight_clients(client)
        return Figures(ready, at_first, _memory(server), first_token, of_one, of_eight)


@asynccontextmanager
async def _serving(
    command: Sequence[str], port: int
) -> AsyncIterator[tuple[psutil.Popen, httpx.AsyncClient]]:
    server = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # A connection for each request: some servers close those that they have answered on.
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"http://{HOST}:{port}"
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600.0) as client:
            yield server, client
    finally:
        server.terminate()
        server.wait(_END_SECONDS)


async def _first_answer(server: psutil.Popen, client: httpx.AsyncClient) -> None:
    expires = time.monotonic() + _START_SECONDS
    while True:
        assert server.poll() is None, "a server ended before its first answer"
        assert time.monotonic() < expires, f"a server was not ready in {_START_SECONDS:g} s"
        try:
            (await client.post("/v1/completions", json=_body(1))).raise_for_status()
        except httpx.HTTPError:
            await asyncio.sleep(_POLL_SECONDS)
        else:
            return


async def _one_client(client: httpx.AsyncClient) -> tuple[float, float]:
    """Returns seconds to the first token, and tokens per second after it."""
    began = time.perf_counter()
    first = await _streamed(client)
    ended = time.perf_counter()
    return first - began, (_NUM_TOKENS - 1) / (ended - first)


async def _eight_clients(client: httpx.AsyncClient) -> float:
    """Returns tokens per second of all, their prompts included."""
    began = time.perf_counter()
    await asyncio.gather(*(_streamed(client) for _ in range(NUM_CLIENTS)))
    return NUM_CLIENTS * _NUM_TOKENS / (time.perf_counter() - began)


async def _streamed(client: httpx.AsyncClient) -> float:
    """Returns the moment of the first piece of an answer, once it has ended."""
    first, num_tokens = 0.0, 0
    body = {**_body(_NUM_TOKENS), "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                num_tokens = usage.get("completion_tokens", num_tokens)
    assert num_tokens == _NUM_TOKENS, f"an answer has {num_tokens} tokens"
    return first


def _body(max_tokens: int) -> dict[str, Any]:
    prompt = [random.randrange(_LEAST_TOKEN, _MOST_TOKEN) for _ in range(_NUM_PROMPT)]
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _memory(server: psutil.Popen) -> float:
    processes = [server, *server.children(recursive=True)]
    return sum(each.memory_full_info().pss for each in processes) / 1e6


def _row(case: str, unit: str, pairs: Sequence[tuple[float, float]]) -> Row:
    ratios = [ours / its if unit == "tokens/s" else its / ours for ours, its in pairs]
    ours, its = (statistics.median(values) for values in zip(*pairs, strict=True))
    # The halves of a round follow each other: other load on the machine meets both.
    return Row(case, ours, unit, COMMAND, its, statistics.median(ratios), AIM)


def _its_command() -> str:
    command = shutil.which(COMMAND)
    if command is None:
        raise NotPossibleError(f"the command {COMMAND} is not on the path")
    return command


def _with_options(command: str, file: Path, port: int) -> list[str]:
    """Returns the command of llama.cpp's server, with room for as many clients as ask it."""
    threads, room = str(len(os.sched_getaffinity(0))), str(NUM_CLIENTS * 1024)
    where = ["--host", HOST, "--port", str(port)]
    return [command, "-m", str(file), *where, "-t", threads, "-c", room, "-np", str(NUM_CLIENTS)]
