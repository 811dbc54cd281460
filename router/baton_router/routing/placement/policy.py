"""Placement policies by name: cost functions of assigning a request to a worker.

A policy is a pure function of one candidate and the prompt's length, and the same one decides in
the router, in a replay and in the simulator; eligibility and tie breaking are the same for all
(`baton_router.routing.placement.placement`). All but `baton` are baselines for comparison.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, get_args

from baton.cluster.prefix import HashedInput
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.cost_model import CostModel
from baton_router.routing.placement.encoder_sources import EncoderSources

Terms = dict[str, float]
Policy = Callable[[Candidate, int], Terms]
"""Cost of a candidate for a prompt of a number of tokens, by term; the least sum wins."""

PolicyName = Literal["baton", "prefix-only", "least-loaded", "round-robin"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

_COSTS = CostModel()

baton: Policy = _COSTS.terms


def policy_named(name: PolicyName, encoders: EncoderSources | None = None) -> Policy:
    """Returns the policy called `name`; `baton` with default rates for candidates without any.
    `encoders`: of the prompt's images; None: it has none."""
    policies: dict[PolicyName, Policy] = {
        "baton": baton if encoders is None else partial(_COSTS.terms, encoders=encoders),
        "prefix-only": prefix_only,
        "least-loaded": least_loaded,
        "round-robin": round_robin,
    }
    return policies[name]


def alone_policy_named(
    name: PolicyName,
    prefill_rates: Collection[Rates] = (),
    encoders: EncoderSources | None = None,
) -> Policy | None:
    """Returns the policy called `name` for decode workers that compute the prompt themselves, while
    prefill workers have `prefill_rates`; None if it has no cost for that."""
    if name != "baton":
        return None
    return partial(_COSTS.alone_terms, prefill_rates=prefill_rates, encoders=encoders)


def encoder_sources(
    images: Sequence[HashedInput], candidates: Collection[Candidate]
) -> EncoderSources | None:
    """Returns the encoder sources of a prompt's images; None if it has none."""
    if not images:
        return None
    return EncoderSources(images, candidates, _COSTS, _COSTS.fetch_seconds, _COSTS.encoding)


def prefix_only(candidate: Candidate, num_tokens: int) -> Terms:
    """Prefers the longest cached prefix, regardless of load."""
    return {"uncached": float(max(0, num_tokens - candidate.num_cached_tokens))}


def least_loaded(candidate: Candidate, _num_tokens: int) -> Terms:
    """Prefers the least loaded worker, regardless of its prefix cache."""
    if candidate.role == "prefill":
        return {"queue": float(candidate.num_queued_tokens)}
    return {"sequences": float(candidate.num_sequences)}


def round_robin(candidate: Candidate, _num_tokens: int) -> Terms:
    """Prefers the least recently chosen worker."""
    return {"last request": float(candidate.last_turn)}
