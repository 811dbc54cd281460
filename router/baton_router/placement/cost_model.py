"""Cost model of placement: the expected cost, in seconds, of giving a request to a worker.

    prefill worker   uncached       computing what of the prompt it lacks and nobody gives it
                     pull           getting some of it from another worker; only where that takes
                                    less time than computing it
                     copy           computing again what such a copy displaces
                     queue          computing what it was given before and has not finished
                     crowding       what those who come behind wait for the uncached tokens
                     recent         a small part of the work it was given of late
    decode worker    handoff        taking a prompt over at all
                     transfer       moving the KV of the prompt that it lacks
                     interference   the steps of the sequences it runs
                     memory         computing again what no longer fits in its pool
    one alone        as a prefill worker and a decode worker without a handoff, and
                     interruption   what its sequences and those that come wait for the uncached
                                    tokens, which they would not if another worker computed them

Uncached and queue alone are the time to the first token. A worker chosen by that alone leaves its
peer's cached prefix unused whenever the peer is a little busier, and the cluster pays for computing
it again; on the conversation trace close to saturation that is paid back many times over in queues.
`crowding` is that price. It is put on tokens alone, and at the speed of the pool: the rest of a
prompt that nobody has cached must be computed wherever it goes, and a price many times over on what
a step or a worker itself takes would have that rest follow the noise in measured speeds, away from
what is cached. `recent` decides among workers that are idle and equal, and keeps their shares even
over minutes where queues, mostly empty, say nothing.

Where a prefix can be had from another worker, queues alone have it copied: to have had less to do
of late than that one is no credit to who would pull it. So a prefix that is used now and then stays
where it is, and a hot one is on several workers as soon as those that hold it keep prompts waiting.

How long things take on a worker is part of its snapshot, as far as it was learned
(`baton_router.fleet.worker_model`). No term grows when more of the prompt is cached. Independent of
how workers are chosen.
"""

from dataclasses import dataclass

from baton_router.fleet.candidate import Candidate
from baton_router.fleet.cost_rates import Rates

PULL = "pull"
"""The term of a prefill worker that is worth getting a prefix for."""


@dataclass(frozen=True, slots=True)
class CostModel(Rates):
    """Weights of the cost terms, and the rates of candidates that report none.

    What is here and not in `Rates` is not fitted. The weights are choices. `pull_seconds` is two
    calls between workers, which no worker reports apart from the steps that they wait for; it is
    small beside those and beside what a prefix worth pulling takes to compute. For `copying` there
    is nothing to be fitted to: what was displaced and is asked for again looks like what nobody
    ever had.

    Attributes:
        pull_seconds: to get a prefix from another worker, beside what moving its KV takes and a
            step of either, for blocks are lent and taken between steps.
        copying: the part of what a pulled prefix displaces that is thought to be asked for again.
        crowding: how many seconds of queue a second of needless computing is worth.
        recency: the part of recent work that counts.
        full_share: the part of a decode worker's pool beyond which KV is displaced.
    """

    pull_seconds: float = 5e-3
    copying: float = 0.1
    crowding: float = 15.0
    recency: float = 0.01
    full_share: float = 0.9

    def terms(self, candidate: Candidate, num_tokens: int) -> dict[str, float]:
        """The cost of a candidate for a prompt of so many tokens, term by term."""
        rates = candidate.rates or self
        num_cached = min(candidate.num_cached_tokens, num_tokens)
        if candidate.role == "decode":
            return self._decode_terms(rates, candidate, num_tokens - num_cached)
        recent, getting = candidate.num_recent_tokens, {}
        pull = self._pull_seconds(rates, candidate, num_tokens)
        if pull is not None:
            copy = self._copy_seconds(rates, candidate, num_tokens)
            getting = {PULL: pull, "copy": copy}
            num_cached = min(candidate.num_source_tokens, num_tokens)
            recent = max(recent, candidate.num_source_recent_tokens)
        return {
            "uncached": rates.prefill_seconds(num_tokens - num_cached, num_cached),
            **getting,
            "queue": rates.queue_seconds(candidate.num_queued_tokens),
            "crowding": self._crowding_seconds(rates, num_tokens, num_cached),
            "recent": recent * rates.prefill_seconds_per_token * self.recency,
        }

    def alone_terms(self, candidate: Candidate, num_tokens: int) -> dict[str, float]:
        """The cost of a decode worker that computes the prompt itself.

        Where all else is equal, it does so if that takes no longer than a handoff would, and the
        less so the more sequences it runs.
        """
        rates = candidate.rates or self
        num_cached = min(candidate.num_cached_tokens, num_tokens)
        uncached = rates.prefill_seconds(num_tokens - num_cached, num_cached)
        added = rates.added_seconds(num_tokens - num_cached, num_cached)
        displaced = self._num_displaced(candidate, num_tokens - num_cached)
        return {
            "uncached": uncached,
            "queue": rates.queue_seconds(candidate.num_queued_tokens),
            "crowding": self._crowding_seconds(rates, num_tokens, num_cached),
            "interruption": added * (1 + candidate.num_sequences),
            "interference": candidate.num_sequences * rates.interference_seconds_per_sequence,
            "memory": displaced * rates.prefill_seconds_per_token,
        }

    def _crowding_seconds(self, rates: Rates, num_tokens: int, num_cached: int) -> float:
        added = rates.added_seconds(num_tokens - num_cached, num_cached)
        return added / rates.slowness * self.crowding

    def _pull_seconds(self, rates: Rates, candidate: Candidate, num_tokens: int) -> float | None:
        """How long it takes to get what the candidate's source has and it lacks; None if there is
        nothing, or it would compute that sooner."""
        if candidate.num_source_tokens <= candidate.num_cached_tokens:
            return None
        num_cached = min(candidate.num_cached_tokens, num_tokens)
        num_found = min(candidate.num_source_tokens, num_tokens)
        if num_found == num_cached:
            return None
        moving = (num_found - num_cached) * rates.transfer_seconds_per_token
        spared = rates.prefill_seconds(num_tokens - num_cached, num_cached)
        spared -= rates.prefill_seconds(num_tokens - num_found, num_found)
        pull = self.pull_seconds + 2 * rates.prefill_seconds_per_step + moving
        return pull if pull < spared else None

    def _copy_seconds(self, rates: Rates, candidate: Candidate, num_tokens: int) -> float:
        num_pulled = min(candidate.num_source_tokens, num_tokens) - candidate.num_cached_tokens
        return num_pulled * rates.prefill_seconds_per_token * self.copying

    def _decode_terms(
        self, rates: Rates, candidate: Candidate, num_missing: int
    ) -> dict[str, float]:
        displaced = self._num_displaced(candidate, num_missing)
        return {
            "handoff": rates.handoff_seconds,
            "transfer": num_missing * rates.transfer_seconds_per_token,
            "interference": candidate.num_sequences * rates.interference_seconds_per_sequence,
            "memory": displaced * rates.prefill_seconds_per_token,
        }

    def _num_displaced(self, candidate: Candidate, num_missing: int) -> float:
        """Tokens whose KV would not fit any more."""
        if candidate.max_held_tokens is None:
            return 0.0
        room = candidate.max_held_tokens * self.full_share - candidate.num_held_tokens
        return max(0.0, num_missing - room)
