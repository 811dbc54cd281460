"""A sequence that makes room is computed again, swapped or given back: whatever takes least."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.engine.request import FinishReason, KvSource, Purpose, ReturnCost
from baton.engine.scheduler.sequences.config import Preemption
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request

CHEAP = ReturnCost(0.0, 0.0, 1.0)

# `make_room` preempts with this many tokens computed, of which so many came since it arrived.
NUM_COMPUTED, NUM_NEW, NUM_BLOCKS = 8, 2, 2


def crowded(mode: Preemption = Preemption.AUTO, num_host_blocks: int = 20) -> Harness:
    """Room for four blocks; two requests of two blocks each need a third one at once."""
    return Harness([cache_group(4, num_host_blocks=num_host_blocks)], preemption=mode)


def make_room(harness: Harness, cost: ReturnCost | None = CHEAP) -> None:
    """Preempts, of two requests that decode, the one whose KV came from elsewhere."""
    harness.add(request("stays", [1] * 7))
    source = KvSource.EXTERNAL
    harness.add(request("leaves", [2] * 7, kv_source=source, return_cost=cost))
    harness.step()
    harness.deliver("leaves")
    harness.step_until(lambda: harness.scheduler.stats().num_preemptions)


def way_of(harness: Harness) -> Preemption:
    stats = harness.scheduler.stats()
    assert stats.num_preemptions == 1
    if stats.num_returns:
        return Preemption.RETURN
    return Preemption.SWAP if stats.num_swaps else Preemption.RECOMPUTE


costs = st.floats(0.0, 10.0)


@given(costs, costs, costs, costs, costs)
@example(1.0, 1.0, 0.1, 0.1, 1.0)
@example(1e-9, 1.0, 0.1, 0.1, 1.0)
@example(1.0, 1e-9, 0.1, 0.1, 1.0)
@example(1.0, 1.0, 8.0, 0.0, 1.0)
def test_preemption_picks_the_cheapest_mode(swap, recompute, fixed, per_token, own_recompute):
    harness = crowded()
    harness.scheduler.costs.swap_block = swap
    harness.scheduler.costs.compute_token = own_recompute  # not by what the offer compares with
    make_room(harness, ReturnCost(fixed, per_token, recompute))
    seconds = {
        Preemption.RECOMPUTE: NUM_COMPUTED * recompute,
        Preemption.SWAP: 2 * NUM_BLOCKS * swap,
        Preemption.RETURN: fixed + NUM_NEW * per_token,
    }
    assert seconds[way_of(harness)] == min(seconds.values())
    harness.run()
    harness.check_empty()


@pytest.mark.parametrize(
    "mode", [m for m in Preemption if m is not Preemption.AUTO], ids=lambda mode: mode.value
)
def test_preemption_uses_the_configured_mode_at_any_cost(mode):
    harness = crowded(mode)
    harness.scheduler.costs.swap_block = 1.0
    make_room(harness, ReturnCost(9.0, 9.0, 1.0))
    assert way_of(harness) is mode


@pytest.mark.parametrize("mode", [Preemption.AUTO, Preemption.RETURN])
def test_preemption_returns_no_request_without_a_return_cost(mode):
    harness = crowded(mode, num_host_blocks=0)
    make_room(harness, None)
    assert way_of(harness) is Preemption.RECOMPUTE
    harness.run()
    assert not harness.live


def test_returned_request_frees_everything_but_its_cache():
    harness = crowded(Preemption.RETURN)
    make_room(harness)
    assert list(harness.returned) == ["leaves"]
    assert list(harness.live) == ["stays"]
    assert harness.find([2] * 7, 0) is not None
    harness.run()
    harness.check_empty()
    assert not harness.runner.known


def test_returned_request_is_reported_after_its_last_token():
    harness = crowded(Preemption.RETURN)
    harness.add(request("stays", [1] * 7))
    harness.add(request("leaves", [2] * 7, kv_source=KvSource.EXTERNAL, return_cost=CHEAP))
    harness.step()
    harness.deliver("leaves")
    told = []
    while harness.live:
        plan = harness.schedule()
        told += harness.apply(plan, harness.runner.run(plan)).others
    (item,) = [item for item in told if item.request.request_id == "leaves"]
    assert item.finish_reason is FinishReason.RETURNED
    assert (item.token_ids, item.position) == ((), 1 + NUM_NEW - 1)


def test_returned_request_placed_again_ends_with_equal_tokens():
    harness = crowded(Preemption.RETURN)
    make_room(harness)
    left = harness.returned["leaves"]
    so_far = [*left.request.spec.token_ids, *left.produced[0]]
    harness.add(request("again", so_far, given=len(left.produced[0]), kv_source=KvSource.EXTERNAL))
    expected = left.outcomes[0][0][len(left.produced[0]) :]
    assert harness.live["again"].outcomes[0][0] == expected
    harness.step_until(lambda: harness.awaiting)
    harness.deliver("again")
    harness.run()
    harness.check_empty()


def test_request_that_preempts_itself_can_be_returned():
    harness = Harness([cache_group(4)], preemption=Preemption.RETURN, prefix_caching=False)
    harness.add(request("stays", [1] * 5))
    harness.add(request("grows", [2] * 7, kv_source=KvSource.EXTERNAL, return_cost=CHEAP))
    harness.step()
    harness.deliver("grows")
    harness.step_until(lambda: harness.returned)
    assert list(harness.returned) == ["grows"]
    harness.run()
    harness.check_empty()


def test_request_may_finish_in_the_step_that_returns_it():
    harness = crowded(Preemption.RETURN)
    harness.add(request("stays", [1] * 7))
    harness.add(request("leaves", [2] * 7, kv_source=KvSource.EXTERNAL, return_cost=CHEAP))
    harness.step()
    harness.deliver("leaves")
    while not harness.returned:
        plan = harness.schedule()
        if harness.returned:
            assert harness.scheduler.abort("leaves") == []
        harness.apply(plan, harness.runner.run(plan))
    harness.run()
    harness.check_empty()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"kv_source": KvSource.LOCAL}, id="local"),
        pytest.param({"purpose": Purpose.PREFILL}, id="prefill"),
        pytest.param({"n": 2, "temperature": 1.0}, id="several"),
        pytest.param({"beam_width": 2}, id="beams"),
    ],
)
def test_request_rejects_a_return_cost_for_unsupported_kinds(kind):
    offered = {"kv_source": KvSource.EXTERNAL, "return_cost": CHEAP}
    assert request("plain", [1] * 7, **offered).spec.return_cost is CHEAP
    with pytest.raises(AssertionError, match="given back"):
        request("r", [1] * 7, **{**offered, **kind})
