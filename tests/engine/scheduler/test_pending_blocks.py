"""Prefixes that are shared within the step that computes them."""

import pytest

from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request

SHARED = [i * i % 11 for i in range(16)]
WINDOWS = [(None,), (None, 5), (5,), (6, 2)]


def crowd(windows: tuple[int | None, ...] = (None,), **config: object) -> Harness:
    groups = [cache_group(80, window, 30) for window in windows]
    return Harness(groups, **{"max_num_seqs": 9, "max_num_batched_tokens": 99, **config})


def num_computed(harness: Harness) -> int:
    return sum(end - start for start, end in harness.computed.values())


@pytest.mark.parametrize("windows", WINDOWS)
def test_shared_prefix_is_computed_once_within_a_step(windows):
    harness = crowd(windows)
    harness.add(*(request(f"{i}", [*SHARED, i], 4) for i in range(8)))
    harness.step()
    assert num_computed(harness) == len(SHARED) + 8
    assert len({s.request.sequences[0].block_ids[0][3] for s in harness.live.values()}) == 1
    assert harness.scheduler.stats().num_hit_tokens == 7 * len(SHARED)
    harness.run()
    harness.check_empty()
    harness.replay()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("threshold", [None, 6])
def test_pending_chunks_are_shared_by_prompts_in_chunks(windows, threshold):
    """The others begin where the first one's chunk completes what they share; who is behind them
    in the queue and shares nothing does not wait for it."""
    harness = crowd(windows, max_num_batched_tokens=14, long_prefill_threshold=threshold)
    harness.add(*(request(f"{i}", [*SHARED, i], 20) for i in range(4)))
    harness.add(request("alone", [9, 9, 9], 20))
    harness.step()
    first = {"0": (0, 14)} if threshold is None else {"0": (0, 6), "alone": (0, 3)}
    assert harness.computed == first
    total = num_computed(harness)
    while not all(each.produced for each in harness.live.values()):
        harness.step()
        total += sum(end - start for start, end in harness.computed.values())
    num_decoded = sum(len(each.produced[0]) - 1 for each in harness.live.values())
    assert total - num_decoded == len(SHARED) + 4 + 3
    harness.run()
    harness.check_empty()


def test_pending_last_block_is_computed_again_and_not_copied():
    """Copies precede the step: its source is not written yet."""
    harness = crowd()
    harness.add(request("a", SHARED), request("b", SHARED))
    plan = harness.schedule()
    assert not plan.copies
    assert harness.computed == {"a": (0, 16), "b": (12, 16)}
    harness.apply(plan, harness.runner.run(plan))
    harness.run()


@pytest.mark.parametrize("windows", WINDOWS)
def test_pending_blocks_outlive_an_abort_of_their_writer(windows):
    """It is in the step that was launched; the one that shares them makes them findable."""
    harness = crowd(windows)
    harness.add(request("a", [*SHARED, 1]), request("b", [*SHARED, 2]))
    plan = harness.schedule()
    result = harness.runner.run(plan)
    harness.abort("a")
    harness.apply(plan, result)
    assert harness.find(SHARED, 3) is not None
    harness.add(request("c", [*SHARED, 3]))
    harness.step()
    assert harness.computed["c"] == (16, 17)
    harness.run()
    harness.check_empty()


def test_pending_blocks_are_not_found_before_they_are_computed():
    """Neither by leases nor by the events that tell other workers."""
    harness = crowd()
    harness.add(request("a", [*SHARED, 1]))
    plan = harness.schedule()
    assert harness.find(SHARED, 0) is None
    assert not harness.scheduler.drain_events()
    harness.apply(plan, harness.runner.run(plan))
    assert harness.find(SHARED, 3) is not None


def test_pending_blocks_have_the_encoder_inputs_of_their_writer():
    inputs = [(EncoderInput(content, 2, 3),) for content in (b"A", b"A", b"B")]
    harness = crowd(encoder_budget=9, encoder_cache_tokens=9)
    for i, each in enumerate(inputs):
        harness.add(request(f"{i}", [1, 2, 0, 0, 0, 3, 4, 5, 6], 4, encoder_inputs=each))
    harness.step()
    assert harness.computed == {"0": (0, 9), "1": (8, 9), "2": (0, 9)}
    harness.run()
