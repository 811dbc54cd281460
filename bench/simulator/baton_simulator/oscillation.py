"""Oscillation of prefill and decode load under admission control, at more load than both can take.

Early rejection by the current decode load admits a crowd of prompts whenever decodes are few, and
no prompt once the crowd has arrived there: prefill and decode are busy in turns. The workload
provokes it: prompts and answers of one length, at even intervals, and prompts that take as long in
their queue as answers take to be written.
"""

from dataclasses import dataclass

import numpy as np

from baton_router.routing.admission.policy import ADMISSION_NAMES, AdmissionName
from baton_simulator.cluster import Cluster
from baton_simulator.machines import h200_8b
from baton_simulator.outcome import Objectives
from baton_simulator.setup import Setup
from baton_simulator.study import simulate
from baton_simulator.traces import TraceRow

NUM_REQUESTS = 400
NUM_PROMPT_TOKENS = 2**16
NUM_OUTPUT_TOKENS = 300
PER_SECOND = 6.0
CACHE_TOKENS = 2**19
SAMPLE_SECONDS = 0.5
WARM_UP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Swing:
    """Variation of load, once warm and while requests came.

    Attributes:
        times, prefill, decode: samples: seconds, and the tokens of admitted prompts that were yet
            to be computed, and those of admitted requests among the decodes.
        correlation: of prefill and decode load; near -1 where they are busy in turns.
        unevenness: the standard deviation of the decode load by its mean.
        goodput: requests per second that met the objectives.
        num_refused: of `NUM_REQUESTS`.
    """

    times: tuple[float, ...]
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    correlation: float
    unevenness: float
    goodput: float
    num_refused: int


def swings(objectives: Objectives) -> dict[AdmissionName, Swing]:
    """Each admission policy under the same load."""
    return {name: _swing(name, objectives) for name in ADMISSION_NAMES}


def _swing(admission: AdmissionName, objectives: Objectives) -> Swing:
    setup = Setup(
        machine=h200_8b(),
        num_prefill=16,
        num_decode=2,
        cache_tokens=CACHE_TOKENS,
        admission=admission,
        ttft_deadline=objectives.ttft,
        sample_seconds=SAMPLE_SECONDS,
    )
    rows = [
        TraceRow(i / PER_SECOND, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS) for i in range(NUM_REQUESTS)
    ]
    return _measured(simulate(setup, rows), objectives)


def _measured(cluster: Cluster, objectives: Objectives) -> Swing:
    end = cluster.jobs[-1].arrival
    samples = [s for s in cluster.samples if WARM_UP_SECONDS <= s.time <= end]
    prefill = np.array([s.num_prefill_tokens for s in samples], np.float64)
    decode = np.array([s.num_decode_tokens for s in samples], np.float64)
    return Swing(
        times=tuple(s.time for s in samples),
        prefill=tuple(prefill.tolist()),
        decode=tuple(decode.tolist()),
        correlation=float(np.corrcoef(prefill, decode)[0, 1]),
        unevenness=float(decode.std() / decode.mean()),
        goodput=sum(map(objectives.are_met_by, cluster.jobs)) / end,
        num_refused=sum(bool(job.refusal) for job in cluster.jobs),
    )
