"""Blocks, and sequences that share them, after logits that are not finite."""

from typing import Any

import numpy as np

from baton.engine.request import Purpose
from baton.engine.scheduler.plan import NonFinite, NotAhead, StepPlan, StepResult
from baton.engine.scheduler.progress import StepProgress
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import SequenceStatus
from tests.support.scheduler.fakes import VOCAB_SIZE, cache_group
from tests.support.scheduler.harness import request

SHARED = list(range(1, 13))


class Stepping:
    """A scheduler whose steps choose token 0, and have logits that are not finite where told."""

    def __init__(self, **config: Any) -> None:
        sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "block_size": 4}
        self.group = cache_group(40)
        self.scheduler = Scheduler(
            SchedulerConfig(**sizes, max_model_len=64, vocab_size=VOCAB_SIZE, **config),
            [self.group],
        )

    def add(self, request_id: str, prompt: list[int], **kind: Any) -> None:
        self.scheduler.add(request(request_id, prompt, **kind))

    def step(self, *broken: str) -> StepProgress:
        return self.apply(self.scheduler.schedule(), *broken)

    def apply(self, plan: StepPlan, *broken: str) -> StepProgress:
        owners = self.scheduler.batch_slots.owners
        names = [owners[slot] and owners[slot].request.request_id for slot in plan.sample_slots]
        rows = frozenset(row for row, name in enumerate(names) if name in broken)
        tokens = np.zeros(len(plan.sample_rows), np.int64)
        progress = self.scheduler.apply(plan, StepResult(tokens, non_finite=NonFinite(rows)))
        self.scheduler.check_integrity()
        return progress

    def status(self, request_id: str) -> SequenceStatus:
        (sequence,) = self.scheduler.requests[request_id].sequences
        return sequence.status

    def finish(self) -> None:
        for _ in range(100):
            if not self.scheduler.has_work:
                break
            self.step()
        assert self.scheduler.stats().is_idle

    @property
    def num_findable(self) -> int:
        return len(self.group.pool._cached)


def test_prompt_that_shares_pending_blocks_starts_again():
    stepping = Stepping()
    stepping.add("broken", [*SHARED, 50, 51, 52, 53])
    stepping.add("sharing", [*SHARED, *range(20, 40)])
    plan = stepping.scheduler.schedule()
    assert [(c.start, c.end) for c in plan.chunks] == [(0, 16), (12, 20)]
    progress = stepping.apply(plan, "broken")
    assert progress.non_finite == {"broken": 15}
    assert stepping.status("sharing") is SequenceStatus.WAITING
    assert stepping.num_findable == 0
    assert not stepping.scheduler.drain_events()
    (chunk,) = stepping.scheduler.schedule().chunks
    assert chunk.start == 0


def test_prompt_that_relies_on_one_that_starts_again_does_too():
    stepping = Stepping(long_prefill_threshold=8)
    middle = list(range(20, 28))
    stepping.add("broken", [*SHARED, *range(30, 48)])
    stepping.step()
    stepping.step()
    stepping.add("second", [*SHARED, *middle, *range(30, 60)])
    stepping.step()
    stepping.add("third", [*SHARED, *middle, *range(1, 30)])
    assert stepping.step("broken").non_finite == {"broken": 29}
    assert stepping.scheduler.requests["third"].sequences[0].num_interruptions == 1
    assert {stepping.status(i) for i in ("second", "third")} == {SequenceStatus.WAITING}
    assert stepping.num_findable == 0
    stepping.finish()


def test_decode_that_shares_blocks_goes_on():
    """Its own logits, of the blocks that it shares, were finite."""
    stepping = Stepping()
    stepping.add("broken", [*SHARED, 50])
    stepping.step()
    stepping.add("sharing", [*SHARED, 51])
    stepping.step()
    progress = stepping.step("broken")
    assert [*progress.non_finite] == ["broken"]
    assert stepping.status("sharing") is SequenceStatus.RUNNING
    stepping.finish()


def test_blocks_found_before_a_broken_request_stay():
    stepping = Stepping()
    stepping.add("before", [*SHARED, 50], max_tokens=1)
    stepping.finish()
    before = stepping.num_findable
    stepping.scheduler.drain_events()
    stepping.add("broken", [*SHARED, *range(20, 40)])
    stepping.step()
    stepping.step("broken")
    assert stepping.num_findable == before == 3
    events = stepping.scheduler.drain_events()
    assert (events.stored, events.removed) == ((), ())
    assert stepping.scheduler.stats().num_non_finite_requests == 1


def test_prefill_for_another_worker_goes_on():
    """Its blocks may be in transfer; if its own logits are finite, so are they."""
    stepping = Stepping()
    stepping.add("broken", [*SHARED, 50, 51, 52, 53], purpose=Purpose.PREFILL)
    stepping.add("sharing", [*SHARED, *range(20, 40)], purpose=Purpose.PREFILL)
    stepping.step("broken")
    assert stepping.status("sharing") is SequenceStatus.RUNNING


def test_step_waits_while_one_computes_what_starts_again():
    stepping = Stepping()
    stepping.add("broken", [*SHARED, 50, 51, 52, 53])
    stepping.add("sharing", [*SHARED, *range(20, 50)])
    plan = stepping.scheduler.schedule()
    ahead = stepping.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    stepping.apply(plan, "broken")
    assert stepping.scheduler.schedule_ahead(ahead) is NotAhead.FAILURE
    stepping.apply(ahead)
    assert stepping.status("sharing") is SequenceStatus.WAITING
    stepping.finish()
