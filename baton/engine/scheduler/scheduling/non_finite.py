"""Requests whose logits are not finite: found in a step's result, and what they computed dropped.

A request is known good up to the blocks that it found cached: it computed the others, of which none
stays findable. Sequences that continued from those without logits of their own recompute them. One
that has chosen a token of finite logits since has read them all.
"""

from collections.abc import Iterable, Iterator

from baton.engine.request import Purpose
from baton.engine.scheduler.plan import ScheduledRange, StepPlan, StepResult
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence, SequenceStatus

# A block, by cache group and number.
_Block = tuple[int, int]


class NonFiniteRequests:
    """Finder of requests whose results are not finite.

    Attributes:
        num_requests: those found since the start.
        has_requeued: a sequence is to be recomputed that a launched step may still compute.
    """

    def __init__(self, states: RequestStates) -> None:
        self.num_requests = 0
        self.has_requeued = False
        self._states = states
        self._kv = states.kv

    def take(self, plan: StepPlan, result: StepResult) -> dict[str, int]:
        """Returns the requests of a step whose results are not finite, with the position of the
        token that gave them; the caller ends them. Drops from the prefix cache what they computed,
        and requeues the sequences that rely on it."""
        if not result.non_finite:
            return {}
        positions: dict[str, int] = {}
        for sequence, position in self._found(plan, result):
            positions.setdefault(sequence.request.request_id, position)
        self.num_requests += len(positions)
        requests = [self._states.requests[request_id] for request_id in positions]
        for request in requests:
            self._states.encoder.evict([i.content_hash for i in request.spec.encoder_inputs])
        self._drop([s for request in requests for s in request.sequences])
        return positions

    def _found(self, plan: StepPlan, result: StepResult) -> Iterator[tuple[Sequence, int]]:
        """Yields the sequences that still run, with positions; those of decodes, then of ranges."""
        broken, owners = result.non_finite, self._states.batch_slots.owners
        decodes = [r for r in sorted(broken.rows) if r < len(plan.decode_slots)]
        for slots, lengths, rows in (
            (plan.decode_slots, plan.sample_lengths, decodes),
            (plan.beam_slots, plan.beam_lengths, sorted(broken.beam_rows)),
        ):
            for row in rows:
                owner = owners[slots[row]]
                if owner is not None and owner.status is SequenceStatus.RUNNING:
                    yield owner, int(lengths[row]) - 1
        for index, chunk in enumerate(plan.chunks):
            if chunk.sequence.status is SequenceStatus.RUNNING:
                for row in _rows_taken(chunk, result):
                    if row in broken.rows:
                        yield chunk.sequence, int(plan.sample_lengths[row]) - 1
                if index in broken.ranges:
                    yield chunk.sequence, broken.ranges[index]

    def _drop(self, failed: list[Sequence]) -> None:
        """Drops what these sequences have computed from the prefix cache, and all that was computed
        from it and is not known good."""
        tainted: set[_Block] = set()
        for sequence in failed:
            tainted |= self._evict(sequence)
        others = [s for s in self._states.running() if s not in failed and _lacks_logits(s)]
        while relying := [s for s in others if not tainted.isdisjoint(_held(s))]:
            for sequence in relying:
                others.remove(sequence)
                tainted |= self._evict(sequence)
                sequence.num_cached_tokens = None
                self._states.requeue(sequence)
                self.has_requeued = True

    def _evict(self, sequence: Sequence) -> set[_Block]:
        """Makes the blocks that a sequence has computed impossible to find, and returns them."""
        first = (sequence.num_cached_tokens or 0) // self._kv.block_size
        hashes = sequence.block_hashes[first:]
        blocks = set(_held(sequence, first))
        for i, group in enumerate(self._kv.groups):
            found = map(group.pool.lookup, hashes)
            blocks.update((i, block_id) for block_id in found if block_id is not None)
        self._kv.prefixes.evict(hashes)
        return blocks


def _rows_taken(chunk: ScheduledRange, result: StepResult) -> Iterable[int]:
    """Returns the sampled rows of a range whose tokens count: not those after a rejected draft."""
    if not chunk.num_drafts:
        return range(chunk.first_row, chunk.first_row + chunk.num_samples)
    return range(chunk.first_row, chunk.first_row + chunk.num_accepted(result.token_ids) + 1)


def _held(sequence: Sequence, first: int = 0) -> Iterator[_Block]:
    """Yields the blocks that a sequence holds, from the `first` of its table on."""
    for i, table in enumerate(sequence.block_ids):
        yield from ((i, block_id) for block_id in table[first:] if block_id != NULL_BLOCK)


def _lacks_logits(sequence: Sequence) -> bool:
    """Returns True for a prompt under computation. A prefill for another worker is never preempted:
    its blocks may be in transfer, and its own logits tell whether they are good."""
    is_level = sequence.num_tokens == sequence.num_computed_tokens + 1
    return not is_level and sequence.request.spec.purpose is Purpose.GENERATE
