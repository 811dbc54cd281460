"""The load that `python -m bench scheduler` measures is the one it says."""

import pytest

from bench.engine.scheduler import BLOCK_SIZE, Load

NUM_STEPS = 400


@pytest.mark.parametrize("num_sequences", [1, 5, 32])
def test_load_stays_steady_over_many_steps(num_sequences):
    load = Load(num_sequences)
    for _ in range(NUM_STEPS):
        seconds, plan = load.step()
        assert seconds > 0
        assert plan.is_pure_decode
        assert len(plan.decode_slots) <= num_sequences
    load.scheduler.check_integrity()
    assert load.scheduler.stats().num_preemptions == 0
    assert load.measure() > 0


def test_load_changes_one_sequence_in_eight_per_step():
    """One in thirty-two ends, one starts, and one in sixteen takes a block in each group."""
    load = Load(32)
    plans = [load.step()[1] for _ in range(NUM_STEPS)]
    num_rows = sum(len(plan.decode_slots) for plan in plans)
    num_started = sum(len(plan.external) for plan in plans)
    num_ended = sum(len(plan.released) for plan in plans)
    num_grown = sum(len({b for g, b in plan.cleared if g == 0}) for plan in plans)
    assert num_rows / NUM_STEPS == pytest.approx(32, rel=0.05)
    assert num_started / num_rows == pytest.approx(1 / 32, rel=0.1)
    assert num_ended / num_rows == pytest.approx(1 / 32, rel=0.1)
    assert num_grown / num_rows == pytest.approx(1 / BLOCK_SIZE, rel=0.2)
