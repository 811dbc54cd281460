"""Decides again what was recorded, by other rules or the same, and says what differs.

Every decision is made on the snapshot that was recorded with it: what would have followed from
deciding otherwise is not known here; `bench simulate` is for that.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.errors import InvalidArgumentError, NotFoundError
from baton_router.placement.decision import Decision
from baton_router.placement.placement import Placement
from baton_router.placement.policy import PolicyName
from baton_router.placement.record.record_format import Recorded, RecordReader


@dataclass(frozen=True, slots=True)
class Redecided:
    """A recorded decision beside the one that is made now."""

    recorded: Recorded
    decision: Decision

    @property
    def prefill(self) -> str:
        """Who is chosen now; empty as in `Recorded`."""
        return self.decision.placement.prefill if self.decision.placement else ""

    @property
    def decode(self) -> str:
        return self.decision.placement.decode if self.decision.placement else ""

    @property
    def is_same(self) -> bool:
        return (self.prefill, self.decode) == (self.recorded.prefill, self.recorded.decode)


def read_record(path: Path) -> Iterator[Recorded]:
    """The decisions in one file, in order. A last line without an end is left out: the router may
    be writing it. Raises `InvalidArgumentError` that names the line, and `NotFoundError`."""
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
    """Decides again. `policy` None: the one that was recorded, which comes to the same unless the
    code has changed."""
    for one in recorded:
        used = one.rules if policy is None else dataclasses.replace(one.rules, policy=policy)
        yield Redecided(one, Decision(used, one.question, used.decide(one.question)))


def reckoned(prefill: str, decode: str, placement: Placement | None) -> float | None:
    """What a choice costs by another placement of the same request; None: it has no such choice."""
    if placement is None or not decode:
        return None
    costs = {s.candidate.worker: s.cost for s in (placement.scored if prefill else placement.alone)}
    workers = (prefill, decode) if prefill else (decode,)
    return sum(costs[w] for w in workers) if costs.keys() >= set(workers) else None
