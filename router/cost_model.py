"""What it is expected to cost to give a request to a worker, in seconds.

    prefill worker   uncached       computing what of the prompt it lacks
                     queue          computing what it was given before and has not finished
                     crowding       what those who come behind wait for the uncached part
                     recent         a small part of the work it was given of late
    decode worker    transfer       moving the KV of the prompt that it lacks
                     interference   the steps of the sequences it runs
                     memory         computing again what no longer fits in its pool

Uncached and queue alone are the time to the first token. A worker chosen by that alone leaves its
peer's cached prefix unused whenever the peer is a little busier, and the cluster pays for computing
it again; on the conversation trace close to saturation that is paid back many times over in queues.
`crowding` is that price. `recent` decides among workers that are idle and equal, and keeps their
shares even over minutes where queues, mostly empty, say nothing.

No term grows when more of the prompt is cached. Knows nothing of how workers are chosen.
"""

from dataclasses import dataclass

from router.candidate import Candidate


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long things take, and what they weigh.

    Attributes:
        prefill_seconds_per_token: to compute a token of a prompt.
        attention_seconds_per_pair: to attend from one such token to one before it.
        transfer_seconds_per_token: to move a token's KV to a decode worker.
        interference_seconds_per_sequence: by which a running sequence slows one that joins it.
        crowding: how many seconds of queue a second of needless computing is worth.
        recency: the part of recent work that counts.
        full_share: the part of a decode worker's pool beyond which KV is displaced.
    """

    prefill_seconds_per_token: float = 1e-4
    attention_seconds_per_pair: float = 0.0
    transfer_seconds_per_token: float = 5e-6
    interference_seconds_per_sequence: float = 8e-4
    crowding: float = 15.0
    recency: float = 0.01
    full_share: float = 0.9

    def terms(self, candidate: Candidate, num_tokens: int) -> dict[str, float]:
        """The cost of a candidate for a prompt of so many tokens, term by term."""
        num_cached = min(candidate.num_cached_tokens, num_tokens)
        if candidate.role == "decode":
            return self._decode_terms(candidate, num_tokens - num_cached)
        uncached = self.prefill_seconds(num_tokens - num_cached, num_cached)
        return {
            "uncached": uncached,
            "queue": candidate.num_queued_tokens * self.prefill_seconds_per_token,
            "crowding": uncached * self.crowding,
            "recent": candidate.num_recent_tokens * self.prefill_seconds_per_token * self.recency,
        }

    def prefill_seconds(self, num_uncached: int, num_cached: int) -> float:
        """How long a prompt takes of which so many leading tokens are cached."""
        num_pairs = num_uncached * (num_cached + num_uncached / 2)
        linear = num_uncached * self.prefill_seconds_per_token
        return linear + num_pairs * self.attention_seconds_per_pair

    def _decode_terms(self, candidate: Candidate, num_missing: int) -> dict[str, float]:
        return {
            "transfer": num_missing * self.transfer_seconds_per_token,
            "interference": candidate.num_sequences * self.interference_seconds_per_sequence,
            "memory": self._num_displaced(candidate, num_missing) * self.prefill_seconds_per_token,
        }

    def _num_displaced(self, candidate: Candidate, num_missing: int) -> float:
        """Tokens whose KV would not fit any more."""
        if candidate.max_held_tokens is None:
            return 0.0
        room = candidate.max_held_tokens * self.full_share - candidate.num_held_tokens
        return max(0.0, num_missing - room)
