"""An innocent tenant's p99 beside an attack on a limit that it shares, against its p99 alone.

Both sides run in turns on one cluster with tenants, whose default limits each attack exceeds, and
the attack in a process of its own. On few cores that process's work is part of what is measured,
and beside waiting calls the time until a running one ends.
"""

import asyncio
import hashlib
import io
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import httpx

from baton import AsyncClient, Image, Message, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.errors import BatonError
from baton.models.shapes.drawings import random_drawing
from baton.sampling import Grammar, GrammarKind
from bench.report import CasesFailedError, Row
from bench.router import attacks

AIM = 0.5
NUM_CALLS = 25
MODEL = "shapes"  # which takes images
_TOKEN = "innocent"
_PROMPT = "Once upon a time"
_numbers = count()

Call = Callable[[LocalCluster], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """Attack of a size, by its name in `ATTACKS`, and a call of the innocent tenant beside it."""

    attack: str
    size: int
    call: Call


@dataclass(slots=True)
class Measured:
    """Seconds of the calls that were answered, alone and beside the attack, and the errors."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def generate(cluster: LocalCluster, grammar: str | None = None) -> None:
    """Generates on a connection of its own."""
    bound = None if grammar is None else Grammar(GrammarKind.REGEX, grammar)
    params = SamplingParams(max_tokens=8, grammar=bound)
    async with AsyncClient(cluster.address, token=_TOKEN) as client:
        await client.generate(_PROMPT, params, timeout=60.0).token_ids()


async def generate_by_new_grammar(cluster: LocalCluster) -> None:
    """Generates by a grammar that no call has used before."""
    await generate(cluster, f"[ab]{{3}}{next(_numbers)}")


async def complete(cluster: LocalCluster) -> None:
    """Completes a prompt over HTTP, on a connection of its own."""
    headers = {"authorization": f"Bearer {_TOKEN}"}
    async with httpx.AsyncClient(base_url=cluster.http_address, timeout=60.0) as client:
        body = {"model": cluster.model, "prompt": _PROMPT, "max_tokens": 8}
        (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def look(cluster: LocalCluster) -> None:
    """Generates from a drawing that no call has shown before."""
    file = io.BytesIO()
    random_drawing(random.Random(next(_numbers))).image().save(file, "PNG")
    asked = [Message("user", [Image(file.getvalue()), "How many circles?"])]
    async with AsyncClient(cluster.address, token=_TOKEN) as client:
        await client.generate(asked, SamplingParams(max_tokens=8), timeout=60.0).token_ids()


async def tokenize(cluster: LocalCluster, num_words: int) -> None:
    """Tokenizes a text over HTTP, on a connection of its own."""
    headers = {"authorization": f"Bearer {_TOKEN}"}
    async with httpx.AsyncClient(base_url=cluster.http_address, timeout=60.0) as client:
        body = {"prompt": "word " * num_words}
        (await client.post("/tokenize", json=body, headers=headers)).raise_for_status()


generate_by_cached_grammar = partial(generate, grammar="[ab]{3}")

CASES = {
    "admission queue": Case("waiting_calls", 1200, generate),
    "gRPC connections": Case("idle_connections", 1100, generate),
    "streams reset": Case("resetting_connections", 4, generate),
    "HTTP connections": Case("slow_bodies", 1060, complete),
    "slow grammars, cached one": Case("slow_grammars", 24, generate_by_cached_grammar),
    "slow grammars, new one": Case("slow_grammars", 24, generate_by_new_grammar),
    "masks of grammars": Case("ambiguous_grammars", 4, generate),
    "image decoders": Case("large_images", 12, look),
    "long texts": Case("long_texts", 24, partial(tokenize, num_words=1600)),
    "large bodies": Case("large_bodies", 8, partial(tokenize, num_words=20_000)),
}


def run(repeats: int) -> list[Row]:
    """Each attack in turns with none."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"tenants_file": tenants_file(Path(folder))}
        with LocalCluster(MODEL, http_port=0, router_flags=flags) as cluster:
            measured = asyncio.run(measure_all(cluster, CASES, NUM_CALLS, repeats))
    rows = [_row(name, each) for name, each in measured.items() if each.beside]
    failures = {
        name: f"{len(each.errors)} calls were not answered, the first by {each.errors[0]}"
        for name, each in measured.items()
        if each.errors
    }
    if failures:
        raise CasesFailedError(rows, failures)
    return rows


def tenants_file(folder: Path) -> Path:
    """Writes the tenants of the attacks and of the innocent calls, and returns where."""
    path = folder / "tenants"
    lines = (
        f"{hashlib.sha256(token.encode()).hexdigest()} {token}\n"
        for token in (attacks.TOKEN, _TOKEN)
    )
    path.write_text("".join(lines))
    return path


async def measure_all(
    cluster: LocalCluster, cases: dict[str, Case], num_calls: int, repeats: int
) -> dict[str, Measured]:
    """Returns what each case measured."""
    measured = {name: Measured() for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            await case.call(cluster)
            await _measure(cluster, case, num_calls, measured[name])
    return measured


async def _measure(cluster: LocalCluster, case: Case, num_calls: int, measured: Measured) -> None:
    for _ in range(num_calls):
        measured.alone.append(await _seconds(cluster, case))
    with attacks.running(case.attack, case.size, cluster.address, cluster.http_address):
        for _ in range(num_calls):
            try:
                measured.beside.append(await _seconds(cluster, case))
            except (BatonError, httpx.HTTPError) as error:
                measured.errors.append(f"{type(error).__name__}: {error}")


async def _seconds(cluster: LocalCluster, case: Case) -> float:
    began = time.perf_counter()
    await case.call(cluster)
    return time.perf_counter() - began


def _row(name: str, measured: Measured) -> Row:
    alone, beside = (1000 * _p99(each) for each in (measured.alone, measured.beside))
    return Row(f"{name}: p99", beside, "ms", "alone", alone, alone / beside, AIM)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]
