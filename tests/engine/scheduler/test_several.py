"""Requests of several sequences, sampled or beams, as they fork, make room and start again."""

import pytest

from baton.engine.request import FinishReason, KvSource
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import EarlyStopping
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request


def test_siblings_are_numbered_from_the_first_and_differ():
    harness = Harness(40)
    harness.add(request("a", [1] * 5, n=3, temperature=1.0, sequence_index=4))
    expected = harness.live["a"]
    harness.run()
    assert sorted(expected.produced) == [4, 5, 6]
    assert len({tuple(tokens) for tokens in expected.produced.values()}) > 1


def test_finished_sibling_keeps_shared_blocks_for_the_others():
    harness = Harness(40, prefix_caching=False)
    stops = frozenset({1, 2, 3, 4})
    harness.add(request("a", range(9), n=4, temperature=1.0, max_tokens=20, stop_token_ids=stops))
    expected = harness.live["a"]
    harness.run()
    assert {reason for _, reason in expected.outcomes.values()} == {FinishReason.STOP_TOKEN}
    assert len({len(tokens) for tokens in expected.produced.values()}) > 1
    harness.check_empty()


def test_request_forks_from_an_external_prompt():
    harness = Harness([cache_group(40), cache_group(40, 3)])
    harness.add(request("a", range(9), n=3, temperature=1.0, kv_source=KvSource.EXTERNAL))
    harness.step()
    harness.deliver("a", with_token=False)
    harness.step()
    assert harness.computed == {"a": (8, 9)}
    harness.run()
    assert not harness.live


def test_preempted_sibling_recomputes_its_encoder_inputs():
    """Encoder outputs that one sibling is done with, or has lost, another may be about to use."""
    harness = Harness(9, block_size=2, encoder_budget=4, encoder_cache_tokens=4)
    inputs = (EncoderInput(b"A", 0, 2), EncoderInput(b"B", 2, 4))
    harness.add(
        request("a", [0] * 6, n=3, temperature=1.0, encoder_inputs=inputs, prompt_logprobs=0)
    )
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 1
    assert not harness.live


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("num_blocks", [40, 12])
def test_beams_equal_beams_run_alone(num_blocks, early_stopping):
    harness = Harness(num_blocks, max_num_seqs=8)
    for i in range(3):
        harness.add(
            request(
                f"beams{i}",
                [i] * (5 + i),
                beam_width=3,
                n=2,
                early_stopping=early_stopping,
                eos_token_ids=frozenset({3}),
            )
        )
    harness.run()
    assert not harness.live
    assert (harness.scheduler.stats().num_preemptions > 0) == (num_blocks == 12)


def num_waiting(harness: Harness) -> int:
    return harness.scheduler.stats().num_waiting


def test_preempted_beams_restart_together():
    harness = Harness(15, policy="priority", prefix_caching=False)
    harness.add(request("beams", [1] * 9, beam_width=3, max_tokens=12, priority=1))
    harness.step()
    harness.step()
    harness.add(request("best", [2] * 24, max_tokens=36, priority=0))
    harness.step_until(lambda: num_waiting(harness))
    beams = list(harness.live["beams"].request.sequences)
    assert num_waiting(harness) == len(beams) > 1
    harness.step_until(lambda: num_waiting(harness) < len(beams))
    assert num_waiting(harness) == 0
    assert "best" not in harness.live
    harness.run()
    assert not harness.live


def test_preempted_beams_compute_their_last_token_together():
    """They catch up one by one, under the budgets of any prompt."""
    harness = Harness(
        10,
        policy="priority",
        max_num_batched_tokens=5,
        long_prefill_threshold=3,
        prefix_caching=False,
    )
    harness.add(request("beams", [1] * 9, beam_width=2, max_tokens=12, priority=1))
    for _ in range(5):
        harness.step()
    beams = list(harness.live["beams"].request.sequences)
    harness.add(request("best", [2] * 16, max_tokens=20, priority=0))
    harness.step_until(lambda: num_waiting(harness) == len(beams))
    caught_up = []
    plan = harness.step()
    while not len(plan.beam_slots):
        caught_up += [name for name in harness.computed if name.startswith("beams")]
        plan = harness.step()
    assert len(plan.beam_slots) == len(beams)
    assert len(caught_up) > 2 * len(beams)
    harness.run()
    assert not harness.live


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5, 6])
def test_preempted_beams_hit_their_cached_blocks(num_steps):
    harness = Harness([cache_group(60), cache_group(60, 5)])
    harness.add(request("beams", [1] * 9, beam_width=2, max_tokens=8))
    for _ in range(num_steps):
        harness.step()
    computed = [s.num_computed_tokens for s in harness.live["beams"].request.sequences]
    harness.preempt("beams")
    harness.step()
    found = {(n // 4 * 4, n) for n in computed if n % 4}
    assert set(harness.computed.values()) == found
    harness.run()
    assert not harness.live


def test_fully_cached_beams_restart_without_computing():
    """But for the last token, which they compute together."""
    harness = Harness(60, block_size=1)
    harness.add(request("twin", [1] * 5, beam_width=2, max_tokens=9))
    harness.run()
    harness.add(request("beams", [1] * 5, beam_width=2, max_tokens=9))
    for _ in range(3):
        harness.step()
    harness.preempt("beams")
    plan = harness.step()
    assert harness.computed == {}
    assert plan.made_progress
    harness.step()
    assert len(harness.computed) == 2
    harness.run()
    assert not harness.live


def test_fork_may_take_the_slot_of_beams_aborted_meanwhile():
    """The result of beams is theirs by who computed it, not by the slot."""
    harness = Harness(40, max_num_seqs=4)
    harness.add(request("beams", [1] * 5, beam_width=2))
    harness.step()
    harness.add(request("forks", [2] * 5, n=2, temperature=1.0))
    plan = harness.schedule()
    assert len(plan.beam_slots) == 2
    result = harness.runner.run(plan)
    harness.abort("beams")
    harness.apply(plan, result)
    harness.run()
    assert not harness.live


def test_stalled_beams_are_freed_by_preempting_the_last():
    """One of the beams has begun again; the other waits behind who ranks before it, and who waits
    for the blocks that the first holds."""
    harness = Harness(
        8,
        policy="priority",
        max_num_batched_tokens=4,
        full_sequence_must_fit=True,
        prefix_caching=False,
    )
    harness.add(request("beams", [1] * 7, beam_width=2, max_tokens=10, priority=1))
    harness.step_until(lambda: len(harness.live["beams"].request.sequences) == 2)
    harness.step()
    harness.add(request("first", [2] * 15, max_tokens=5, priority=0))
    harness.step_until(lambda: num_waiting(harness) == 2)
    harness.step_until(lambda: num_waiting(harness) == 1)  # a step's tokens are not enough for two
    assert "first" not in harness.live
    harness.add(request("second", [3] * 25, max_tokens=2, priority=0))
    plans = harness.run()
    assert [plan.num_tokens for plan in plans if plan.made_progress].count(0) == 1
    assert not harness.live


def test_beams_survive_a_lack_of_candidate_tokens():
    harness = Harness(60, max_num_seqs=4)
    eos = frozenset(range(9))  # two tokens go on
    harness.add(request("beams", [1] * 5, beam_width=2, eos_token_ids=eos))
    harness.run()
    assert not harness.live
