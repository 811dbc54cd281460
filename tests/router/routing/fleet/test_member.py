"""Snapshots of a fleet: what is kept from one to the next equals a new one."""

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.worker_model import PoolModel, WorkDone
from tests.support.router.records import RECORD

_CHANGES = st.lists(st.sampled_from(["nothing", "take", "give back", "learn", "later"]))
_LOOKS = st.tuples(st.integers(0, 2).map(lambda n: 16 * n), st.sampled_from(["", "draining"]))


@given(st.lists(st.tuples(_CHANGES, _LOOKS), min_size=1))
def test_member_candidate_matches_its_current_state(steps):
    member, now, num_steps = Member(RECORD, PoolModel()), 1e6, 0
    with ExitStack() as loads:
        for changes, (num_cached, excluded) in steps:
            for change in changes:
                match change:
                    case "take":
                        loads.enter_context(
                            member.loaded(num_tokens=100, num_held_tokens=7, num_encoder_tokens=3)
                        )
                    case "give back":
                        loads.pop_all().close()
                    case "learn":
                        num_steps += 1
                        work = WorkDone(num_steps, 512 * num_steps, 0, 0, 1.0 * num_steps)
                        member.model.observe_work(work)
                    case "later":
                        now += 5.0
            assert member.candidate(now, num_cached, excluded) == member.load.candidate(
                "w",
                "decode",
                member.pairing,
                now,
                num_cached_tokens=num_cached,
                max_held_tokens=16_000,
                excluded=excluded,
                rates=member.model.rates,
                limits=member.limits,
                kv_dtype="float32",
            )


def test_member_candidate_is_reused_when_nothing_changed():
    member = Member(RECORD, PoolModel())
    first = member.candidate(5.0, 16, "")
    assert member.candidate(5.0, 16, "") is first
