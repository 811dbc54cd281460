"""Candidate worker of a placement: a snapshot, the only input of the decision about it.

Independent of the source of the snapshot and of the placement policy.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.context_length import ContextLength
from baton.rpc.worker_role import Role
from baton_router.routing.fleet.cost_rates import PRIOR, Rates

ONE_DTYPE = (
    "start all with the same --dtype and --kv-cache-dtype, since auto depends on the device and "
    "the CPU"
)
"""Advice where workers whose KV is of unlike dtypes cannot exchange blocks."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of one worker for a single request, whatever else it runs.

    Attributes:
        max_model_len: maximum tokens of a sequence, prompt and output together.
        block_size: tokens of a KV block.
        num_blocks: KV blocks of its pool; None: no bound, since every layer has a window.
        max_num_seqs: maximum sequences that run at once; None: not reported, as by older workers.
    """

    max_model_len: int
    block_size: int
    num_blocks: int | None = None
    max_num_seqs: int | None = None

    def held_tokens(self, num_together: int = 1) -> int | None:
        """Returns the maximum tokens of each of `num_together` sequences in its pool; None: no
        bound."""
        if self.num_blocks is None:
            return None
        return self.num_blocks // num_together * self.block_size

    def context_length(self, num_together: int = 1) -> ContextLength:
        """Returns the maximum tokens of each of `num_together` sequences that it answers with."""
        return ContextLength(self.max_model_len, self.held_tokens(num_together))


class Candidate(NamedTuple):
    """Snapshot of one worker. A tuple, since many are made for each request.

    Attributes:
        pairing: workers exchange blocks only if their pairings are equal.
        num_cached_tokens: leading prompt tokens whose KV it has cached.
        num_queued_tokens: prompt tokens assigned to it and not computed yet.
        num_recent_tokens: prompt tokens assigned to it for computing recently, decayed
            (`baton_router.routing.fleet.decayed_counter`).
        num_sequences: sequences assigned to it and not finished.
        num_held_tokens: tokens whose KV those sequences hold or have reserved.
        max_held_tokens: its KV capacity, in tokens; None: unknown.
        last_turn: number of its last request; larger is more recent. 0 before the first.
        rates: its learned cost rates; None: nothing was learned.
        version: Baton version; part of `pairing`. Empty: not reported.
        num_queued_encoder_tokens: tokens of encoder inputs assigned to it and not encoded yet.
        cached_inputs: the prompt's encoder inputs, by index, whose outputs it has cached.
        pending_inputs: those whose outputs it will have soon, for prompts assigned to it before.
        limits: its limits for a single request; None: unknown, every request fits.
        kv_dtype: of its KV, which is that of its weights by default; part of `pairing`. Empty: not
            reported.
        source: worker that holds more of the prompt and could lend it to this one; empty if there
            is none, or it was not looked up (`baton_router.routing.placement.prefix_source`).
        num_source_tokens: leading prompt tokens whose KV the source has cached.
        num_source_recent_tokens: `num_recent_tokens` of the source.
        excluded: reason why it cannot be chosen; empty if it can.
    """

    worker: str
    role: Role
    pairing: bytes
    num_cached_tokens: int = 0
    num_queued_tokens: int = 0
    num_recent_tokens: float = 0.0
    num_sequences: int = 0
    num_held_tokens: int = 0
    max_held_tokens: int | None = None
    last_turn: int = 0
    excluded: str = ""
    rates: Rates | None = None
    version: str = ""
    num_queued_encoder_tokens: int = 0
    cached_inputs: tuple[int, ...] = ()
    pending_inputs: tuple[int, ...] = ()
    limits: WorkerLimits | None = None
    kv_dtype: str = ""
    source: str = ""
    num_source_tokens: int = 0
    num_source_recent_tokens: float = 0.0

    def queue_seconds(self, default: Rates = PRIOR) -> float:
        """Returns the seconds to compute what is queued, at `default` rates if it has none."""
        rates = self.rates or default
        return rates.queue_seconds(self.num_queued_tokens, self.num_queued_encoder_tokens)
