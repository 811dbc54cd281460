"""Request states: waiting, running, swapped, kept, and the transitions between them. No policy.

An unfinished sequence is in exactly one state:

    waiting, preempted    no blocks
    awaiting_kv           a slot and blocks that another worker fills
    decoding, special     a slot and blocks, running: plain decodes, and all others, such as
                          decodes that have drafts
    swapped               blocks in host memory
    kept                  finished or suspended, blocks held until released
"""

from collections.abc import Iterable

import numpy as np

from baton.engine.request import FinishReason, Purpose
from baton.engine.scheduler.kv.encoder_cache import NO_ENCODER_STEP, EncoderStep
from baton.engine.scheduler.kv.kv_cache_manager import KvCacheManager
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJobs
from baton.engine.scheduler.scheduling.waiting_queue import WaitingQueue, order_of
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, Int64Array
from baton.engine.scheduler.sequences.sequence import Request, Sequence, SequenceStatus

NO_SLOTS: Int64Array = np.zeros(0, np.int64)


class RequestStates:
    """States of all sequences of one engine."""

    def __init__(
        self, batch_slots: BatchSlots[Sequence], kv: KvCacheManager, jobs: EncodeJobs
    ) -> None:
        self.batch_slots = batch_slots
        self.kv = kv
        self.jobs = jobs
        self.encoder = jobs.cache
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.preempted = WaitingQueue()
        self.swapped: list[list[Sequence]] = []
        self.decoding: Int64Array = NO_SLOTS
        self.special: dict[Sequence, None] = {}
        self.speculating: dict[Sequence, None] = {}
        self.resuming: dict[Sequence, None] = {}
        self.awaiting_kv: dict[str, Sequence] = {}
        self.kept: dict[str, Sequence] = {}
        self.new_slots: list[Sequence] = []
        self.released: list[tuple[str, int]] = []
        self.returned: list[Sequence] = []
        self.num_promised_slots = 0
        self._known_to_runner: set[tuple[str, int]] = set()
        self._joining: list[int] = []
        self._has_left = False

    # Arrival.

    def add(self, request: Request) -> None:
        """Adds a new request to the waiting queue."""
        self.requests[request.request_id] = request
        self._enter(Sequence.first_of(request))
        self.waiting.push(request.sequences[0])

    def _enter(self, sequence: Sequence) -> None:
        sequence.request.sequences.append(sequence)
        sequence.request.next_index = sequence.index + 1

    # Transitions.

    def acquire_slot(self, sequence: Sequence) -> None:
        """Acquires a free slot; until `start` or `fork`, `release_slot` undoes it."""
        sequence.acquire_slot(self.batch_slots)

    def release_slot(self, sequence: Sequence) -> None:
        """Undoes `acquire_slot`."""
        sequence.release_slot()

    def start(self, sequence: Sequence) -> None:
        """Registers a sequence that was admitted or swapped in, and has a slot and blocks."""
        self._promise_slots(sequence.request)
        self.new_slots.append(sequence)

    def await_kv(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.AWAITING_KV
        self.awaiting_kv[sequence.request.request_id] = sequence

    def run(self, sequence: Sequence) -> None:
        """Sets a sequence running that has a slot, blocks and tokens to compute."""
        sequence.status = SequenceStatus.RUNNING
        self.special[sequence] = None
        if sequence.request.speculates:
            self.speculating[sequence] = None
        if sequence.request.outputs:
            self.resuming[sequence] = None

    def join_plain_decodes(self, sequence: Sequence) -> None:
        """Moves a running sequence to the plain decodes if it is one now."""
        if not sequence.is_plain or sequence.awaits_encoder:
            return
        if sequence.num_tokens == sequence.num_computed_tokens + 1:
            self.kv.reservations.release(sequence)
            del self.special[sequence]
            self.batch_slots.is_decoding[sequence.batch_slot] = True
            self._joining.append(sequence.batch_slot)

    def leave_plain_decodes(self, sequence: Sequence) -> None:
        """Moves a running sequence out of the plain decodes, if it is one, until its next step."""
        if sequence.status is SequenceStatus.RUNNING and sequence not in self.special:
            self.batch_slots.is_decoding[sequence.batch_slot] = False
            self._has_left = True
            self.special[sequence] = None

    def requeue(self, sequence: Sequence) -> None:
        """Frees a sequence's slot and blocks and queues it, to recompute what is not cached."""
        self.kv.free(sequence)
        self._release_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_interruptions += 1
        self.preempted.push(sequence)

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Swaps sequences that share blocks to host memory, as a group."""
        self.kv.swap_out(sequences)
        for sequence in sequences:
            self._release_slot(sequence)
            sequence.status = SequenceStatus.SWAPPED
            sequence.num_interruptions += 1
        self.swapped.append(sequences)
        self.swapped.sort(key=lambda group: order_of(group[0]))

    def fork(self, parent: Sequence, index: int | None = None) -> Sequence:
        """Returns a new sibling that shares the parent's computed blocks and tokens. `index` None
        is the next free index."""
        index = parent.request.next_index if index is None else index
        child = Sequence(parent.request, index, parent.token_ids, parent.num_tokens)
        child.num_cached_tokens = parent.num_cached_tokens
        child.num_scored = parent.num_scored
        self._enter(child)
        child.acquire_slot(self.batch_slots)
        self._promise_slots(parent.request)
        self.kv.fork(parent, child)
        self.new_slots.append(child)
        self.run(child)
        return child

    def fork_resuming(self) -> None:
        """Forks requests with given `outputs`, each sequence after its own output, once all of the
        prompt but its last token is computed."""
        for first in tuple(self.resuming):
            request = first.request
            if first.num_tokens > first.num_computed_tokens + 1:
                continue
            outputs, request.outputs = request.outputs, ()
            request.num_unforked = 0
            self._promise_slots(request)
            for index, output in enumerate(outputs, request.spec.sequence_index):
                if output is not None and index != first.index:
                    self.fork(first, index).extend(output)
            own = outputs[first.index - request.spec.sequence_index]
            assert own is not None, "begun as a sequence that has ended"
            first.extend(own)  # last, since the others fork from its prompt
            del self.resuming[first]

    def refresh(self) -> None:
        """Adds the sequences that joined to `decoding`, and removes those that left."""
        if self._has_left:
            self.decoding = self.decoding[self.batch_slots.is_decoding[self.decoding]]
            self._joining = [s for s in self._joining if self.batch_slots.is_decoding[s]]
            self._has_left = False
        if self._joining:
            joining = np.array(self._joining, np.int64)
            self.decoding = np.concatenate([self.decoding, joining])
            self._joining = []

    # Ends and returns.

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finishes a sequence in any state. A prefill that was computed keeps its blocks."""
        sequence.finish_reason = reason
        request, status = sequence.request, sequence.status
        was_computed = reason not in (FinishReason.ABORTED, FinishReason.FAILED)
        is_kept = request.spec.purpose is Purpose.PREFILL and was_computed
        if status is SequenceStatus.WAITING:
            self.queue_of(sequence).leave()
        elif status is SequenceStatus.SWAPPED:
            self.kv.swap.drop(sequence)
            self._leave_swapped(sequence)
        elif status is not SequenceStatus.KEPT:
            self.awaiting_kv.pop(request.request_id, None)
            if is_kept:
                self._keep(sequence)
                return
            self.kv.free(sequence)
            self._release_slot(sequence)
        self._forget(sequence)

    def return_to_router(self, sequence: Sequence) -> None:
        """Ends a running sequence, whose answer is not complete, and frees its slot and blocks."""
        sequence.drafts = None
        self.finish(sequence, FinishReason.RETURNED)
        self.returned.append(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """Stops a running sequence; its blocks are kept until released."""
        sequence.drafts = None
        sequence.finish_reason = FinishReason.SUSPENDED
        self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        self.kv.reservations.release(sequence)
        self._release_slot(sequence)
        sequence.status = SequenceStatus.KEPT
        self.kept[sequence.request.request_id] = sequence

    def release(self, request_id: str) -> None:
        """Frees the blocks of a kept sequence. Idempotent."""
        sequence = self.kept.pop(request_id, None)
        if sequence is not None:
            self.kv.free(sequence)
            self._forget(sequence)

    def take_new_slots(self) -> list[Sequence]:
        """Returns the sequences that acquired a slot since the last call, and still have it."""
        if not self.new_slots:
            return []
        new_slots = [s for s in self.new_slots if s.batch_slots is not None]
        self.new_slots = []
        self._known_to_runner.update(s.key for s in new_slots)
        return new_slots

    def take_released(self) -> list[tuple[str, int]]:
        """Returns the sequences known to the runner that lost their slot since the last call."""
        released, self.released = self.released, []
        return released

    def take_returned(self) -> list[Sequence]:
        """Returns the sequences that were returned to the router since the last call."""
        returned, self.returned = self.returned, []
        return returned

    def take_encoder_step(self) -> EncoderStep:
        """Returns the encoder's work since the last call."""
        if not self.encoder.has_due and not self.jobs.has_answers:
            return NO_ENCODER_STEP
        return EncoderStep(self.encoder.drain(), self.jobs.take_answers())

    def _release_slot(self, sequence: Sequence) -> None:
        if self.batch_slots.is_decoding[sequence.batch_slot]:
            self._has_left = True
        self.special.pop(sequence, None)
        self.speculating.pop(sequence, None)
        self.resuming.pop(sequence, None)
        self.encoder.release_all(sequence.encoder_id)
        sequence.release_slot()
        self._promise_slots(sequence.request)
        if sequence.key in self._known_to_runner:
            self._known_to_runner.remove(sequence.key)
            self.released.append(sequence.key)

    def _promise_slots(self, request: Request) -> None:
        """Keeps slots free for the forks to come of a request that has a slot, and only then."""
        num_due = request.num_forks_to_come
        if num_due and all(s.batch_slots is None for s in request.sequences):
            num_due = 0
        self.num_promised_slots += num_due - request.num_promised_slots
        request.num_promised_slots = num_due

    def _leave_swapped(self, sequence: Sequence) -> None:
        for group in self.swapped:
            if sequence in group:
                group.remove(sequence)
        self.swapped = [group for group in self.swapped if group]

    def _forget(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.status = SequenceStatus.FINISHED
        request.sequences.remove(sequence)
        self._promise_slots(request)
        if not request.sequences:
            del self.requests[request.request_id]

    # Queries.

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """Returns the queue of a waiting sequence."""
        return self.preempted if sequence.num_interruptions else self.waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that are neither taken nor promised to forks."""
        return self.batch_slots.num_free - self.num_promised_slots

    @property
    def may_grow(self) -> bool:
        """True if a running sequence may need more blocks than it holds and has reserved."""
        if self.batch_slots.is_decoding.any():
            return True
        return any(sequence.num_reserved is None for sequence in self.special)

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.batch_slots.is_decoding)) + len(self.special)

    def sequences(self) -> list[Sequence]:
        return [s for request in self.requests.values() for s in request.sequences]

    def running(self) -> Iterable[Sequence]:
        for batch_slot in (*self.decoding.tolist(), *self._joining):
            sequence = self.batch_slots.owners[batch_slot]
            if sequence is not None and self.batch_slots.is_decoding[batch_slot]:
                yield sequence
        yield from self.special

    def check_integrity(self) -> None:
        """Asserts that each sequence is in one state, and that states, slots and blocks agree."""
        sequences = self.sequences()
        self.kv.check_integrity(sequences)
        self.encoder.check_integrity()
        self.jobs.check_integrity()
        places: list[Sequence] = [
            *self.waiting,
            *self.preempted,
            *(s for group in self.swapped for s in group),
            *self.running(),
            *self.awaiting_kv.values(),
            *self.kept.values(),
        ]
        assert len(places) == len(set(places)), "a sequence in two places"
        assert set(places) == set(sequences), "a sequence in no place, or one that has ended"
        runs = {s for s in sequences if s.status is SequenceStatus.RUNNING}
        assert self.speculating.keys() == {s for s in runs if s.request.speculates}
        assert self.resuming.keys() == {s for s in runs if s.request.outputs}
        new_slots = {s for s in sequences if s.batch_slots is not None}
        assert new_slots == {s for s in self.batch_slots.owners if s is not None}, (
            "a slot without its owner"
        )
        num_unused = self.batch_slots.num_free + self.batch_slots.num_released
        assert len(new_slots) + num_unused == len(self.batch_slots.owners), "a slot is lost"
        promised = sum(request.num_promised_slots for request in self.requests.values())
        assert self.num_promised_slots == promised, "promised slots are miscounted"
        assert self.num_free_slots >= 0, "more slots promised than free"
        assert len(self.waiting) == sum(1 for _ in self.waiting), "the queue miscounts"
        assert len(self.preempted) == sum(1 for _ in self.preempted), "the queue miscounts"
