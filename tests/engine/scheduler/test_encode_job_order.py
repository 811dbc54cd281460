"""In which order encode jobs that wait begin: in that of the requests that need their outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton.engine.scheduler.kv.encoder_cache import EncoderCache
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob, EncodeJobs
from baton.engine.scheduler.scheduling.policy import (
    AGEING_STEPS,
    POLICIES,
    DecodeOrder,
    Policy,
    Ranker,
)
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import request

MAX_LENGTH = 8
LAST_COME = Policy(DecodeOrder.FIRST, lambda _request, arrival, _step: -float(arrival))


@dataclass(frozen=True)
class Arrival:
    """A request, or the job for its image, that arrives before a step."""

    step: int
    length: int
    priority: int
    first_token_deadline: float | None
    is_expected: bool

    @property
    def ranked_by(self) -> dict[str, Any]:
        return {
            "priority": self.priority,
            "arrival_time": float(self.step),
            "first_token_deadline": self.first_token_deadline,
        }


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 6),
        length=st.integers(1, MAX_LENGTH),
        priority=st.integers(-1, 1),
        first_token_deadline=st.none() | st.floats(-5.0, 60.0),
        is_expected=st.booleans(),
    ),
    max_size=12,
)


def scheduler_of(policy: Policy) -> Scheduler:
    """A scheduler with room for one request at a time, and for one encoder output."""
    config = SchedulerConfig(
        max_num_batched_tokens=MAX_LENGTH,
        max_num_seqs=1,
        block_size=16,
        max_model_len=64,
        vocab_size=8,
        encoder_cache_tokens=MAX_LENGTH,
        encoder_budget=MAX_LENGTH,
    )
    return Scheduler(config, [cache_group(20)], policy)


def apply(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan, StepResult(np.zeros(len(plan.sample_rows), np.int64)))


def order_of_requests(policy: Policy, arrivals: Sequence[Arrival]) -> list[int]:
    """In which order requests are computed, one in each step."""
    scheduler, begun = scheduler_of(policy), []
    for step in count():
        for number, each in enumerate(arrivals):
            if each.step == step:
                prompt = [1] * each.length
                scheduler.add(request(f"{number}", prompt, max_tokens=1, **each.ranked_by))
        plan = scheduler.schedule()
        begun += [int(sequence.request.request_id) for sequence in plan.new_slots]
        apply(scheduler, plan)
        if len(begun) == len(arrivals):
            return begun
    raise AssertionError


def order_of_jobs(policy: Policy, arrivals: Sequence[Arrival]) -> list[int]:
    """In which order jobs get blocks, each until the end of a step."""
    scheduler, begun = scheduler_of(policy), []
    jobs = scheduler.encode_jobs
    for step in count():
        for number, each in enumerate(arrivals):
            if each.step == step:
                wanted = EncoderInput(bytes([number]), 0, each.length)
                add = jobs.expect if each.is_expected else jobs.encode
                add(number, EncodeJob(wanted, **each.ranked_by))
        plan = scheduler.schedule()
        assert sum(o.encoder_input.length for o in plan.encoder.to_compute) <= MAX_LENGTH
        begun += [held.number for held in plan.encoder.held]
        apply(scheduler, plan)
        jobs.release(*(held.number for held in plan.encoder.held))
        jobs.check_integrity()
        if len(begun) == len(arrivals):
            return begun
    raise AssertionError


@pytest.mark.parametrize("policy", [*POLICIES.values(), LAST_COME], ids=[*POLICIES, "last-come"])
@given(arrivals=ARRIVALS)
def test_encode_jobs_begin_in_the_order_of_requests(policy, arrivals):
    assert order_of_jobs(policy, arrivals) == order_of_requests(policy, arrivals)


@pytest.mark.parametrize(
    ("policy", "kind", "flood"),
    [
        ("priority", {"priority": 1}, {"priority": 0}),
        ("shortest-prefill", {"length": MAX_LENGTH}, {"length": 1}),
        ("deadline", {"first_token_deadline": 30.0}, {"first_token_deadline": None}),
    ],
)
def test_policy_starves_no_encode_job(policy, kind, flood):
    """Room for one output, and in every step a new job that ranks before the one that waits."""
    scheduler = scheduler_of(POLICIES[policy])
    jobs = scheduler.encode_jobs
    wanted = EncoderInput(b"waits", 0, kind.pop("length", 1))
    jobs.encode(0, EncodeJob(wanted, **kind))
    length = flood.pop("length", 1)
    for step in range(1, 2 * AGEING_STEPS):
        other = EncoderInput(step.to_bytes(2), 0, length)
        jobs.encode(step, EncodeJob(other, arrival_time=step / 10, **flood))
        plan = scheduler.schedule()
        apply(scheduler, plan)
        (held,) = plan.encoder.held
        if held.number == 0:
            return
        jobs.release(held.number)
    raise AssertionError("it starves")


def test_encode_job_is_overtaken_by_none_of_lower_rank():
    jobs = EncodeJobs(EncoderCache(3, 1), 10, Ranker(POLICIES["priority"]))
    jobs.encode(1, EncodeJob(EncoderInput(b"a", 0, 2)))
    jobs.schedule()
    jobs.encode(2, EncodeJob(EncoderInput(b"small", 0, 1), priority=1))
    jobs.encode(3, EncodeJob(EncoderInput(b"large", 0, 3), priority=0))
    jobs.schedule()
    assert [held.number for held in jobs.take_answers()] == [1]
    jobs.release(1)
    jobs.schedule()
    assert [held.number for held in jobs.take_answers()] == [3]
