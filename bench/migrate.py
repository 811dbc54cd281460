"""The gap in a client's stream when its decode worker is killed.

A local cluster of one prefill and two decode workers. In the middle of an answer the decode worker
that writes it gets a SIGKILL, and the client goes on reading. The gap is the longest wait for a
token from there on: noticing, placing anew, computing prompt and answer so far, handing over. Once
the blocks of the prompt are still in the prefix cache of the prefill worker, and once all caches
were flushed a moment before. Tokens are asserted equal to those of an undisturbed run.
"""

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from baton import Client, SamplingParams
from baton.cli.local_cluster import LocalCluster
from baton.generation import Generation
from bench.report import Row
from bench.workload import VOCAB_SIZE, save_model

CONTEXTS = (256, 1536)
KILLED_AT = 32
# A measurement costs a worker, which takes seconds to come back.
MOST_REPEATS = 3

_PARAMS = SamplingParams(max_tokens=2 * KILLED_AT, ignore_eos=True)
_SOURCE = random.Random(1)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. Times in milliseconds."""

    ttft: float
    gap: float


def run(repeats: int) -> list[Row]:
    """The gap by context length, with surviving blocks and without, beside what explains it."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        with (
            LocalCluster(
                model=folder,
                num_decode=2,
                worker_flags={"num_blocks": 512},
                router_flags={"conditional_disaggregation": False},
            ) as cluster,
            Client(cluster.address) as client,
        ):
            _disturbed(cluster, client, CONTEXTS[0], flushes=False)
            return [
                row
                for context in CONTEXTS
                for row in _rows(cluster, client, context, min(repeats, MOST_REPEATS))
            ]


def _rows(cluster: LocalCluster, client: Client, context: int, repeats: int) -> list[Row]:
    """Both cases in turns."""
    kept, flushed = [], []
    for _ in range(repeats):
        kept.append(_disturbed(cluster, client, context, flushes=False))
        flushed.append(_disturbed(cluster, client, context, flushes=True))
    with_blocks, without = (statistics.median(r.gap for r in runs) for runs in (kept, flushed))
    ttft = statistics.median(r.ttft for r in kept + flushed)
    name = f"gap at {context} tokens"
    return [
        Row(
            f"{name}, blocks survive",
            with_blocks,
            "ms",
            "no block",
            without,
            without / with_blocks,
            None,
        ),
        Row(f"{name}, no block", without, "ms", "first token", ttft, ttft / without, None),
    ]


def _disturbed(cluster: LocalCluster, client: Client, context: int, *, flushes: bool) -> Run:
    prompt = [_SOURCE.randrange(3, VOCAB_SIZE) for _ in range(context)]
    generation = client.generate(prompt, _PARAMS)
    began = time.perf_counter()
    moments: list[float] = []
    victim = ""
    for chunk in generation:
        moments += [time.perf_counter()] * len(chunk.token_ids)
        if len(moments) >= KILLED_AT and not victim:
            victim = _name_of_decoder(cluster, generation)
            if flushes:
                client.flush_cache()
            killed_at = len(moments)
            cluster.kill(victim)
    gap = max(b - a for a, b in zip(moments[killed_at - 1 :], moments[killed_at:], strict=False))
    assert generation.finished is not None
    assert generation.finished.usage.num_migrations == 1, "the answer was complete before the kill"
    cluster.restart(victim)
    undisturbed = client.generate(prompt, _PARAMS).token_ids()
    assert generation.token_ids() == undisturbed, "the tokens differ from an undisturbed run's"
    return Run(1000 * (moments[0] - began), 1000 * gap)


def _name_of_decoder(cluster: LocalCluster, generation: Generation) -> str:
    worker = generation.accepted.placement.decode_worker
    return next(p.name for p in cluster.processes if p.role == "decode" and p.worker_id == worker)
