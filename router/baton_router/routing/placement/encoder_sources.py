"""Sources of the encoder outputs, such as those of images, that a prompt needs. Pure.

A computing worker needs the outputs of the inputs that its cached prefix does not cover, and lacks
those that it has not cached. One that another worker of its pairing has cached is fetched from the
least busy of these. Others are computed by the encode pool, in the order of the prompt, each on the
worker that finishes it first, or on one where it is queued for another request already. In place of
either, the computing worker encodes an input itself.

Encoding elsewhere overlaps the queue of the computing worker and the text before the image; what
is not hidden delays the first token. The longest of these waits counts. Encoding on the computing
worker adds up, and delays other sequences there, too: prompts to come, which costs more than the
same seconds of waiting for an encode worker (`CostModel.encoding`), and running ones. Of all
divisions of the inputs between both, the cheapest is chosen.

KV and outputs take equally long to transfer, by assumption: outputs are usually the smaller ones.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh64_intdigest

from baton.cluster.prefix import HashedInput
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """Source of one encoder output that the computing worker lacks.

    Attributes:
        input: index of the encoder input in the request.
        num_tokens: its tokens.
        worker: source; empty: the computing worker encodes it itself.
        only_cached: the source has it cached, and computes nothing.
        terms: seconds until the computing worker has the output, by term: from now, or from the
            input's turn in the prompt if it encodes it itself.
    """

    input: int
    num_tokens: int
    worker: str = ""
    only_cached: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)


class Encoding(NamedTuple):
    """Encoder work for a prompt on one computing worker.

    Attributes:
        seconds: delay of the first token.
        stall: delay of other sequences by the inputs that the worker encodes itself.
        uncached: seconds to encode the inputs whose outputs no worker has cached or queued, at the
            speed of the pairing's fastest worker, wherever they are encoded.
        lacking: inputs whose outputs the worker lacks, by index.
        fetched: those of them whose outputs come from other workers.
    """

    seconds: float = 0.0
    stall: float = 0.0
    uncached: float = 0.0
    lacking: tuple[int, ...] = ()
    fetched: frozenset[int] = frozenset()

    @property
    def cost(self) -> float:
        return self.seconds + self.stall


_NONE = Encoding()


class _Source(NamedTuple):
    """Worker that has an output after `seconds`, the sum of `terms`; there are none if it has the
    output cached."""

    worker: str
    terms: Mapping[str, float]
    seconds: float


class _Pairing:
    """Workers of one pairing, added in the order of their loads.

    Attributes:
        holders: the least busy worker that has an output cached, by index of the input.
        queued: the worker of the encode pool that will have computed an output first.
        encoders: workers of the encode pool.
        token_seconds: least seconds to encode a token.
        sources: cache of `EncoderSources._sources`, by what is lacking.
    """

    def __init__(self) -> None:
        self.holders: dict[int, str] = {}
        self.queued: dict[int, Candidate] = {}
        self.encoders: list[Candidate] = []
        self.token_seconds = math.inf
        self.sources: dict[tuple[int, ...], dict[int, _Source]] = {}

    def add(self, candidate: Candidate, rates: Rates) -> None:
        token_seconds = rates.encoder_seconds_per_token / rates.slowness
        self.token_seconds = min(self.token_seconds, token_seconds)
        if candidate.excluded:
            return
        for index in candidate.cached_inputs:
            self.holders.setdefault(index, candidate.worker)
        if candidate.role == "encode":
            self.encoders.append(candidate)
            for index in candidate.pending_inputs:
                self.queued.setdefault(index, candidate)


class EncoderSources:
    """Encoder sources for the inputs of one request, whichever worker computes the prompt.

    Args:
        inputs: the inputs, in the order of their spans.
        candidates: all workers; only those that can take requests are sources.
        default: rates of workers that report none.
        fetch_seconds, encoding: as of `CostModel`.
    """

    def __init__(
        self,
        inputs: Sequence[HashedInput],
        candidates: Collection[Candidate],
        default: Rates,
        fetch_seconds: float,
        encoding: float,
    ) -> None:
        self._inputs = inputs
        self._num_tokens = [end - start for start, end, _ in inputs]
        self._default = default
        self._fetch_seconds = fetch_seconds
        self._encoding_price = encoding
        self._pairings: dict[bytes, _Pairing] = {}
        for candidate in sorted(candidates, key=_load):
            pairing = self._pairings.setdefault(candidate.pairing, _Pairing())
            pairing.add(candidate, candidate.rates or default)

    def encoding(self, candidate: Candidate, num_cached: int, begins: float) -> Encoding:
        """Returns the encoder work for the prompt on `candidate`.

        Args:
            num_cached: leading prompt tokens whose KV it has cached or fetches.
            begins: seconds from now until it computes the token after them.
        """
        lacking = self._lacking(candidate, num_cached)
        if not lacking:
            return _NONE
        rates, pairing = candidate.rates or self._default, self._pairings[candidate.pairing]
        sources = self._sources(pairing, lacking)
        waits = []
        for index in lacking:
            wait = math.inf
            if index in sources:
                num_before = max(0, self._inputs[index][0] - num_cached)
                turn = begins + num_before * rates.prefill_seconds_per_token
                done = sources[index].seconds + self._seconds_to_fetch(rates, index)
                wait = max(0.0, done - turn)
            waits.append((wait, index))
        waits.sort()
        own = [self._num_tokens[index] * rates.encoder_seconds_per_token for _, index in waits]
        num_delayed = self._encoding_price
        if candidate.role == "decode":
            num_delayed += candidate.num_sequences
        num_fetched = _num_fetched(waits, [seconds * (1 + num_delayed) for seconds in own])
        encoded = sum(own[num_fetched:])
        longest = waits[num_fetched - 1][0] if num_fetched else 0.0
        known = pairing.holders.keys() | pairing.queued.keys()
        num_uncached = sum(self._num_tokens[index] for index in lacking if index not in known)
        return Encoding(
            longest + encoded,
            encoded * num_delayed,
            num_uncached * pairing.token_seconds,
            lacking,
            frozenset(index for _, index in waits[:num_fetched]),
        )

    def choices(self, candidate: Candidate, encoding: Encoding) -> tuple[EncoderChoice, ...]:
        """Returns the source of each output that `candidate` lacks, in the order of the prompt."""
        rates, pairing = candidate.rates or self._default, self._pairings[candidate.pairing]
        sources = self._sources(pairing, encoding.lacking)
        choices = []
        for index in encoding.lacking:
            num_tokens = self._num_tokens[index]
            if index in encoding.fetched:
                worker, terms, _ = sources[index]
                pulled = {**terms, "fetch": self._seconds_to_fetch(rates, index)}
                choice = EncoderChoice(index, num_tokens, worker, not terms, pulled)
            else:
                own = num_tokens * rates.encoder_seconds_per_token
                choice = EncoderChoice(index, num_tokens, terms={"encode": own})
            choices.append(choice)
        return tuple(choices)

    def _lacking(self, candidate: Candidate, num_cached: int) -> tuple[int, ...]:
        """Returns the inputs whose outputs a worker lacks; of equal inputs the first."""
        found: dict[bytes, int] = {}
        for index, (_, end, content) in enumerate(self._inputs):
            has_it = index in candidate.cached_inputs or index in candidate.pending_inputs
            if end > num_cached and not has_it:
                found.setdefault(content, index)
        return tuple(found.values())

    def _sources(self, pairing: _Pairing, lacking: tuple[int, ...]) -> dict[int, _Source]:
        """Returns the sources of the outputs that other workers have, or could compute."""
        sources = pairing.sources.get(lacking)
        if sources is None:
            sources = pairing.sources[lacking] = {}
            queues = {c.worker: c.queue_seconds(self._default) for c in pairing.encoders}
            for index in lacking:
                holder, queued = pairing.holders.get(index), pairing.queued.get(index)
                if holder is not None:
                    sources[index] = _Source(holder, {}, 0.0)
                elif queued is not None:
                    queue = queued.queue_seconds(self._default)
                    sources[index] = _Source(queued.worker, {"queue": queue}, queue)
                elif queues:
                    source = sources[index] = self._encoder(pairing, queues, index)
                    queues[source.worker] += source.terms["encode"]
        return sources

    def _encoder(self, pairing: _Pairing, queues: Mapping[str, float], index: int) -> _Source:
        """Returns the worker of the encode pool that finishes an input first. Of equal ones, equal
        inputs have the same, by rendezvous hashing."""
        num_tokens, seed = self._num_tokens[index], xxh64_intdigest(self._inputs[index][2])
        best = (math.inf, 0, "", 0.0)
        for candidate in pairing.encoders:
            rates, worker = candidate.rates or self._default, candidate.worker
            seconds = rates.prefill_seconds_per_step + num_tokens * rates.encoder_seconds_per_token
            rank = xxh64_intdigest(worker.encode(), seed)
            best = min(best, (queues[worker] + seconds, rank, worker, seconds))
        _, _, worker, seconds = best
        done = queues[worker] + seconds
        return _Source(worker, {"queue": queues[worker], "encode": seconds}, done)

    def _seconds_to_fetch(self, rates: Rates, index: int) -> float:
        """Returns the seconds in which a worker with these rates fetches an output."""
        steps = 2 * rates.prefill_seconds_per_step
        moving = self._num_tokens[index] * rates.transfer_seconds_per_token
        return self._fetch_seconds + steps + moving


def _num_fetched(waits: Sequence[tuple[float, int]], own_costs: Sequence[float]) -> int:
    """Returns how many outputs are fetched, those with the shortest waits, so that the longest of
    these and the own costs of the others are least. Both are in the order of the waits."""
    best, least, rest = 0, math.inf, 0.0
    for num in range(len(waits), 0, -1):
        wait, _ = waits[num - 1]
        if wait + rest < least:
            best, least = num, wait + rest
        rest += own_costs[num - 1]
    return best if least < rest else 0


def _load(candidate: Candidate) -> tuple[int, int, int, str]:
    return (
        candidate.num_queued_tokens,
        candidate.num_queued_encoder_tokens,
        candidate.num_sequences,
        candidate.worker,
    )
