"""Replay of recorded placement decisions, by the same or another policy.

Every decision is made on the snapshot that was recorded with it. The replay does not include the
effects of a different decision on later ones; use `bench simulate` for that.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.errors import InvalidArgumentError, NotFoundError
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.policy import PolicyName
from baton_router.routing.placement.record.record_format import Recorded, RecordReader, encoders_of


@dataclass(frozen=True, slots=True)
class Redecided:
    """Recorded decision together with its replay."""

    recorded: Recorded
    decision: Decision

    @property
    def prefill(self) -> str:
        """Prefill worker that the replay chose; empty as in `Recorded`."""
        return self.decision.placement.prefill if self.decision.placement else ""

    @property
    def decode(self) -> str:
        return self.decision.placement.decode if self.decision.placement else ""

    @property
    def is_same(self) -> bool:
        recorded = self.recorded
        if (self.prefill, self.decode) != (recorded.prefill, recorded.decode):
            return False
        return encoders_of(self.decision.placement) == recorded.encoders


def read_record(path: Path) -> Iterator[Recorded]:
    """Yields the decisions in one file, in order. Skips an incomplete last line, which the router
    may be writing. Raises `InvalidArgumentError` that names the line, or `NotFoundError`."""
    reader = RecordReader()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    recorded = reader.read(line)
                except InvalidArgumentError as error:
                    raise InvalidArgumentError(f"{path}:{number}", error.problem) from error
                if recorded is not None:
                    yield recorded
    except OSError as error:
        raise NotFoundError(f"the record cannot be read: {error}") from error


def replay(recorded: Iterable[Recorded], policy: PolicyName | None = None) -> Iterator[Redecided]:
    """Yields each decision with its replay by `policy`; None: by the recorded policy, which decides
    equally unless the code has changed."""
    for one in recorded:
        used = one.rules if policy is None else dataclasses.replace(one.rules, policy=policy)
        yield Redecided(one, Decision(used, one.inputs, used.decide(one.inputs)))


def cost_of(prefill: str, decode: str, placement: Placement | None) -> float | None:
    """Returns the cost of a choice by another placement of the request; None if it lacks it."""
    if placement is None or not decode:
        return None
    costs = {s.candidate.worker: s.cost for s in (placement.scored if prefill else placement.alone)}
    workers = (prefill, decode) if prefill else (decode,)
    return sum(costs[w] for w in workers) if costs.keys() >= set(workers) else None
