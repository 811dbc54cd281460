"""The gap in a client's stream when its decode worker is killed, or told to end.

A local cluster of one prefill and two decode workers. In the middle of an answer the decode worker
that writes it gets a SIGKILL, and the client goes on reading. The gap is the longest wait for a
token from there on: detection, placement, computing prompt and answer so far, handing over. Once
the blocks of the prompt are still in the prefix cache of the prefill worker, and once all caches
were flushed a moment before. And once the worker is told to end (SIGTERM): another one then
fetches the KV of the answer. Tokens are asserted equal to those of an undisturbed run.
"""

import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from baton import Client, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.client.generation import Generation
from bench.report import Row
from bench.workload import VOCAB_SIZE, save_model

CONTEXTS = (256, 1536)
KILLED_AT = 32
# A measurement costs a worker, which takes seconds to come back.
MOST_REPEATS = 3

_PARAMS = SamplingParams(max_tokens=2 * KILLED_AT, ignore_eos=True)
_SOURCE = random.Random(1)
_ENDS_WITHIN = 15.0  # seconds, for a worker that has handed everything over


class Fault(Enum):
    """Disturbance of a decode worker."""

    DRAINED = auto()
    KILLED = auto()
    FLUSHED_AND_KILLED = auto()


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
            Client(cluster.address, admin_address=cluster.admin_address) as client,
        ):
            _disturbed(cluster, client, CONTEXTS[0], Fault.KILLED)
            return [
                row
                for context in CONTEXTS
                for row in _rows(cluster, client, context, min(repeats, MOST_REPEATS))
            ]


def _rows(cluster: LocalCluster, client: Client, context: int, repeats: int) -> list[Row]:
    """All cases in turns."""
    runs: dict[Fault, list[Run]] = {fault: [] for fault in Fault}
    for _ in range(repeats):
        for fault, of_fault in runs.items():
            of_fault.append(_disturbed(cluster, client, context, fault))
    drained, with_blocks, without = (statistics.median(r.gap for r in runs[f]) for f in Fault)
    ttft = statistics.median(r.ttft for of_fault in runs.values() for r in of_fault)
    name = f"gap at {context} tokens"
    return [
        Row(
            f"{name}, handed over at drain",
            drained,
            "ms",
            "killed, blocks survive",
            with_blocks,
            with_blocks / drained,
            None,
        ),
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


def _disturbed(cluster: LocalCluster, client: Client, context: int, fault: Fault) -> Run:
    prompt = [_SOURCE.randrange(3, VOCAB_SIZE) for _ in range(context)]
    generation = client.generate(prompt, _PARAMS)
    began = time.perf_counter()
    moments: list[float] = []
    victim = ""
    for chunk in generation:
        moments += [time.perf_counter()] * len(chunk.token_ids)
        if len(moments) >= KILLED_AT and not victim:
            victim = _name_of_decoder(cluster, generation)
            if fault is Fault.FLUSHED_AND_KILLED:
                client.flush_cache()
            killed_at = len(moments)
            cluster.kill(victim, signal.SIGTERM if fault is Fault.DRAINED else signal.SIGKILL)
    gap = max(b - a for a, b in zip(moments[killed_at - 1 :], moments[killed_at:], strict=False))
    assert generation.finished is not None
    assert generation.finished.usage.num_migrations == 1, "the answer was complete before the kill"
    assert cluster.process(victim).wait(time.monotonic() + _ENDS_WITHIN), "the drain does not end"
    cluster.restart(victim)
    undisturbed = client.generate(prompt, _PARAMS).token_ids()
    assert generation.token_ids() == undisturbed, "the tokens differ from an undisturbed run's"
    return Run(1000 * (moments[0] - began), 1000 * gap)


def _name_of_decoder(cluster: LocalCluster, generation: Generation) -> str:
    worker = generation.accepted.placement.decode_worker
    return next(p.name for p in cluster.processes if p.role == "decode" and p.worker_id == worker)
