"""Prefix hits of full and windowed groups, of whole prompts, and misses."""

from typing import Any

import pytest

from baton.engine.request import KvSource
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import ROOTS, Harness, request

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def finish(harness: Harness, prompt: list[int], **kind: Any) -> None:
    """Computes a prompt, whose blocks are free and findable thereafter."""
    harness.add(request("first", prompt, **{"max_tokens": 1, **kind}))
    harness.run()


def again(harness: Harness, prompt: list[int], **kind: Any) -> StepPlan:
    harness.add(request("again", prompt, **{"max_tokens": 1, **kind}))
    return harness.step()


def hybrid() -> Harness:
    return Harness([cache_group(20), cache_group(20, 5)])


def test_repeated_prompt_hits_its_cached_blocks():
    harness = Harness(8)
    finish(harness, PROMPT[:9], max_tokens=4)
    again(harness, PROMPT[:9], max_tokens=4)
    assert harness.computed == {"again": (8, 9)}
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_hit_tokens, stats.num_prompt_tokens) == (8, 18)


def test_prompt_computed_in_chunks_is_cached_in_full():
    harness = Harness(8, max_num_batched_tokens=5)
    finish(harness, PROMPT)
    again(harness, [*PROMPT, 6])
    assert harness.computed == {"again": (20, 21)}


@pytest.mark.parametrize("groups", [[None], [None, 5], [5], [6, 2]])
def test_fully_cached_prompt_computes_one_token_after_one_copy(groups):
    harness = Harness([cache_group(12, window) for window in groups])
    finish(harness, PROMPT[:8])
    plan = again(harness, PROMPT[:8])
    assert harness.computed == {"again": (7, 8)}
    assert [m.group for m in plan.copies] == list(range(len(groups)))
    assert [m.source for m in plan.copies] == [
        harness.find(PROMPT[:8], 1, group) for group in range(len(groups))
    ]
    assert not plan.cleared


def test_copied_block_is_cached_when_its_source_is_evicted():
    harness = Harness(12)
    finish(harness, PROMPT[:8])
    harness.add(request("again", PROMPT[:8], max_tokens=4))
    plan = harness.schedule()
    harness.forget(PROMPT[:8], 1)
    harness.apply(plan, harness.runner.run(plan))
    assert harness.find(PROMPT[:8], 1) == plan.copies[0].target
    harness.run()


def test_prompt_ending_within_a_block_copies_nothing():
    harness = Harness(12)
    finish(harness, PROMPT[:11])
    plan = again(harness, PROMPT[:11])
    assert harness.computed == {"again": (8, 11)}
    assert not plan.copies


def test_shared_running_block_is_copied_before_a_write():
    harness = Harness(12)
    harness.add(request("runs", PROMPT[:8]))
    harness.step()
    plan = again(harness, PROMPT[:8])
    assert harness.computed["again"] == (7, 8)
    assert len(plan.copies) == 1


def test_cached_last_block_is_recomputed_when_no_copy_fits():
    harness = Harness(2)
    finish(harness, PROMPT[:8])
    plan = again(harness, PROMPT[:8])
    assert harness.computed == {"again": (4, 8)}
    assert not plan.copies


def test_eviction_takes_the_end_of_a_prefix_first():
    harness = Harness(6)
    finish(harness, [1] * 16)
    finish(harness, [2] * 13)
    again(harness, [1] * 17)
    assert harness.computed == {"again": (8, 17)}


def test_windowed_prefix_hits_without_its_early_blocks():
    harness = Harness([cache_group(20, 5)])
    finish(harness, PROMPT)
    for index in (0, 1, 2):
        harness.forget(PROMPT, index)
    again(harness, [*PROMPT, 6, 6], max_tokens=3)
    assert harness.computed == {"again": (20, 22)}
    (sequence,) = harness.live["again"].request.sequences
    assert sequence.block_ids[0][:4] == [NULL_BLOCK] * 4


@pytest.mark.parametrize(
    ("windows", "forgotten", "start"),
    [
        ([5], [(4, 0), (0, 0)], 16),  # tokens 12 to 15 are all that 16 sees
        ([5], [(3, 0)], 20),  # 20 sees 16 on
        ([None, 5], [], 20),
        ([None, 5], [(3, 0)], 12),  # the full group ends the hit; 12 sees 8 on, in block 2
        ([None, 5], [(2, 1)], 20),  # no query behind 20 sees it
        ([None, 5], [(4, 1)], 16),
        ([None, 5], [(3, 0), (2, 1)], 8),  # each shortens what the other leaves
        ([None, 5], [(0, 0)], 0),
        ([None, 5], [(3, 1), (4, 1), (2, 1)], 8),
    ],
)
def test_hybrid_hit_is_bounded_by_every_group(windows, forgotten, start):
    harness = Harness([cache_group(20, window) for window in windows])
    finish(harness, PROMPT)
    for index, group in forgotten:
        harness.forget(PROMPT, index, group)
    again(harness, [*PROMPT, 6])
    assert harness.computed == {"again": (start, 21)}


def test_external_allocation_covers_what_the_last_token_sees():
    """It may be computed once more: token 7 sees 3, which is in block 0."""
    harness = hybrid()
    finish(harness, PROMPT[:8])
    harness.forget(PROMPT[:8], 0, group=1)
    plan = again(harness, PROMPT[:8], kv_source=KvSource.EXTERNAL)
    (allocation,) = plan.external
    assert allocation.num_hit_blocks == 0
    assert NULL_BLOCK not in allocation.block_ids[1]
    harness.deliver("again", with_token=False)
    harness.run()


def test_external_allocation_hits_a_whole_prompt_without_a_copy():
    harness = hybrid()
    finish(harness, PROMPT[:8])
    plan = again(harness, PROMPT[:8], kv_source=KvSource.EXTERNAL, max_tokens=4)
    assert plan.external[0].num_hit_blocks == 2
    assert not plan.copies
    harness.deliver("again", with_token=False)
    plan = harness.step()
    assert harness.computed == {"again": (7, 8)}
    assert len(plan.copies) == 2  # written, it must not be what others find
    harness.run()


def test_blocks_in_transfer_are_not_hit():
    harness = Harness(20)
    harness.add(request("claims", PROMPT, kv_source=KvSource.EXTERNAL))
    harness.step()
    harness.arrive("claims", 3)
    again(harness, PROMPT)
    assert harness.computed == {"again": (0, 20)}
    harness.deliver("claims")
    harness.add(request("after", [*PROMPT, 6], max_tokens=1))
    harness.step()
    assert harness.computed["after"] == (20, 21)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, {"prompt_logprobs": 0}),
        ({}, {"root": ROOTS[1]}),
        ({"prefix_caching": False}, {}),
    ],
    ids=["scores are wanted", "another root", "no caching"],
)
def test_prompts_that_may_find_nothing_are_computed_in_full(config, kind):
    harness = Harness(20, **config)
    finish(harness, PROMPT)
    again(harness, PROMPT, **kind)
    assert harness.computed == {"again": (0, 20)}


def test_prefixes_of_different_encoder_inputs_do_not_match():
    harness = Harness(20, encoder_budget=8, encoder_cache_tokens=8)
    finish(harness, [0] * 12, encoder_inputs=(EncoderInput(b"cat", 5, 2),))
    again(harness, [0] * 12, encoder_inputs=(EncoderInput(b"dog", 5, 2),))
    assert harness.computed == {"again": (4, 12)}
    again(harness, [0] * 12, encoder_inputs=(EncoderInput(b"cat", 5, 2),))
    assert harness.computed == {"again": (11, 12)}
    again(harness, [0] * 12, encoder_inputs=(EncoderInput(b"cat", 6, 2),))
    assert harness.computed == {"again": (4, 12)}


def test_block_filled_by_output_is_hit_with_its_encoder_input():
    harness = Harness(20, encoder_budget=8, encoder_cache_tokens=8)
    kind = {"encoder_inputs": (EncoderInput(b"cat", 4, 2),)}
    harness.add(request("first", [0] * 6, max_tokens=4, **kind))
    outcome, _ = harness.live["first"].outcomes[0]
    harness.run()
    again(harness, [*[0] * 6, *outcome], **kind)
    assert harness.computed == {"again": (8, 10)}


def test_reset_prefix_cache_forgets_all_and_reports_a_clear():
    harness = hybrid()
    finish(harness, PROMPT)
    harness.replay()
    harness.reset_prefix_cache()
    events = harness.scheduler.drain_events()
    assert (events.cleared, events.stored, events.removed) == (True, (), ())
    again(harness, PROMPT)
    assert harness.computed == {"again": (0, 20)}


def test_cache_events_come_from_the_group_that_sees_furthest():
    harness = Harness([cache_group(20, 2), cache_group(20, 5)])
    finish(harness, PROMPT)
    harness.replay()
    harness.forget(PROMPT, 3, group=0)
    assert not harness.scheduler.drain_events()
    block_hash = next(h for h, b in harness.groups[1].pool._cached.items() if b)
    harness.evict([harness.groups[1].pool._cached[block_hash]], group=1)
    assert harness.scheduler.drain_events().removed == (block_hash,)


def test_hit_tokens_count_once_despite_preemption():
    harness = Harness(6)
    finish(harness, PROMPT[:8])
    harness.add(request("grows", [6] * 7, max_tokens=14))
    again(harness, PROMPT[:9], max_tokens=8)
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_hit_tokens, stats.num_prompt_tokens) == (8, 8 + 7 + 9)
