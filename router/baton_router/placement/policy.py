"""Placement policies by name: what each counts as the cost of giving a request to a worker.

A policy is a pure function of one candidate and the length of the prompt, so that the same one
decides live, in a replay and in the simulator; eligibility and tie breaking are the same for all
(`baton_router.placement.placement`). Three of the policies are baselines for comparison.
"""

from collections.abc import Callable
from typing import Literal, get_args

from baton_router.fleet.candidate import Candidate
from baton_router.placement.cost_model import CostModel

Terms = dict[str, float]
Policy = Callable[[Candidate, int], Terms]
"""The cost of a candidate for a prompt of so many tokens, term by term; the least sum wins."""

PolicyName = Literal["baton", "prefix-only", "least-loaded", "round-robin"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

_COSTS = CostModel()

baton: Policy = _COSTS.terms
baton_alone: Policy = _COSTS.alone_terms


def policy_named(name: PolicyName) -> Policy:
    """The policy of that name, `baton` with the rates it has before anything was measured."""
    policies: dict[PolicyName, Policy] = {
        "baton": baton,
        "prefix-only": prefix_only,
        "least-loaded": least_loaded,
        "round-robin": round_robin,
    }
    return policies[name]


def alone_policy_named(name: PolicyName) -> Policy | None:
    """The same for decode workers that compute the prompt themselves; None: that policy knows no
    such thing."""
    return baton_alone if name == "baton" else None


def prefix_only(candidate: Candidate, num_tokens: int) -> Terms:
    """Whoever holds most of the prompt, however busy."""
    return {"uncached": float(max(0, num_tokens - candidate.num_cached_tokens))}


def least_loaded(candidate: Candidate, _num_tokens: int) -> Terms:
    """Whoever has least to do, whatever it holds."""
    if candidate.role == "prefill":
        return {"queue": float(candidate.num_queued_tokens)}
    return {"sequences": float(candidate.num_sequences)}


def round_robin(candidate: Candidate, _num_tokens: int) -> Terms:
    """Whoever was not chosen for longest."""
    return {"last turn": float(candidate.last_turn)}
