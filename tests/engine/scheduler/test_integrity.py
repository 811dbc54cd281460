"""`check_integrity` sees whatever can be wrong, so that a test which calls it says something."""

from collections.abc import Callable

import pytest

from baton.engine.request import Purpose
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request

Wrong = Callable[[Scheduler, Sequence], object]


def _lose_a_block(scheduler: Scheduler, _: Sequence) -> None:
    scheduler._kv.groups[0].pool._free.popitem()


def _free_a_held_block(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._kv.groups[1].pool._free[sequence.block_ids[1][-1]] = None


def _count_a_holder_too_many(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._kv.groups[0].pool._ref_counts[sequence.block_ids[0][0]] += 1


def _forget_a_hash(scheduler: Scheduler, _: Sequence) -> None:
    scheduler._kv.groups[0].pool._cached.popitem()


def _change_the_column(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.batch_slots.block_tables[0][sequence.batch_slot, 0] += 1


def _lengthen_the_column(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.batch_slots.block_tables[1][sequence.batch_slot, len(sequence.block_ids[1])] = 1


def _shorten_a_table(_: Scheduler, sequence: Sequence) -> None:
    sequence.block_ids[0][-1] = NULL_BLOCK


def _cover_more(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.batch_slots.num_covered[sequence.batch_slot] += 4


def _compute_beyond(_: Scheduler, sequence: Sequence) -> None:
    sequence.num_computed_tokens = 60


def _reserve_without_owner(scheduler: Scheduler, _: Sequence) -> None:
    scheduler._kv.reservations._num_reserved[0] += 1


def _lose_a_slot(scheduler: Scheduler, _: Sequence) -> None:
    scheduler.batch_slots.acquire()


def _release_slot(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.batch_slots.owners[sequence.batch_slot] = None


def _be_in_two_places(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._states.special[sequence] = None


def _be_in_no_place(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler.batch_slots.is_decoding[sequence.batch_slot] = False


def _miscount_a_queue(scheduler: Scheduler, _: Sequence) -> None:
    scheduler._states.waiting.leave()


def _promise_slots(scheduler: Scheduler, _: Sequence) -> None:
    scheduler._states.num_promised_slots += 5


def _leave_a_host_block_behind(scheduler: Scheduler, _: Sequence) -> None:
    host = scheduler._kv.groups[0].host
    assert host is not None
    host.allocate(1)


@pytest.mark.parametrize(
    "wrong",
    [
        _lose_a_block,
        _free_a_held_block,
        _count_a_holder_too_many,
        _forget_a_hash,
        _change_the_column,
        _lengthen_the_column,
        _shorten_a_table,
        _cover_more,
        _compute_beyond,
        _reserve_without_owner,
        _lose_a_slot,
        _release_slot,
        _be_in_two_places,
        _be_in_no_place,
        _miscount_a_queue,
        _promise_slots,
        _leave_a_host_block_behind,
    ],
)
def test_check_integrity_detects_every_corruption(wrong):
    harness = Harness([cache_group(40, None, 10), cache_group(40, 5, 10)], max_num_seqs=5)
    harness.add(request("p", [3] * 9, purpose=Purpose.PREFILL), request("a", [1] * 9))
    harness.add(*(request(name, [2] * 9) for name in "bc"))
    harness.step()
    harness.pause()
    harness.add(request("waits", [1] * 9))
    harness.step()
    scheduler = harness.scheduler
    scheduler.check_integrity()
    (sequence,) = harness.live["a"].request.sequences
    wrong(scheduler, sequence)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
