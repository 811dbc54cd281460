"""Preemption by recomputation, by swapping KV to host memory, or by returning the request.

A victim is *recomputed* here, its KV is *swapped* to host memory and back, or its request is
*returned* to the router: a worker that has its prompt cached computes the rest and hands it over,
to another decode worker or to this one. Costs, in seconds, for sequences with `num_computed` tokens
in `num_blocks` blocks, `num_new` tokens longer than on arrival:

    recompute   num_computed * compute_token
    swap        2 * num_blocks * swap_block
    return      fixed + num_new * per_token

`compute_token` and `swap_block` are `PreemptionCosts`; `fixed` and `per_token` are the request's
`ReturnCost`. If there is one, its `recompute_token` replaces `compute_token`: figures compare best
from one source, and a decode worker whose prompts are computed elsewhere measures little itself.
The costs leave out the wait for free blocks, which every mode has.
"""

from baton.engine.request import Purpose
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import Step
from baton.engine.scheduler.scheduling.waiting_queue import order_of
from baton.engine.scheduler.sequences.config import Preemption, PreemptionCosts, SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Sequence, SequenceStatus


class Preemptor:
    """Preemptor: frees blocks for sequences by preempting those of lower rank. Admits nothing.

    Attributes:
        num_recomputes, num_swaps, num_returns: sequences preempted since the start, by mode.
    """

    def __init__(
        self, config: SchedulerConfig, states: RequestStates, costs: PreemptionCosts
    ) -> None:
        self.num_recomputes = 0
        self.num_swaps = 0
        self.num_returns = 0
        self._config = config
        self._states = states
        self._costs = costs
        self._kv = states.kv

    def grow(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for a running sequence, preempting from the end of the policy's order.
        Returns False if it was preempted itself, or has to wait."""
        while not self._kv.grow(sequence, num_tokens):
            victim = self._victim()
            if victim is None:
                return False
            self._preempt(step, victim, may_swap=victim.request is not sequence.request)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def break_stall(self, step: Step) -> None:
        """Preempts the last sequence where nothing could be planned though something runs: parts of
        requests hold blocks that the others need."""
        victim = self._victim()
        if victim is not None:
            self._preempt(step, victim, may_swap=False)

    def _victim(self) -> Sequence | None:
        """Returns the last in the policy's order. Never a prefill for another worker: its blocks
        may be in transfer, and are reserved unless others share those outside its window."""
        running = self._states.running()
        may_leave = (s for s in running if s.request.spec.purpose is Purpose.GENERATE)
        return max(may_leave, key=order_of, default=None)

    def _preempt(self, step: Step, victim: Sequence, *, may_swap: bool) -> None:
        """Takes the blocks of a sequence, and of siblings that must be preempted with it.

        A sequence that needs the blocks itself is not swapped: it could not be brought back.
        """
        running = SequenceStatus.RUNNING
        siblings = [s for s in victim.request.sequences if s.status is running]
        mode = self._mode(siblings, may_swap=may_swap)
        is_swapped = mode is Preemption.SWAP
        together = siblings if is_swapped or victim.request.beams is not None else [victim]
        for sequence in together:
            step.remove(sequence)
        step.preempted += [(s.request.request_id, mode) for s in together]
        match mode:
            case Preemption.SWAP:
                self.num_swaps += len(together)
                self._states.swap_out(together)
            case Preemption.RETURN:
                self.num_returns += 1
                self._states.return_to_router(victim)
            case _:
                self.num_recomputes += len(together)
                for sequence in together:
                    self._states.requeue(sequence)

    def _mode(self, siblings: list[Sequence], *, may_swap: bool) -> Preemption:
        """Returns the configured mode if it is possible, else recompute; for `AUTO` the cheapest of
        those that are possible."""
        costs = self._costs_of(siblings, may_swap=may_swap)
        mode = self._config.preemption
        if mode is not Preemption.AUTO:
            return mode if mode in costs else Preemption.RECOMPUTE
        return min(costs, key=costs.__getitem__)

    def _costs_of(self, siblings: list[Sequence], *, may_swap: bool) -> dict[Preemption, float]:
        """Returns the seconds of each possible mode; of equal costs the simplest comes first."""
        request, swap = siblings[0].request, self._kv.swap
        num_computed = sum(s.num_computed_tokens for s in siblings)
        offer = request.spec.return_cost
        compute_token = self._costs.compute_token if offer is None else offer.recompute_token
        costs = {Preemption.RECOMPUTE: num_computed * compute_token}
        if may_swap and swap.has_room_for(siblings):
            num_moves = 2 * swap.num_blocks(siblings)
            costs[Preemption.SWAP] = num_moves * self._costs.swap_block
        if offer is not None:
            num_new = siblings[0].num_tokens - len(request.spec.token_ids)
            costs[Preemption.RETURN] = offer.seconds(num_new)
        return costs
