"""Cost model of placement: the expected cost, in seconds, of giving a request to a worker.

    prefill worker   uncached       computing the prompt tokens neither cached nor fetched
                     fetch          fetching a prefix from another worker; only if that takes less
                                    time than computing it
                     copy           recomputing the KV that such a copy evicts
                     encode         encoding the images after the cached prefix, or waiting for
                                    their outputs from other workers
                     stall          delay of later prompts by the images that it encodes itself
                     queue          computing the prompts and images queued before
                     congestion     delay of later requests by the uncached tokens and images
                     load           a small part of the tokens assigned to it recently
    decode worker    handoff        fixed cost of a handoff
                     transfer       moving the prompt's KV that it lacks
                     interference   decode steps of its running sequences
                     memory         recomputing the KV that no longer fits in its pool
    decode worker    as a prefill worker and a decode worker without a handoff, and
    alone            stall          delay of its sequences and later ones by the uncached tokens and
                                    by the images that it encodes itself, none if another worker
                                    computed them
                     congestion     at the speed of prefill workers, as in the pairs beside it

The TTFT is uncached, fetch, encode and queue. Minimizing it alone leaves a peer's cached prefix
unused whenever the peer is slightly busier, and the cluster recomputes the prefix; near saturation
on the conversation trace that costs far more in queueing. `congestion` prices this. It applies to
tokens only, at the pool's speed: the uncached rest must be computed on any worker, and a high price
on step time or a worker's own slowness would let noise in measured speeds move requests away from
cached prefixes; likewise noise between the fits of two pools would move prompts to decode workers.
An image counts as prompt tokens do if no worker has its output cached, at one speed for all
workers: where it is encoded is a matter of its seconds alone
(`baton_router.routing.placement.encoder_sources`). `load` decides among equal idle workers and
evens out load over minutes when queues are mostly empty.

A prefix is copied from another worker because of queues alone: fewer recent tokens than the source
give the fetching worker no advantage. So a prefix that is rarely used stays on one worker, and a
hot one spreads as soon as the workers that hold it have queues.

Learned cost rates (`baton_router.routing.fleet.worker_model`) are part of a worker's snapshot. No
term grows when more of the prompt is cached, except that `encode` and `stall` may together grow by
what `uncached` shrinks: cached text hides no encoding. Independent of the choice of workers.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.encoder_sources import EncoderSources, Encoding

FETCH = "fetch"
"""Cost term of a remote prefix fetch; present only if the fetch is worth it."""

ENCODE = "encode"
"""Cost term of the images; present only if the prompt has any."""


@dataclass(frozen=True, slots=True)
class CostModel(Rates):
    """Cost model: weights of the terms, and default rates for candidates that report none.

    The fields added to `Rates` are not fitted. The weights are choices. `fetch_seconds` covers two
    calls between workers, which no worker reports apart from the steps that they wait for; it is
    small compared with those and with computing a prefix or an image worth fetching. `copying`
    cannot be fitted: a miss on an evicted prefix looks like a miss on one that was never cached.

    Attributes:
        fetch_seconds: seconds to fetch a prefix or an encoder output, without its transfer and one
            step of each of the two workers, which share and take blocks between steps.
        encoding: cost of one second of encoding on a worker that computes prompts, in seconds of
            waiting for another worker's output. The delay of the request itself counts besides.
        copying: fraction of the KV evicted by a fetched prefix that is expected to be needed again.
        congestion: seconds of queueing that equal one second of avoidable computing.
        load: fraction of the tokens assigned recently that counts.
        full_share: occupancy of a decode worker's pool above which KV is evicted.
    """

    fetch_seconds: float = 5e-3
    encoding: float = 4.0
    copying: float = 0.1
    congestion: float = 15.0
    load: float = 0.01
    full_share: float = 0.9

    def terms(
        self, candidate: Candidate, num_tokens: int, encoders: EncoderSources | None = None
    ) -> dict[str, float]:
        """Returns the cost of a candidate for a prompt of `num_tokens`, in seconds by term.
        `encoders`: of its images; None: it has none."""
        rates = candidate.rates or self
        num_cached = candidate.num_cached_tokens
        if num_cached > num_tokens:
            num_cached = num_tokens
        if candidate.role == "decode":
            return self._decode_terms(rates, candidate, num_tokens - num_cached)
        recent = candidate.num_recent_tokens
        uncached, added = rates.prefill_and_added_seconds(num_tokens - num_cached, num_cached)
        terms = {"uncached": uncached}
        queue = rates.queue_seconds(
            candidate.num_queued_tokens, candidate.num_queued_encoder_tokens
        )
        encoding = encoders.encoding(candidate, num_cached, queue) if encoders else None
        if candidate.num_source_tokens > num_cached < num_tokens:
            num_found = candidate.num_source_tokens
            if num_found > num_tokens:
                num_found = num_tokens
            rest, rest_added = rates.prefill_and_added_seconds(num_tokens - num_found, num_found)
            num_fetched = num_found - num_cached
            moving = num_fetched * rates.transfer_seconds_per_token
            fetch = self.fetch_seconds + 2 * rates.prefill_seconds_per_step + moving
            saved, rest_encoding = uncached - rest, None
            if encoders and encoding:
                rest_encoding = encoders.encoding(candidate, num_found, queue + fetch)
                saved += encoding.cost - rest_encoding.cost
            if fetch < saved:
                copy = num_fetched * rates.prefill_seconds_per_token * self.copying
                terms = {"uncached": rest, FETCH: fetch, "copy": copy}
                added, encoding = rest_added, rest_encoding
                if candidate.num_source_recent_tokens > recent:
                    recent = candidate.num_source_recent_tokens
        terms["queue"] = queue
        terms["congestion"] = added / rates.slowness * self.congestion
        if encoding:
            self._add_encoding(terms, encoding)
        terms["load"] = recent * rates.prefill_seconds_per_token * self.load
        return terms

    def alone_terms(
        self,
        candidate: Candidate,
        num_tokens: int,
        prefill_rates: Collection[Rates] = (),
        encoders: EncoderSources | None = None,
    ) -> dict[str, float]:
        """Returns the cost of a decode worker that computes the prompt itself, in seconds by term.

        All else equal, it wins if computing takes no longer than a handoff, and is less likely to
        win the more sequences it runs. `prefill_rates`: of prefill workers that could compute it;
        `encoders` as of `terms`.
        """
        rates = candidate.rates or self
        num_cached = candidate.num_cached_tokens
        if num_cached > num_tokens:
            num_cached = num_tokens
        num_missing = num_tokens - num_cached
        uncached, added = rates.prefill_and_added_seconds(num_missing, num_cached)
        delays = [
            each.added_seconds(num_missing, num_cached) / each.slowness for each in prefill_rates
        ]
        displaced = self._num_displaced(candidate, num_missing)
        queue = rates.queue_seconds(
            candidate.num_queued_tokens, candidate.num_queued_encoder_tokens
        )
        terms = {
            "uncached": uncached,
            "queue": queue,
            "congestion": (min(delays) if delays else added / rates.slowness) * self.congestion,
            "stall": added * (1 + candidate.num_sequences),
            "interference": candidate.num_sequences * rates.interference_seconds_per_sequence,
            "memory": displaced * rates.prefill_seconds_per_token,
        }
        if encoders:
            self._add_encoding(terms, encoders.encoding(candidate, num_cached, queue))
        return terms

    def _add_encoding(self, terms: dict[str, float], encoding: Encoding) -> None:
        terms[ENCODE] = encoding.seconds
        terms["stall"] = terms.get("stall", 0.0) + encoding.stall
        terms["congestion"] += encoding.uncached * self.congestion

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
        """Returns the tokens of KV that exceed the pool's capacity (`full_share`)."""
        if candidate.max_held_tokens is None:
            return 0.0
        room = candidate.max_held_tokens * self.full_share - candidate.num_held_tokens
        return max(0.0, num_missing - room)
