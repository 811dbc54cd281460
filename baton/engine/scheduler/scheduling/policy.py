"""Scheduling policies: the order in which sequences are served. Pure orderings, chosen by name.

A policy gives each request a rank when it is added; smaller is served first, and the largest rank
is preempted first. A rank never changes and still ages, so that low priorities do not starve: of
two waiting requests, the order by `priority - age / AGEING_STEPS` is at any time the order by
`priority + arrival / AGEING_STEPS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from baton.engine.scheduler.sequences.sequence import Request

# Steps in the queue that outweigh one level of priority.
AGEING_STEPS = 1000
# Prompt tokens that one step in the queue outweighs under `shortest-prefill`.
AGEING_TOKENS = 64
# Seconds from arrival to the deadline of the first token, if the request sets none.
DEFAULT_DEADLINE_SECONDS = 30.0


class DecodeOrder(Enum):
    """Place of decodes in the order in which a step is filled."""

    FIRST = auto()
    """Before all prompts."""
    AFTER_BEGUN = auto()
    """After prompts that have begun, before those that wait."""
    BY_RANK = auto()
    """Each before the prompts that rank after it, and before those that wait."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Scheduling policy: an order of requests, and the place of decodes within a step.

    Attributes:
        rank: `rank(request, n, s)`, of a request that is the n-th to arrive, in step s.
    """

    decode_order: DecodeOrder
    rank: Callable[[Request, int, int], float]


def _by_arrival(_request: Request, arrival: int, _step: int) -> float:
    return float(arrival)


def _by_priority(request: Request, _arrival: int, step: int) -> float:
    return request.priority + step / AGEING_STEPS


def _by_deadline(request: Request, _arrival: int, _step: int) -> float:
    if request.first_token_deadline is not None:
        return request.first_token_deadline
    return request.arrival_time + DEFAULT_DEADLINE_SECONDS


def _by_prompt_length(request: Request, _arrival: int, step: int) -> float:
    return float(len(request.token_ids) + step * AGEING_TOKENS)


POLICIES = {
    "fcfs": Policy(DecodeOrder.BY_RANK, _by_arrival),
    "priority": Policy(DecodeOrder.BY_RANK, _by_priority),
    "prefill-first": Policy(DecodeOrder.AFTER_BEGUN, _by_arrival),
    "decode-first": Policy(DecodeOrder.FIRST, _by_arrival),
    "deadline": Policy(DecodeOrder.BY_RANK, _by_deadline),
    "shortest-prefill": Policy(DecodeOrder.FIRST, _by_prompt_length),
}
"""
fcfs: strictly first come, first served, a long prompt before the decodes that arrived after it.
priority: smaller `priority` first, ageing.
prefill-first: prompts that have begun, then decodes, then prompts that wait: a decode waits until
    the prompts that have begun are computed, and is in each step in which another one begins.
decode-first: decodes before prompts; no decode waits for a prompt.
deadline: earliest deadline of the first token first.
shortest-prefill: decodes, then short prompts before long ones, ageing.
"""
