"""An engine tells of each step when it was and what its time went to."""

import time

from baton.engine.metering.step_times import StepClock, TimeSpent
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.engine.engines import load, request
from tests.support.engine.prompts import random_prompt


def test_step_times_add_up_to_the_step():
    engine = load(locate("tiny"), max_num_batched_tokens=48, max_num_seqs=8, async_scheduling=False)
    assert engine.core.reading().time_spent == TimeSpent()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.core.add(request("r", random_prompt(100, seed=1), params))
    begin, steps = time.perf_counter(), []
    while engine.core.has_work:
        steps.append(engine.core.step().times)
    assert [step.spent.num_steps for step in steps] == [1] * len(steps)
    assert len(steps) >= 7  # three chunks, the last of which brings a token, and four decodes
    for step in steps:
        assert begin <= step.started < step.ended
        begin = step.ended
        parts = step.spent
        assert min(parts.schedule, parts.forward, parts.sample) >= 0
        assert abs(parts.seconds - (step.ended - step.started)) < 1e-9
    assert all(step.spent.forward > 0 and step.spent.sample > 0 for step in steps[:7])
    assert [step.before for step in steps[1:]] == [step.after for step in steps[:-1]]
    assert engine.core.reading().time_spent == steps[-1].after


def test_step_clock_counts_gpu_waits_in_sample_as_forward():
    clock = StepClock(is_on_gpu=True)
    with clock.sample():
        time.sleep(0.001)
    spent = clock.note_step(time.perf_counter() - 0.002).spent
    assert spent.sample == 0.0
    assert spent.forward >= 0.001
