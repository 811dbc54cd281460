"""Scheduling policies: the order in which sequences are served, and encode jobs begun. Pure
orderings, chosen by name.

A policy gives each request and job a rank when it is added; smaller is served first, and the
largest rank is preempted first. A rank never changes and still ages, so that low priorities do not
starve: of two waiting requests, the order by `priority - age / AGEING_STEPS` is at any time the
order by `priority + arrival / AGEING_STEPS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

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


class Ranked(Protocol):
    """Request or encode job, as a policy sees it.

    Attributes:
        num_tokens: tokens of the request on its arrival, or of the job's encoder input.
        priority, arrival_time, first_token_deadline: as of `EngineRequest`.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def first_token_deadline(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Scheduling policy: an order of requests and encode jobs, and the place of decodes in a step.

    Attributes:
        rank: `rank(request, n, s)`, of a request or job that is the n-th to arrive, in step s.
    """

    decode_order: DecodeOrder
    rank: Callable[[Ranked, int, int], float]


class Ranker:
    """Ranks of all requests and encode jobs of one scheduler, by its policy.

    Attributes:
        num_steps: steps planned so far, by which ranks age.
    """

    def __init__(self, policy: Policy) -> None:
        self.num_steps = 0
        self._policy = policy
        self._num_arrived = 0

    def rank(self, request: Ranked) -> tuple[float, int]:
        """Returns the rank and the order of arrival of a request or job that arrives now. Such
        pairs are in the policy's order, and never equal."""
        arrival = self._num_arrived
        self._num_arrived += 1
        return self._policy.rank(request, arrival, self.num_steps), arrival


def _by_arrival(_request: Ranked, arrival: int, _step: int) -> float:
    return float(arrival)


def _by_priority(request: Ranked, _arrival: int, step: int) -> float:
    return request.priority + step / AGEING_STEPS


def _by_deadline(request: Ranked, _arrival: int, _step: int) -> float:
    if request.first_token_deadline is not None:
        return request.first_token_deadline
    return request.arrival_time + DEFAULT_DEADLINE_SECONDS


def _by_length(request: Ranked, _arrival: int, step: int) -> float:
    return float(request.num_tokens + step * AGEING_TOKENS)


POLICIES = {
    "fcfs": Policy(DecodeOrder.BY_RANK, _by_arrival),
    "priority": Policy(DecodeOrder.BY_RANK, _by_priority),
    "prefill-first": Policy(DecodeOrder.AFTER_BEGUN, _by_arrival),
    "decode-first": Policy(DecodeOrder.FIRST, _by_arrival),
    "deadline": Policy(DecodeOrder.BY_RANK, _by_deadline),
    "shortest-prefill": Policy(DecodeOrder.FIRST, _by_length),
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
