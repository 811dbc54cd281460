"""The engine against llama.cpp: prompts and decodes apart, over the same GGUF files.

Random models of Qwen 3's shape, of 100M and 600M parameters, in float32, bfloat16, 8 bits (Q8_0)
and 4 bits (Q4_0, the head Q8_0). Both engines have a process, all cores, steps of 512 tokens and
no prefix cache, stay loaded and take turns on the same tokens, greedily.
"""

import asyncio
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from operator import truediv
from pathlib import Path

from bench.child import Child
from bench.peers.gguf_models import KINDS, SIZES, random_model, save
from bench.report import NotPossibleError, Row

INTERPRETER = "LLAMA_CPP_PYTHON"
PROMPTS = (512, 2048)
NUM_SEQUENCES = (1, 4, 16)
BEHIND = (128, 1024)  # tokens before those that are decoded
NUM_DECODED = 33
AIM = 1.0
_LEAST_TOKEN, _MOST_TOKEN = 5, 3000


def interpreter() -> Path:
    """Returns a Python that has llama-cpp-python.

    Raises `NotPossibleError` if there is none.
    """
    if named := os.environ.get(INTERPRETER):
        return Path(named)
    if importlib.util.find_spec("llama_cpp") is not None:
        return Path(sys.executable)
    raise NotPossibleError(
        f"llama-cpp-python is not installed, and {INTERPRETER} names no Python that has it"
    )


def run(repeats: int) -> list[Row]:
    """Returns tokens per second of the engine and of llama.cpp; a ratio above 1 is in favour of
    the engine."""
    python = interpreter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for size, sizes in SIZES.items():
            model = random_model(**sizes)
            for name, kind in KINDS.items():
                file = Path(folder) / "model.gguf"
                save(model, kind, file)
                print(f"bench peers: llama.cpp, {size}, {name}", file=sys.stderr)
                case = f"{size}, {name}"
                rows += asyncio.run(
                    compare(file, case, kind.dtype, python, PROMPTS, BEHIND, repeats)
                )
    return rows


async def compare(
    file: Path,
    name: str,
    dtype: str,
    python: Path,
    prompts: Sequence[int],
    behind: Sequence[int],
    repeats: int,
) -> list[Row]:
    """Returns a row for each length of a prompt, and for each number of sequences that decode
    behind each number of tokens."""
    threads = str(len(os.sched_getaffinity(0)))
    async with AsyncExitStack() as stack:
        engines = []
        for engine, executable in (("baton", sys.executable), ("llama", str(python))):
            child = Child(
                "bench.peers.phases_engine",
                engine,
                str(file),
                dtype,
                threads,
                python=executable,
                environment={"OMP_NUM_THREADS": threads},
            )
            stack.push_async_callback(child.close)
            await child.read()
            engines.append(child)
        ours, its = engines
        rows = [await _prompt(name, length, ours, its, repeats) for length in prompts]
        decodes = [
            await _decodes(name, length, count, ours, its, repeats)
            for length in behind
            for count in NUM_SEQUENCES
        ]
        return rows + decodes


async def _prompt(name: str, length: int, ours: Child, its: Child, repeats: int) -> Row:
    pairs = []
    for _ in range(repeats + 1):
        prompts = _prompts(1, length)
        pairs.append([length / (await _ask(each, prompts, 1))[0] for each in (ours, its)])
    return _row(f"{name}, prompt of {length}", pairs[1:])


async def _decodes(
    name: str, behind: int, count: int, ours: Child, its: Child, repeats: int
) -> Row:
    pairs = []
    for _ in range(repeats + 1):
        prompts, pair = _prompts(count, behind), []
        for each in (ours, its):
            _, seconds, num_tokens = await _ask(each, prompts, NUM_DECODED)
            pair.append(num_tokens / seconds)
        pairs.append(pair)
    return _row(f"{name}, {count} decoding behind {behind}", pairs[1:])


def _row(case: str, pairs: list[list[float]]) -> Row:
    values, references = zip(*pairs, strict=True)
    return Row(
        case,
        statistics.median(values),
        "tokens/s",
        "llama.cpp",
        statistics.median(references),
        # The halves of a round follow each other: other load on the machine meets both.
        statistics.median(map(truediv, values, references)),
        AIM,
    )


def _prompts(count: int, length: int) -> list[list[int]]:
    return [
        [random.randrange(_LEAST_TOKEN, _MOST_TOKEN) for _ in range(length)] for _ in range(count)
    ]


async def _ask(
    engine: Child, prompts: list[list[int]], max_tokens: int
) -> tuple[float, float, int]:
    """Returns seconds of prompts, seconds of decodes, and how many tokens those were."""
    answer = json.loads(await engine.ask(json.dumps([prompts, max_tokens])))
    assert all(len(tokens) == max_tokens for tokens in answer[3]), "another number of tokens"
    return answer[0], answer[1], answer[2]
