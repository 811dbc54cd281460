"""In-flight load of one worker, as counted by this router.

The router and the simulator make worker snapshots from the same counts. Independent of workers and
RPCs; the caller passes the time.
"""

from dataclasses import dataclass

from baton.rpc.worker_role import Role
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.fleet.decayed_counter import DecayedCounter


@dataclass(frozen=True, slots=True)
class Share:
    """Load that one request adds to a worker.

    Attributes:
        num_sequences: sequences of the request on the worker.
        num_tokens: prompt tokens that the worker has yet to compute.
        num_held_tokens: tokens whose KV the worker holds or has reserved.
        num_encoder_tokens: tokens of encoder inputs that the worker has yet to encode.
    """

    num_sequences: int = 1
    num_tokens: int = 0
    num_held_tokens: int = 0
    num_encoder_tokens: int = 0


class Load:
    """Load of one worker: the sum of all shares taken and not given back.

    Attributes:
        num_changes: number of changes so far.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self.num_held_tokens = 0
        self.num_queued_encoder_tokens = 0
        self.last_turn = 0
        self._recent = DecayedCounter()

    def take(self, share: Share, now: float, turn: int) -> None:
        """Adds a share to the load.

        Args:
            now: seconds; must not decrease between calls.
            turn: number of the share; increases from one share to the next, over all workers.
        """
        self.num_changes += 1
        self.num_sequences += share.num_sequences
        self.num_queued_tokens += share.num_tokens
        self.num_held_tokens += share.num_held_tokens
        self.num_queued_encoder_tokens += share.num_encoder_tokens
        self._recent.add(share.num_tokens, now)
        self.last_turn = turn

    def release(self, share: Share) -> None:
        """Subtracts a share that was taken before."""
        self.num_changes += 1
        self.num_sequences -= share.num_sequences
        self.num_queued_tokens -= share.num_tokens
        self.num_held_tokens -= share.num_held_tokens
        self.num_queued_encoder_tokens -= share.num_encoder_tokens

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
        cached_inputs: tuple[int, ...] = (),
        pending_inputs: tuple[int, ...] = (),
        limits: WorkerLimits | None = None,
        kv_dtype: str = "",
    ) -> Candidate:
        """Returns the placement candidate of the worker under this load."""
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
            num_queued_encoder_tokens=self.num_queued_encoder_tokens,
            cached_inputs=cached_inputs,
            pending_inputs=pending_inputs,
            limits=limits,
            kv_dtype=kv_dtype,
        )
