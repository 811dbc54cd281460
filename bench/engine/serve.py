"""Serving against the bare engine: the same prompts through router, prefill and decode.

Both run on the same cores: the engine in this process, and a local cluster of one prefill and one
decode worker behind a router. Tokens are asserted equal.
"""

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.engine import LLM, EngineConfig
from baton.engine.request import EngineRequest
from bench.report import Row
from bench.workload import MAX_TOKENS, prompts, save_model

AIM = 0.7
_PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts. Times in milliseconds, medians over the requests."""

    token_ids: list[list[int]]
    tokens_per_second: float
    ttft: float
    itl: float


def run(repeats: int) -> list[Row]:
    """Throughput as a ratio of the engine's, and the time a server adds to each token."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        engine = LLM.from_pretrained(
            folder,
            EngineConfig(device="cpu", dtype="float32", num_blocks=1024, prefix_caching=False),
        )
        flags = {"prefix_caching": False, "num_blocks": 1024}
        handoffs = {"conditional_disaggregation": False}
        with LocalCluster(model=folder, worker_flags=flags, router_flags=handoffs) as cluster:
            runs = asyncio.run(_alternate(engine, cluster.address, repeats))
    return _rows(*runs)


async def _alternate(engine: LLM, address: str, repeats: int) -> tuple[list[Run], list[Run]]:
    """Engine and cluster in turns, after one unmeasured pass of each."""
    bare, served = [], []
    async with AsyncClient(address) as client:
        for i in range(repeats + 1):
            runs = through_engine(engine), await _through_cluster(client)
            assert runs[0].token_ids == runs[1].token_ids, "served tokens differ from the engine's"
            if i > 0:
                bare.append(runs[0])
                served.append(runs[1])
    return bare, served


def through_engine(engine: LLM) -> Run:
    """All prompts at once, step by step, noting when each token appears."""
    batch = prompts()
    start = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.core.add(EngineRequest(str(i), tuple(prompt), _PARAMS, len(prompt)))
    token_ids: list[list[int]] = [[] for _ in batch]
    moments: list[list[float]] = [[] for _ in batch]
    while engine.core.has_work:
        for update in engine.core.step().updates:
            if update.token_id is not None:
                token_ids[int(update.request_id)].append(update.token_id)
                moments[int(update.request_id)].append(time.perf_counter())
    return measured(start, token_ids, moments)


async def _through_cluster(client: AsyncClient) -> Run:
    """All prompts at once, as concurrent streams."""
    batch = prompts()
    token_ids: list[list[int]] = [[] for _ in batch]
    moments: list[list[float]] = [[] for _ in batch]

    async def one(i: int) -> None:
        async for chunk in client.generate(batch[i], _PARAMS):
            token_ids[i] += chunk.token_ids
            moments[i] += [time.perf_counter()] * len(chunk.token_ids)

    start = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(len(batch))))
    return measured(start, token_ids, moments)


def measured(start: float, token_ids: list[list[int]], moments: list[list[float]]) -> Run:
    elapsed = max(m[-1] for m in moments) - start
    return Run(
        token_ids,
        sum(map(len, token_ids)) / elapsed,
        1000 * statistics.median(m[0] - start for m in moments),
        1000 * statistics.median((m[-1] - m[0]) / (len(m) - 1) for m in moments),
    )


def _rows(bare: list[Run], served: list[Run]) -> list[Row]:
    def row(case: str, unit: str, name: str, aim: float | None, *, larger_is_better: bool) -> Row:
        value, reference = (
            statistics.median(getattr(r, name) for r in runs) for runs in (served, bare)
        )
        ratio = value / reference if larger_is_better else reference / value
        return Row(case, value, unit, "engine in process", reference, ratio, aim)

    return [
        row("served throughput", "tokens/s", "tokens_per_second", AIM, larger_is_better=True),
        row("time to first token", "ms", "ttft", None, larger_is_better=False),
        row("inter-token latency", "ms", "itl", None, larger_is_better=False),
    ]
