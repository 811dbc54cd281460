"""Who has to make room for whom, and whether its KV is kept. Lets nobody in."""

from baton.engine.core.roster import Roster
from baton.engine.core.sequence import Purpose, Sequence, SequenceStatus
from baton.engine.core.settings import Preemption, PreemptionCosts, SchedulerConfig
from baton.engine.core.step import Step
from baton.engine.core.waiting_queue import order_of


class Preemptor:
    """Makes room for sequences at the cost of those that rank behind them.

    Attributes:
        num_preemptions, num_swaps: sequences since the start; what was swapped is among the first.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, costs: PreemptionCosts) -> None:
        self.num_preemptions = 0
        self.num_swaps = 0
        self._config = config
        self._roster = roster
        self._costs = costs
        self._kv = roster.kv

    def grow(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
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

    def break_stall(self, step: Step) -> None:
        """Nothing could be planned though something runs: parts of requests hold what each other
        need. The last one gives way."""
        victim = self._victim()
        if victim is not None:
            self._preempt(step, victim, may_swap=False)

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
        self.num_preemptions += len(together)
        if is_swapped:
            self.num_swaps += len(together)
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
