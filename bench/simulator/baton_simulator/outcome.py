"""Results of a simulation, in figures. Plain data; knows nothing of engines.

A percentile is the least value that so many do not exceed. Goodput is the rate at which requests
come that meet both objectives: first token in time, and mean time between tokens in time. Those
that were refused meet none.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton_simulator.cluster import Cluster
from baton_simulator.job import Job

SHARES = (0.5, 0.9, 0.99)
_NUM_POINTS = 100  # of a distribution


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives of a request, in seconds."""

    ttft: float
    itl: float

    def are_met_by(self, job: Job) -> bool:
        return job.ttft is not None and job.ttft <= self.ttft and job.mean_gap <= self.itl


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cluster under one load.

    Attributes:
        case: who placed, on which kind of workers.
        rate: times the trace's own rate of arrivals.
        seconds: of simulated time until the last request had ended.
        offered, goodput: requests per second of the time in which they came.
        num_refused: of `num_requests`.
        ttft, itl: percentiles 50, 90 and 99 in seconds, of requests and of tokens.
        hit_rate: the part of all computed prompts' tokens that was in the cache of the worker that
            computed the rest.
        balance: the most prompt tokens that a worker for prompts computed, by the mean.
        num_preemptions: sequences that had to make room.
        ttfts, itls: the percentiles 1 to 100, in seconds.
    """

    case: str
    rate: float
    seconds: float
    num_requests: int
    num_refused: int
    offered: float
    goodput: float
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    hit_rate: float
    balance: float
    num_preemptions: int
    ttfts: tuple[float, ...]
    itls: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        """All but the distributions."""
        return {k: v for k, v in asdict(self).items() if k not in ("ttfts", "itls")}


def outcome_of(cluster: Cluster, case: str, rate: float, objectives: Objectives) -> Outcome:
    """The figures of a cluster that has run."""
    jobs = cluster.jobs
    ttfts = sorted(job.ttft for job in jobs if job.ttft is not None)
    prefilled = [job for job in jobs if job.ttft is not None]
    num_prompt = sum(job.num_prompt_tokens for job in prefilled)
    num_cached = sum(job.num_cached_tokens for job in prefilled)
    computed = [worker.num_computed_tokens for worker in cluster.computing]
    window = max(jobs[-1].arrival, 1e-9) if jobs else 1.0
    hundredths = tuple((i + 1) / _NUM_POINTS for i in range(_NUM_POINTS))
    return Outcome(
        case=case,
        rate=rate,
        seconds=cluster.clock.now,
        num_requests=len(jobs),
        num_refused=sum(bool(job.refusal) for job in jobs),
        offered=len(jobs) / window,
        goodput=sum(map(objectives.are_met_by, jobs)) / window,
        ttft=_percentiles(ttfts, SHARES),
        itl=cluster.gaps.percentiles(SHARES),
        hit_rate=num_cached / num_prompt if num_prompt else 0.0,
        balance=max(computed) * len(computed) / sum(computed) if any(computed) else 1.0,
        num_preemptions=sum(w.engine.scheduler.stats().num_preemptions for w in cluster.workers),
        ttfts=_percentiles(ttfts, hundredths),
        itls=cluster.gaps.percentiles(hundredths),
    )


def _percentiles(ordered: Sequence[float], shares: tuple[float, ...]) -> tuple[float, ...]:
    if not ordered:
        return (0.0,) * len(shares)
    return tuple(ordered[max(1, math.ceil(share * len(ordered))) - 1] for share in shares)
