"""Throughput of the engine against vLLM's CPU build and llama.cpp, those that are installed.

`llama_cpp.py` is against llama.cpp, and `servers.py` against its server. Against vLLM, both with
their defaults: random Llamas of 7 M and 100 M parameters, in float32 and bfloat16; 16 prompts of 32
to 128 tokens, and 16 of 256 to 1,024, all at once, 32 new tokens each, greedy. Needs the command
`vllm` on the path. Each engine has a process, all cores and no prefix cache; both stay loaded and
take turns. A case names how many requests got equal tokens: rounding may part the others.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path

from bench.child import Child
from bench.peers import llama_cpp, servers, vllm_cpu
from bench.report import NotPossibleError, Row
from bench.workload import MAX_TOKENS, NUM_PROMPTS, prompts, save_model

AIM = 1.0
DTYPES = ("float32", "bfloat16")
LENGTHS = ((32, 128), (256, 1024))
MODELS: Mapping[str, Mapping[str, int]] = {
    "7M": {},
    "100M": {
        "hidden_size": 768,
        "num_hidden_layers": 15,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts through one engine."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def run(repeats: int) -> list[Row]:
    """Returns tokens per second of the engine and of others; a ratio above 1 is in favour of the
    engine. Raises `NotPossibleError` if none of them is installed."""
    rows: list[Row] = []
    missing: list[str] = []
    for against in (against_vllm, llama_cpp.run, servers.run):
        try:
            rows += against(repeats)
        except NotPossibleError as error:
            missing.append(str(error))
            print(f"bench peers: left out, {error}", file=sys.stderr)
    if not rows:
        raise NotPossibleError("; ".join(missing))
    return rows


def against_vllm(repeats: int) -> list[Row]:
    """Returns the rows against vLLM."""
    python = str(vllm_cpu.interpreter())
    rows: list[Row] = []
    for model, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), **sizes)
            for dtype in DTYPES:
                name = f"{model}, {dtype}"
                rows += asyncio.run(compare(folder, name, dtype, python, LENGTHS, repeats))
    return rows


async def compare(
    folder: str,
    name: str,
    dtype: str,
    python: str,
    lengths: Sequence[tuple[int, int]],
    repeats: int,
) -> list[Row]:
    """One row for each range of prompt lengths; `python` is that of vLLM."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    # By default vLLM binds its threads to all cores but one, which it leaves to a server.
    unbound = {**threads, **vllm_cpu.ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    async with AsyncExitStack() as stack:
        ours, its = [
            await stack.enter_async_context(
                _engine(engine, folder, dtype, python=executable, environment=environment)
            )
            for engine, executable, environment in (
                ("baton", sys.executable, threads),
                ("vllm", python, unbound),
            )
        ]
        return [await _row(name, each, ours, its, repeats) for each in lengths]


@asynccontextmanager
async def _engine(
    *arguments: str, python: str, environment: Mapping[str, str]
) -> AsyncIterator[Child]:
    """Yields an engine once it is loaded."""
    child = Child("bench.peers.peers_engine", *arguments, python=python, environment=environment)
    try:
        await child.read()
        yield child
    finally:
        await child.close()


async def _row(name: str, lengths: tuple[int, int], ours: Child, its: Child, repeats: int) -> Row:
    """Both in turns, after one unmeasured pass of each."""
    batch = prompts(*lengths)
    first, other = [await _generate(engine, batch) for engine in (ours, its)]
    pairs = [(await _generate(ours, batch), await _generate(its, batch)) for _ in range(repeats)]
    assert all(
        len(tokens) == MAX_TOKENS
        for each in (first, other, *(one for pair in pairs for one in pair))
        for tokens in each.token_ids
    ), "an engine gave another number of tokens"
    num_equal = sum(a == b for a, b in zip(first.token_ids, other.token_ids, strict=True))
    values, references = zip(
        *((a.tokens_per_second, b.tokens_per_second) for a, b in pairs), strict=True
    )
    return Row(
        f"{name}, prompts of {lengths[0]} to {lengths[1]}: {num_equal} of {NUM_PROMPTS} equal",
        statistics.median(values),
        "tokens/s",
        "vLLM",
        statistics.median(references),
        # The halves of a round are seconds apart: other load on the machine meets both.
        statistics.median(map(truediv, values, references)),
        AIM,
    )


async def _generate(engine: Child, batch: Sequence[Sequence[int]]) -> Pass:
    return Pass(*json.loads(await engine.ask(json.dumps([batch, MAX_TOKENS]))))
