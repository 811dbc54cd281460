"""Counts of steps launched ahead, and of those that waited."""

from baton.engine.metering.ahead_meter import AheadMeter
from baton.engine.scheduler.scheduling.plan import NotAhead


def test_ahead_meter_counts_steps_and_reasons():
    meter = AheadMeter()
    before = meter.done
    for reason in (None, NotAhead.FORK, None, NotAhead.BLOCKS, NotAhead.FORK):
        meter.note(reason)
    assert (meter.done.num_ahead, before.num_ahead) == (2, 0)
    assert meter.done.num_waits == {NotAhead.FORK: 2, NotAhead.BLOCKS: 1}
    assert before.num_waits == {}
