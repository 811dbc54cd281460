"""Fills one step: who computes how many tokens, and who has to make room. Books no results."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.core.encoder_cache import limit_chunk
from baton.engine.core.plan import ExternalAllocation, StepPlan
from baton.engine.core.policy import DecodeTurn, Policy
from baton.engine.core.prefix_cache import PrefixHit
from baton.engine.core.roster import Queue, Roster, order_of
from baton.engine.core.sequence import KvSource, Purpose, Request, Sequence, SequenceStatus
from baton.engine.core.settings import Preemption, PreemptionCosts, SchedulerConfig
from baton.engine.core.step import PlannedSpan, Step

_Ranks = npt.NDArray[np.float64]


@dataclass(slots=True)
class PlannerTotals:
    """Counts since the start."""

    num_preemptions: int = 0
    num_swaps: int = 0
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_drafted_tokens: int = 0


class Planner:
    """Turns the roster's state into a step, under the budgets of `config`."""

    def __init__(
        self, config: SchedulerConfig, policy: Policy, roster: Roster, costs: PreemptionCosts
    ) -> None:
        self.totals = PlannerTotals()
        self.is_paused = False
        self._config = config
        self._policy = policy
        self._roster = roster
        self._costs = costs
        self._seats = roster.seats
        self._kv = roster.kv

    def fill(self) -> Step:
        """The next step. Takes seats and blocks, and preempts, as it needs to."""
        config = self._config
        reads = np.inf if config.max_cache_reads is None else config.max_cache_reads
        step = Step(config.max_num_batched_tokens, reads)
        match self._policy.decode_turn:
            case DecodeTurn.FIRST:
                self._add_decodes(step)
                self._add_special(step)
                self._add_new(step)
            case DecodeTurn.LAST:
                self._add_special(step)
                self._add_new(step)
                self._add_decodes(step)
            case DecodeTurn.BY_RANK:
                self._add_special(step, np.sort(self._seats.rank[self._roster.decoding]))
                self._add_decodes(step)
                self._add_new(step)
        if step.num_preempted:
            step.keep_decodes(self._seats.is_decoding[step.decode_seats])
        if step.is_empty and not step.resumed:
            self._break_stall(step)
        return step

    def follow(self, plan: StepPlan) -> Step | None:
        """The step behind one that is not booked yet, if it can only be one more token for each of
        its decodes; those that `plan` certainly ends are left out. None: it must be waited for.
        """
        roster, columns = self._roster, self._seats
        seats, starts = plan.decode_seats, plan.decode_starts + 1
        if plan.spans or len(seats) != len(roster.decoding) or not roster.only_decodes:
            return None
        goes_on = starts + 1 < columns.length_limit[seats]
        seats, starts = seats[goes_on], starts[goes_on]
        reads = self._config.max_cache_reads
        if not len(seats) or (reads is not None and int((starts + 1).sum()) > reads):
            return None
        due = seats[starts >= columns.num_covered[seats]]
        if len(due) and not self._kv.grow_decodes(due):
            return None
        step = Step(self._config.max_num_batched_tokens, np.inf)
        step.add_decodes(seats, starts, columns.sequence_index[seats])
        return step

    # Decodes, by columns.

    def _add_decodes(self, step: Step) -> None:
        """One token for each plain decode, as far as the budgets reach."""
        columns, seats = self._seats, self._roster.decoding
        if step.num_preempted:
            seats = seats[columns.is_decoding[seats]]
        if not len(seats) or step.num_tokens <= 0:
            return
        if step.num_tokens < len(seats):
            seats = seats[np.argsort(columns.rank[seats], kind="stable")[: step.num_tokens]]
        starts = columns.num_computed[seats]
        if step.num_cache_reads != np.inf:
            fitting = np.cumsum(starts + 1) <= step.num_cache_reads
            fitting[0] |= step.is_empty
            seats, starts = seats[fitting], starts[fitting]
        due = seats[starts >= columns.num_covered[seats]]
        if len(due) and not self._kv.grow_decodes(due):
            preempted = step.num_preempted
            for seat in due.tolist():
                sequence = columns.owners[seat]
                if sequence is not None and columns.is_decoding[seat]:
                    self._grow(step, sequence, sequence.num_computed_tokens + 1)
            if step.num_preempted != preempted:
                left = columns.is_decoding[seats]
                seats, starts = seats[left], starts[left]
        step.add_decodes(seats, starts, columns.sequence_index[seats])

    # Everything else that runs, one by one.

    def _add_special(self, step: Step, decode_ranks: _Ranks | None = None) -> None:
        """In the policy's order; with `decode_ranks` the decodes that rank before a sequence are
        left their tokens."""
        if not self._roster.special:
            return
        for sequence in sorted(self._roster.special, key=order_of):
            if sequence.status is not SequenceStatus.RUNNING or sequence in step.spans:
                continue
            request, budget = sequence.request, step.num_tokens
            if decode_ranks is not None:
                budget -= int(np.searchsorted(decode_ranks, request.rank))
            if request.steps_together and all(map(_is_level, request.sequences)):
                self._add_beams(step, request, budget)
            elif budget > 0:
                span = self._next_span(step, sequence, sequence.num_computed_tokens, budget)
                if span is None or not span.num_tokens:
                    continue
                if span.num_drafts and not self._kv.grow(sequence, span.end):
                    span.drop_drafts()  # nobody makes room for guesses
                if self._grow(step, sequence, span.end):
                    self._add_span(step, span)

    def _add_beams(self, step: Step, request: Request, budget: int) -> None:
        """Beams take a step together or not at all."""
        members = tuple(request.sequences)
        num_reads = sum(s.num_tokens for s in members)
        if len(members) > budget or not self._reads_fit(step, num_reads):
            return
        for sequence in members:
            if not self._grow(step, sequence, sequence.num_tokens):
                return
        for sequence in members:
            step.add(PlannedSpan(sequence, sequence.num_computed_tokens, sequence.num_tokens))

    def _next_span(
        self, step: Step, sequence: Sequence, start: int, budget: int
    ) -> PlannedSpan | None:
        """What of a sequence, from `start` on, fits the budgets; or None.

        A beam leaves its last token to `_add_beams`, and may have nothing else to compute.
        """
        num_tokens, limit = sequence.num_tokens, sequence.request.length_limit
        if sequence.request.steps_together:
            num_tokens -= 1
            if start == num_tokens:
                return PlannedSpan(sequence, start, start)
        num_drafts = 0
        if sequence.drafts is not None and num_tokens == start + 1:
            num_drafts = max(0, min(len(sequence.drafts), budget - 1, limit - num_tokens - 1))
            sequence.tokens[num_tokens : num_tokens + num_drafts] = sequence.drafts[:num_drafts]
        end = min(num_tokens + num_drafts, start + budget)
        if self._config.long_prefill_threshold is not None and not num_drafts:
            end = min(end, start + self._config.long_prefill_threshold)
        span = PlannedSpan(sequence, start, end, num_drafts)
        if sequence.request.encoder_inputs:
            self._limit_to_encoder(span)
        return span if span.end > start and self._reads_fit(step, span.end) else None

    def _reads_fit(self, step: Step, num_reads: int) -> bool:
        """An empty step takes anything, since it must be taken at some time."""
        return num_reads <= step.num_cache_reads or step.is_empty

    def _limit_to_encoder(self, span: PlannedSpan) -> None:
        """Shortens a span to end before an encoder input that does not fit this step."""
        request, encoder = span.sequence.request, self._roster.encoder
        span.encoder = limit_chunk(
            request.encoder_inputs,
            span.start,
            span.end,
            encoder,
            span.sequence.encoder_id,
            self._config.encoder_budget - encoder.num_due_tokens,
        )
        span.end = span.encoder.end

    def _add_span(self, step: Step, span: PlannedSpan) -> None:
        """Puts a span, whose blocks are there, into the step."""
        if span.encoder is not None:
            self._roster.encoder.take(span.sequence.encoder_id, span.encoder)
        self.totals.num_drafted_tokens += span.num_drafts
        step.add(span)

    # What waits.

    def _add_new(self, step: Step) -> None:
        """Swapped sequences, then those that wait, until a budget or the blocks are used up.

        Who comes first is not passed over, or it might never find room.
        """
        roster = self._roster
        while roster.swapped and not step.num_preempted:
            if not self._swap_in(step, roster.swapped[0]):
                return
            del roster.swapped[0]
        while not step.num_preempted:
            queue = self._next_queue()
            sequence = queue.head() if queue is not None else None
            if queue is None or sequence is None or not self._start(step, sequence):
                return
            queue.pop()

    def _next_queue(self) -> Queue | None:
        """Where the next sequence to start is. What was preempted has begun: no pause holds it."""
        new = None if self.is_paused else self._roster.waiting.head()
        again = self._roster.preempted.head()
        if new is None:
            return self._roster.preempted if again is not None else None
        if again is None or order_of(new) < order_of(again):
            return self._roster.waiting
        return self._roster.preempted

    def _start(self, step: Step, sequence: Sequence) -> bool:
        """Gives a waiting sequence a seat and blocks. False, and no change: there is no room."""
        roster, request = self._roster, sequence.request
        if roster.num_free_seats < 1 + request.num_unforked:
            return False
        if request.steps_together and not self._have_room(request):
            return False
        roster.sit(sequence)
        if request.kv_source is KvSource.EXTERNAL:
            started = self._start_external(step, sequence)
        else:
            started = step.num_tokens > 0 and self._start_local(step, sequence)
        if not started:
            roster.stand(sequence)
            return False
        roster.start(sequence)
        return True

    def _have_room(self, beams: Request) -> bool:
        """Whether all beams that wait could start, since none goes on without the others."""
        waiting = [s for s in beams.sequences if s.status is SequenceStatus.WAITING]
        return self._roster.num_free_seats >= len(waiting) and all(
            sum(self._kv.reservations.peak_blocks(group, s.num_tokens) for s in waiting)
            <= self._kv.reservations.num_free_blocks(i)
            for i, group in enumerate(self._kv.groups)
        )

    def _start_external(self, step: Step, sequence: Sequence) -> bool:
        num_tokens = sequence.num_tokens
        hit = self._kv.prefixes.find(sequence, needs_logits=False)
        # The last token's KV may be computed once more, for its logits.
        if not self._kv.admit(
            sequence, hit, num_tokens, first_query=num_tokens - 1, margin=self._margin(sequence)
        ):
            return False
        self._note_hit(sequence, hit)
        self._roster.await_kv(sequence)
        tables = tuple(map(tuple, sequence.block_ids))
        num_hit_blocks = hit.num_tokens // self._config.block_size
        step.external.append(
            ExternalAllocation(sequence.request.request_id, tables, num_hit_blocks)
        )
        return True

    def _start_local(self, step: Step, sequence: Sequence) -> bool:
        most = None
        if sequence.request.steps_together:  # not the block of the token it leaves
            most = (sequence.num_tokens - 1) // self._config.block_size
        hit = self._kv.prefixes.find(sequence, needs_logits=True, max_blocks=most)
        span = self._admit(step, sequence, hit)
        if span is None and hit.copies_last:
            # There is no block to copy the last one to; it is computed again in its own place.
            hit = self._kv.prefixes.find(
                sequence, needs_logits=True, max_blocks=len(hit.block_ids[0]) - 1
            )
            span = self._admit(step, sequence, hit)
        if span is None:
            return False
        self._note_hit(sequence, hit)
        self._kv.clear_tail(sequence, span.end)
        self._roster.run(sequence)
        if span.num_tokens:
            self._add_span(step, span)
        else:
            step.resumed.add(sequence)
        return True

    def _admit(self, step: Step, sequence: Sequence, hit: PrefixHit) -> PlannedSpan | None:
        """Blocks for the first span behind a hit, and for all of the prompt where it must fit."""
        span = self._next_span(step, sequence, hit.num_tokens, step.num_tokens)
        if span is None:
            return None
        is_prefill = sequence.request.purpose is Purpose.PREFILL
        must_fit = is_prefill or self._config.full_sequence_must_fit
        reserve_to = sequence.num_tokens if must_fit else 0
        margin = self._margin(sequence)
        admitted = self._kv.admit(sequence, hit, span.end, reserve_to=reserve_to, margin=margin)
        return span if admitted else None

    def _margin(self, sequence: Sequence) -> int:
        """Blocks that must stay free for what runs; the rest of a request that runs needs none."""
        if not self._roster.num_running or len(sequence.request.sequences) > 1:
            return 0
        return self._config.free_block_margin

    def _note_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            self.totals.num_hit_tokens += hit.num_tokens
            self.totals.num_prompt_tokens += sequence.num_tokens

    def _swap_in(self, step: Step, sequences: list[Sequence]) -> bool:
        """Brings sequences back that went together. False, and no change: there is no room."""
        roster = self._roster
        needed = len(sequences) + sum(s.request.num_unforked for s in sequences)
        if roster.num_free_seats < needed:
            return False
        margin = 0
        if roster.num_running:  # each must be able to go on, or it would have to leave again
            margin = max(self._margin(sequences[0]), len(sequences))
        for sequence in sequences:
            roster.sit(sequence)
        if not self._kv.swap_in(sequences, margin=margin):
            for sequence in sequences:
                roster.stand(sequence)
            return False
        for sequence in sequences:
            roster.start(sequence)
            roster.run(sequence)
        step.resumed.update(sequences)
        return True

    # Making room.

    def _grow(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for a running sequence, at the cost of those that rank behind it. False: it was
        itself the last, or has to wait."""
        while not self._kv.grow(sequence, num_tokens):
            victim = self._victim()
            if victim is None:
                return False
            self._preempt(step, victim, may_swap=victim.request is not sequence.request)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _victim(self) -> Sequence | None:
        """The last in the policy's order. Never a prefill for another worker, whose blocks may be
        on their way; it has what it needs reserved, unless others share what its window passes."""
        running = self._roster.running()
        may_leave = (s for s in running if s.request.purpose is Purpose.GENERATE)
        return max(may_leave, key=order_of, default=None)

    def _preempt(self, step: Step, victim: Sequence, *, may_swap: bool) -> None:
        """Takes the blocks of a sequence; of its siblings too where they must go together.

        Who makes room for itself is not swapped: it would come back to where there is no room.
        """
        running = SequenceStatus.RUNNING
        siblings = [s for s in victim.request.sequences if s.status is running]
        # What comes back in this step is not there yet, to go again.
        may_swap = may_swap and step.resumed.isdisjoint(siblings)
        is_swapped = may_swap and self._should_swap(siblings)
        together = siblings if is_swapped or victim.request.beams is not None else [victim]
        for sequence in together:
            step.remove(sequence)
        step.num_preempted += len(together)
        self.totals.num_preemptions += len(together)
        if is_swapped:
            self.totals.num_swaps += len(together)
            self._roster.swap_out(together)
        else:
            for sequence in together:
                self._roster.requeue(sequence)

    def _should_swap(self, sequences: list[Sequence]) -> bool:
        mode = self._config.preemption
        if mode is Preemption.RECOMPUTE or not self._kv.swap.can_take(sequences):
            return False
        if mode is Preemption.SWAP:
            return True
        num_moves = 2 * self._kv.swap.num_blocks(sequences)
        num_tokens = sum(s.num_computed_tokens for s in sequences)
        return num_moves * self._costs.swap_block < num_tokens * self._costs.compute_token

    def _break_stall(self, step: Step) -> None:
        """Nothing could be planned though something runs: parts of requests hold what each other
        need. The last one gives way."""
        victim = self._victim()
        if victim is not None:
            self._preempt(step, victim, may_swap=False)


def _is_level(sequence: Sequence) -> bool:
    """It runs, and only its last token is yet to be computed."""
    is_running = sequence.status is SequenceStatus.RUNNING
    return is_running and sequence.num_tokens == sequence.num_computed_tokens + 1
