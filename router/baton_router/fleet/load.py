"""In-flight load of one worker, as counted by this router.

The same counts make a worker's snapshot live and in the simulator. Knows nothing of workers, calls
or clocks: what time it is, it is told.
"""

from dataclasses import dataclass

from baton_router.fleet.candidate import Candidate, Role
from baton_router.fleet.cost_rates import Rates
from baton_router.fleet.decayed_counter import DecayedCounter


@dataclass(frozen=True, slots=True)
class Share:
    """Load that one request adds to a worker.

    Attributes:
        num_sequences: sequences it runs there.
        num_tokens: prompt tokens that are yet to be computed there.
        num_held_tokens: tokens whose KV is held or promised there.
    """

    num_sequences: int = 1
    num_tokens: int = 0
    num_held_tokens: int = 0


class Load:
    """The sum of the shares that were taken and not given back.

    Attributes:
        num_changes: grows with each change.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self.num_held_tokens = 0
        self.last_turn = 0
        self._recent = DecayedCounter()

    def take(self, share: Share, now: float, turn: int) -> None:
        """Counts a share from now on.

        Args:
            now: seconds; never goes back.
            turn: grows from one share to the next, over all workers.
        """
        self.num_changes += 1
        self.num_sequences += share.num_sequences
        self.num_queued_tokens += share.num_tokens
        self.num_held_tokens += share.num_held_tokens
        self._recent.add(share.num_tokens, now)
        self.last_turn = turn

    def give_back(self, share: Share) -> None:
        """Counts a share that was taken no longer."""
        self.num_changes += 1
        self.num_sequences -= share.num_sequences
        self.num_queued_tokens -= share.num_tokens
        self.num_held_tokens -= share.num_held_tokens

    def candidate(
        self,
        worker: str,
        role: Role,
        pairing: bytes,
        now: float,
        *,
        num_cached_tokens: int,
        max_held_tokens: int | None,
        excluded: str = "",
        rates: Rates | None = None,
        version: str = "",
    ) -> Candidate:
        """The worker under this load, as placement sees it."""
        return Candidate(
            worker=worker,
            role=role,
            pairing=pairing,
            num_cached_tokens=num_cached_tokens,
            num_queued_tokens=self.num_queued_tokens,
            num_recent_tokens=self._recent.value(now),
            num_sequences=self.num_sequences,
            num_held_tokens=self.num_held_tokens,
            max_held_tokens=max_held_tokens,
            last_turn=self.last_turn,
            excluded=excluded,
            rates=rates,
            version=version,
        )
