"""Prefills that are kept for others, and sequences whose KV others compute."""

import pytest

from baton.engine.request import KvSource, Purpose
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request


def sequence_of(harness: Harness, name: str) -> Sequence:
    return (harness.live | harness.kept)[name].request.sequences[0]


def test_prefill_ends_after_one_token_and_keeps_its_blocks():
    harness = Harness(8, max_num_batched_tokens=5)
    harness.add(request("p", range(11), purpose=Purpose.PREFILL))
    reported = []
    while harness.live:
        plan = harness.schedule()
        progress = harness.apply(plan, harness.runner.run(plan))
        reported += progress.others
    assert [item.num_computed_tokens for item in reported] == [5, 10, 11]
    table = tuple(sequence_of(harness, "p").block_ids[0])
    assert [item.block_ids for item in reported] == [(table[:2],), (table,), (table,)]
    assert harness.scheduler.stats().num_held_blocks == 3
    assert harness.scheduler.schedule().released == (("p", 0),)
    harness.release("p")
    assert harness.scheduler.stats().num_held_blocks == 0


def test_prefill_is_never_preempted():
    harness = Harness(4)
    harness.add(request("grows", [1] * 7), request("p", [2] * 7, purpose=Purpose.PREFILL))
    grows = sequence_of(harness, "grows")
    for _ in range(6):
        harness.step()
    assert grows.num_interruptions == 1
    assert list(harness.kept) == ["p"]
    harness.release("p")
    harness.run()
    assert not harness.live


def test_running_prefill_is_skipped_as_a_preemption_victim():
    harness = Harness(5, max_num_batched_tokens=9, long_prefill_threshold=2)
    harness.add(request("grows", [1] * 7))
    for _ in range(4):
        harness.step()
    harness.add(request("p", [2] * 12, purpose=Purpose.PREFILL))
    grows = sequence_of(harness, "grows")
    while "p" in harness.live:
        harness.step()
    assert grows.num_interruptions > 0


def test_prefill_keeps_the_blocks_that_its_last_token_sees():
    """Token 16 sees 12 on; what is before has been given back, and no more than that."""
    harness = Harness([cache_group(20), cache_group(20, 5)], max_num_batched_tokens=4)
    harness.add(request("p", [1, 2] * 8 + [3], purpose=Purpose.PREFILL))
    harness.run()
    full, windowed = sequence_of(harness, "p").block_ids
    assert NULL_BLOCK not in full
    assert [block != NULL_BLOCK for block in windowed] == [False, False, False, True, True]


def test_external_allocation_of_a_window_holds_needed_blocks():
    harness = Harness([cache_group(20), cache_group(20, 5)])
    harness.add(request("d", [1, 2] * 8 + [3], kv_source=KvSource.EXTERNAL))
    (allocation,) = harness.step().external
    full, windowed = allocation.block_ids
    assert NULL_BLOCK not in full
    assert [block != NULL_BLOCK for block in windowed] == [False, False, False, True, True]
    harness.deliver("d")
    harness.run()


@pytest.mark.parametrize("with_token", [True, False])
def test_external_request_decodes_once_its_kv_arrives(with_token):
    harness = Harness(20)
    harness.add(request("d", range(7), kv_source=KvSource.EXTERNAL, given=2))
    plan = harness.step()
    assert plan.num_tokens == 0
    assert plan.made_progress
    assert not harness.scheduler.has_work
    harness.arrive("d", 1)
    harness.deliver("d", with_token=with_token)
    assert harness.scheduler.has_work
    harness.step()
    assert harness.computed == {"d": (7, 8) if with_token else (6, 7)}
    harness.run()
    assert not harness.live


def test_external_request_may_finish_with_its_first_token():
    harness = Harness(20)
    harness.add(request("d", range(7), max_tokens=1, kv_source=KvSource.EXTERNAL))
    harness.step()
    harness.deliver("d")
    assert not harness.live
    harness.run()
    harness.check_empty()


def test_external_request_is_recomputed_when_its_transfer_fails():
    harness = Harness(20)
    harness.add(request("d", range(7), kv_source=KvSource.EXTERNAL, prompt_logprobs=0))
    harness.step()
    harness.arrive("d", 1)
    harness.fail("d")
    harness.step()
    assert harness.computed == {"d": (0, 7)}
    harness.run()
    assert not harness.live


def test_external_request_reports_no_prompt_logprobs():
    """And not again when it is computed once more."""
    harness = Harness(4, prefix_caching=False)
    harness.add(request("first", [1] * 7))
    kind = {"kv_source": KvSource.EXTERNAL, "prompt_logprobs": 0}
    harness.add(request("d", [2] * 7, **kind))
    harness.step()
    harness.deliver("d")
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    assert not harness.live


def test_siblings_report_prompt_logprobs_once_amid_preemption():
    harness = Harness(3, prefix_caching=False)
    harness.add(request("a", [1] * 7, n=2, temperature=1.0, max_tokens=4, prompt_logprobs=0))
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    assert not harness.live


def test_request_awaiting_kv_is_never_preempted():
    harness = Harness(5)
    harness.add(request("grows", [1] * 7))
    harness.add(request("d", [2] * 7, kv_source=KvSource.EXTERNAL))
    for _ in range(7):
        harness.step()
    assert harness.awaiting == ["d"]
    assert harness.scheduler.stats().num_awaiting_kv == 1
    harness.deliver("d")
    harness.run()
    assert not harness.live


def test_apply_skips_requests_that_ended_after_schedule():
    harness = Harness(8)
    harness.add(*(request(name, [1, 2]) for name in "abc"))
    harness.step()
    plan = harness.schedule()
    harness.abort("a")
    harness.abort("b")
    progress = harness.apply(plan, harness.runner.run(plan))
    assert [s.request.request_id for s in progress.decoded.sequences] == ["c"]
    assert progress.decoded.rows.tolist() == [2]
    assert sorted(harness.schedule().released) == [("a", 0), ("b", 0)]


def test_request_id_is_reusable_right_after_abort():
    harness = Harness(8)
    harness.add(request("a", [1, 2]))
    harness.step()
    harness.abort("a")
    harness.add(request("a", [3, 4]))
    plan = harness.step()
    assert plan.released == (("a", 0),)
    assert [s.key for s in plan.new_slots] == [("a", 0)]
    harness.run()
    assert not harness.live


def test_prefill_is_computed_in_halves_while_no_sequence_decodes():
    """So its blocks move meanwhile; a prompt behind it does not share its steps."""
    harness = Harness(60, max_num_batched_tokens=64, handoff_chunk_tokens=8)
    harness.add(request("p", range(36), purpose=Purpose.PREFILL))
    harness.add(request("next", [1] * 6, max_tokens=2, purpose=Purpose.PREFILL))
    steps = []
    while harness.live:
        harness.step()
        steps.append(dict(harness.computed))
    assert steps == [{"p": (0, 18)}, {"p": (18, 27)}, {"p": (27, 36), "next": (0, 6)}]


def test_prefill_is_whole_beside_decodes_or_for_one_token():
    harness = Harness(60, max_num_batched_tokens=64, handoff_chunk_tokens=8)
    harness.add(request("once", range(36), max_tokens=1, purpose=Purpose.PREFILL))
    harness.step()
    assert harness.computed == {"once": (0, 36)}
    harness.add(request("decode", [1] * 3))
    harness.step()
    harness.add(request("p", range(2, 38), purpose=Purpose.PREFILL))
    harness.step()
    assert harness.computed == {"decode": (3, 4), "p": (0, 36)}


def test_prefill_with_an_image_that_chunks_must_not_cut_is_whole():
    """Half of the prompt may be less than the image."""
    encoder = {"cuts_encoder_inputs": False, "encoder_budget": 20, "encoder_cache_tokens": 20}
    harness = Harness(60, max_num_batched_tokens=64, handoff_chunk_tokens=4, **encoder)
    image = EncoderInput(b"A", 2, 14)
    harness.add(request("p", [1] * 18, purpose=Purpose.PREFILL, encoder_inputs=(image,)))
    harness.step()
    assert harness.computed == {"p": (0, 18)}
