"""Policies and rates of arrival, one simulation each, and colocated workers beside them."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from baton.errors import InvalidArgumentError
from baton_router.routing.placement.policy import PolicyName
from baton_simulator.cluster import Cluster, OnProgress
from baton_simulator.colocated import Colocated
from baton_simulator.disaggregated import Disaggregated
from baton_simulator.outcome import Objectives, Outcome, outcome_of
from baton_simulator.setup import Setup, jobs_of
from baton_simulator.traces import TraceRow

_FEW_ROWS = 100  # whose objects are traversed faster than all others that a process has


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Comparison of each policy at each rate, and of the first policy on colocated workers.

    Attributes:
        setup: of every cluster but for its policy.
        rates: times the trace's own rate of arrivals, above 0.
    """

    setup: Setup
    policies: tuple[PolicyName, ...]
    rates: tuple[float, ...]
    objectives: Objectives

    def __post_init__(self) -> None:
        for rate in self.rates:
            if not 0 < rate < float("inf"):
                raise InvalidArgumentError("rate", f"is {rate:g}; must be above 0")
        for name in ("ttft", "itl"):
            value = getattr(self.objectives, name)
            if not value > 0:
                raise InvalidArgumentError(f"slo_{name}", f"is {value * 1e3:g} ms; must be above 0")

    def setups(self) -> dict[str, Setup]:
        """By case: what is compared at each rate."""
        cases: dict[str, Setup] = {p: replace(self.setup, policy=p) for p in self.policies}
        first = self.policies[0]
        cases[f"colocated, {first}"] = replace(self.setup, policy=first, is_colocated=True)
        return cases

    def run(
        self, rows: Sequence[TraceRow], on_progress: Callable[[str, float], OnProgress]
    ) -> Iterator[Outcome]:
        """Simulates one case after the other.

        Args:
            on_progress: given case and rate, what to tell the progress of that simulation.
        """
        for rate in self.rates:
            for case, setup in self.setups().items():
                cluster = simulate(setup, rows, rate, on_progress(case, rate))
                yield outcome_of(cluster, case, rate, self.objectives)


def simulate(
    setup: Setup,
    rows: Sequence[TraceRow],
    rate: float = 1.0,
    on_progress: OnProgress = lambda _done, _total, _now: None,
) -> Cluster:
    """A cluster that has served all of a trace."""
    kind = Colocated if setup.is_colocated else Disaggregated
    cluster = kind(setup, jobs_of(rows, rate, setup.block_size))
    with _frozen() if len(rows) > _FEW_ROWS else nullcontext():
        cluster.run(on_progress)
    return cluster


@contextmanager
def _frozen() -> Iterator[None]:
    """Keeps the garbage collector from traversing a million objects that stay again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
