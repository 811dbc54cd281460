"""Proposals of role changes: slow to come, never the last of a role, and never back and forth."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.rpc.worker_role import Role
from baton_router.routing.roles.role_balance import (
    Balance,
    Flip,
    Hysteresis,
    RoleBalance,
    WorkerState,
)

MARKS = Hysteresis(high=0.9, low=0.3, dwell_s=10.0, cooldown_s=60.0)
PRESSED, BETWEEN, IDLE = 1.5, 0.5, 0.1


def pools(num_prefill: int, num_decode: int, num_encode: int = 0) -> list[WorkerState]:
    return [
        *(WorkerState(f"e{i}", "encode", 1) for i in range(num_encode)),
        *(WorkerState(f"p{i}", "prefill", 1) for i in range(num_prefill)),
        *(WorkerState(f"d{i}", "decode", 1) for i in range(num_decode)),
    ]


def flipped(workers: list[WorkerState], flip: Flip) -> list[WorkerState]:
    """The workers once one of them has changed its role."""
    (worker,) = (one for one in workers if one.worker == flip.worker)
    assert worker.epoch == flip.epoch
    assert worker.role != flip.role
    changed = replace(worker, role=flip.role, epoch=worker.epoch + 1)
    return [changed if one is worker else one for one in workers]


def seen(
    roles: RoleBalance,
    workers: list[WorkerState],
    prefill: float,
    decode: float,
    *moments: float,
    encode: float = 0.0,
) -> list[Balance]:
    pressures: dict[Role, float] = {"encode": encode, "prefill": prefill, "decode": decode}
    return [roles.observe(workers, pressures, moment) for moment in moments]


def num_of(role: str, workers: list[WorkerState]) -> int:
    return sum(one.role == role for one in workers)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [(PRESSED, IDLE, Flip("d0", "prefill", 1)), (IDLE, PRESSED, Flip("p0", "decode", 1))],
)
def test_role_balance_proposes_lasting_pressure_with_reason(prefill, decode, expected):
    roles, workers = RoleBalance(MARKS), pools(2, 2)
    before, last = seen(roles, workers, prefill, decode, 100.0, 105.0), 110.0
    assert [balance.flip for balance in before] == [None, None]
    assert "5.0 s; it has to last 10 s" in before[-1].reason
    (balance,) = seen(roles, workers, prefill, decode, last)
    assert balance.flip == expected
    assert f"{expected.role} workers are pressed" in balance.reason
    assert expected.worker in balance.reason


def test_role_balance_restarts_dwell_only_on_real_recovery():
    roles, workers = RoleBalance(MARKS), pools(2, 2)
    seen(roles, workers, PRESSED, IDLE, 0.0)
    seen(roles, workers, 0.8, 0.4, 4.0)  # below the high mark and above the low one, but not beyond
    (balance,) = seen(roles, workers, PRESSED, IDLE, 10.0)
    assert balance.flip is not None
    roles = RoleBalance(MARKS)
    seen(roles, workers, PRESSED, IDLE, 0.0)
    seen(roles, workers, BETWEEN, IDLE, 9.0)
    assert all(b.flip is None for b in seen(roles, workers, PRESSED, IDLE, 10.0, 19.0))
    assert seen(roles, workers, PRESSED, IDLE, 20.0)[0].flip is not None


@pytest.mark.parametrize(
    ("prefill", "decode"), [(PRESSED, PRESSED), (IDLE, IDLE), (PRESSED, BETWEEN), (BETWEEN, IDLE)]
)
def test_role_balance_needs_pressure_beside_idle_pool(prefill, decode):
    balances = seen(RoleBalance(MARKS), pools(3, 3), prefill, decode, *range(0, 100, 2))
    assert {(b.flip, b.reason) for b in balances} == {
        (None, "no pool is pressed while another one is idle")
    }


def test_role_balance_ignores_unobserved_time():
    roles, workers = RoleBalance(MARKS), pools(2, 2)
    assert [b.flip for b in seen(roles, workers, PRESSED, IDLE, 0.0, 30.0, 39.0)] == [None] * 3
    assert seen(roles, workers, PRESSED, IDLE, 40.0)[0].flip is not None


def test_role_balance_cools_down_after_change_or_failure():
    roles, workers = RoleBalance(MARKS), pools(2, 4)
    flip = seen(roles, workers, PRESSED, IDLE, *range(0, 12, 2))[-1].flip
    assert flip is not None
    workers = flipped(workers, flip)
    balances = seen(roles, workers, PRESSED, IDLE, *range(12, 72))
    assert all(b.flip is None for b in balances)
    assert "rest for 1.0 s after the last change" in balances[-1].reason
    assert seen(roles, workers, PRESSED, IDLE, 72.0)[0].flip is not None
    roles.begin_cooldown(72.0)
    assert all(b.flip is None for b in seen(roles, workers, PRESSED, IDLE, *range(73, 132)))
    assert seen(roles, workers, PRESSED, IDLE, 132.0)[0].flip is not None


def test_role_balance_changes_nothing_while_worker_drains():
    roles, workers = RoleBalance(MARKS), pools(2, 3)
    draining = [replace(workers[0], is_draining=True, is_ready=False), *workers[1:]]
    balances = seen(roles, draining, PRESSED, IDLE, *range(20))
    assert all(b.flip is None and "a worker is draining" in b.reason for b in balances)
    assert seen(roles, workers, PRESSED, IDLE, 20.0)[0].flip is not None


@pytest.mark.parametrize(
    "workers",
    [
        pools(2, 1),
        [*pools(1, 1), WorkerState("d1", "decode", 1, is_ready=False)],
        [
            *pools(1, 1),
            WorkerState("d1", "decode", 1, b"another"),
            WorkerState("p1", "prefill", 1, b"x"),
        ],
    ],
)
def test_role_balance_spares_last_or_unhelpful_worker(workers):
    balances = seen(RoleBalance(MARKS), workers, PRESSED, IDLE, *range(20))
    assert all(b.flip is None and "no decode worker can be spared" in b.reason for b in balances)


@pytest.mark.parametrize(
    ("workers", "encode", "prefill", "decode", "expected"),
    [
        pytest.param(pools(1, 2, 1), PRESSED, BETWEEN, IDLE, "d0", id="from decode"),
        pytest.param(pools(2, 1, 1), PRESSED, IDLE, BETWEEN, "p0", id="from prefill"),
        pytest.param(pools(1, 1, 2), IDLE, PRESSED, BETWEEN, "e0", id="to prefill"),
        pytest.param(pools(1, 2, 2), 0.0, PRESSED, IDLE, "e0", id="from the idlest"),
        pytest.param(pools(1, 2, 1), 0.0, PRESSED, IDLE, "d0", id="from the one that can spare"),
        pytest.param(pools(1, 2, 1), 1.0, PRESSED, IDLE, "d0", id="to the most pressed"),
    ],
)
def test_role_balance_moves_workers_of_three_pools(workers, encode, prefill, decode, expected):
    balances = seen(RoleBalance(MARKS), workers, prefill, decode, *range(12), encode=encode)
    flip = balances[-1].flip
    assert flip is not None
    assert flip.worker == expected
    assert flip.role == ("prefill" if prefill == PRESSED else "encode")


@pytest.mark.parametrize(("keep", "expected"), [((), "e0"), (("e0",), "e1"), (("e0", "e1"), None)])
def test_role_balance_moves_no_worker_that_keeps_its_role(keep, expected):
    workers = [replace(one, keeps_role=one.worker in keep) for one in pools(1, 1, 2)]
    balances = seen(RoleBalance(MARKS), workers, PRESSED, BETWEEN, *range(12), encode=IDLE)
    flip, reason = balances[-1].flip, balances[-1].reason
    assert (None if flip is None else flip.worker) == expected
    assert expected or "no encode worker can be spared" in reason


def test_role_balance_waits_dwell_of_each_pair_of_pools():
    roles, workers = RoleBalance(MARKS), pools(1, 3, 2)
    seen(roles, workers, PRESSED, BETWEEN, *range(9), encode=BETWEEN)
    (before, *_, last) = seen(roles, workers, PRESSED, IDLE, *range(9, 20), encode=BETWEEN)
    assert "0.0 s; it has to last 10 s" in before.reason
    assert last.flip == Flip("d0", "prefill", 1)


def test_role_balance_keeps_last_encode_worker_by_default():
    balances = seen(RoleBalance(MARKS), pools(2, 2, 1), PRESSED, BETWEEN, *range(20))
    assert all(b.flip is None and "no encode worker can be spared" in b.reason for b in balances)


@pytest.mark.parametrize(("least", "is_begun"), [(0, True), (1, False)])
def test_encode_pool_begins_only_where_it_may_be_empty(least, is_begun):
    roles = RoleBalance(replace(MARKS, min_encode_workers=least))
    balance = seen(roles, pools(2, 2), BETWEEN, IDLE, *range(12), encode=PRESSED)[-1]
    assert balance.flip == (Flip("d0", "encode", 1) if is_begun else None)


def test_encode_pool_without_images_is_given_up_where_allowed():
    roles = RoleBalance(replace(MARKS, min_encode_workers=0))
    balance = seen(roles, pools(2, 2, 1), PRESSED, BETWEEN, *range(12))[-1]
    assert balance.flip == Flip("e0", "prefill", 1)


def test_role_balance_picks_least_busy_then_least_cached():
    workers = [
        *pools(1, 0),
        WorkerState("d0", "decode", 1, num_sequences=1, num_indexed_hashes=0),
        WorkerState("d1", "decode", 1, num_sequences=0, num_indexed_hashes=50),
        WorkerState("d2", "decode", 7, num_sequences=0, num_indexed_hashes=20),
        WorkerState("d3", "decode", 1, is_ready=False),
    ]
    balance = seen(RoleBalance(MARKS), workers, PRESSED, IDLE, *range(12))[-1]
    assert balance.flip == Flip("d2", "prefill", 7)


def test_hysteresis_refuses_marks_that_could_oscillate():
    with pytest.raises(AssertionError):
        Hysteresis(high=0.9, low=0.31)


sizes = st.integers(1, 8)
loads = st.floats(0.0, 20.0)


def flips_under(
    workers: list[WorkerState],
    prefill: float,
    decode: float,
    limits: Hysteresis,
    encode: float = 0.0,
    *,
    is_shared: bool = False,
) -> Iterator[Flip]:
    """Yields the flips proposed, and done, while work of this much a second arrives and is shared
    evenly. `is_shared`: prefill workers encode as many images as encode workers."""
    roles = RoleBalance(limits)
    for moment in range(1600):  # a change takes 46 of them at most
        num_encode, num_prefill = num_of("encode", workers), num_of("prefill", workers)
        with_images = num_encode + num_prefill if is_shared else num_encode or num_prefill
        images = encode / with_images
        encodes_at_prefill = is_shared or not num_encode
        shares: dict[Role, float] = {
            "encode": images if num_encode else encode,
            "prefill": prefill / num_prefill + (images if encodes_at_prefill else 0.0),
            "decode": decode / num_of("decode", workers),
        }
        flip = roles.observe(workers, shares, float(moment)).flip
        if flip is not None:
            workers = flipped(workers, flip)
            assert num_of("prefill", workers) >= 1
            assert num_of("decode", workers) >= 1
            yield flip


@given(sizes, sizes, loads, loads, st.floats(0.01, 0.3), st.sampled_from([0.0, 3.0, 40.0]))
def test_role_balance_settles_under_constant_load(
    num_prefill, num_decode, prefill, decode, low, cooldown
):
    limits = Hysteresis(0.9, low, dwell_s=5.0, cooldown_s=cooldown)
    flips = list(flips_under(pools(num_prefill, num_decode), prefill, decode, limits))
    assert len({flip.role for flip in flips}) <= 1
    assert len(flips) <= num_prefill + num_decode - 2
    assert len({flip.worker for flip in flips}) == len(flips)


@given(
    st.tuples(sizes, sizes, st.integers(0, 4)),
    st.tuples(loads, loads, loads),
    st.floats(0.01, 0.3),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_role_balance_of_three_pools_settles_under_constant_load(
    numbers, work, low, least, is_shared
):
    """Wherever images are encoded: no worker gets a role again that it has given up."""
    limits = Hysteresis(0.9, low, 5.0, cooldown_s=3.0, min_encode_workers=least)
    workers = pools(*numbers)
    flips = list(flips_under(workers, work[0], work[1], limits, work[2], is_shared=is_shared))
    had = {(worker.worker, worker.role) for worker in workers}
    for flip in flips:
        assert (flip.worker, flip.role) not in had
        had.add((flip.worker, flip.role))


@given(
    sizes,
    sizes,
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.1, 8.0)), max_size=80),
    st.integers(0, 2**32),
)
def test_role_balance_keeps_changes_apart_and_both_roles_alive(
    num_prefill, num_decode, samples, ready
):
    """Also where workers come and go: those of the set bits are not ready."""
    limits = Hysteresis(dwell_s=3.0, cooldown_s=10.0)
    roles, workers, now = RoleBalance(limits), pools(num_prefill, num_decode), 0.0
    changes: list[float] = []
    for prefill, decode, pause in samples:
        now += pause
        shown = [replace(w, is_ready=not ready >> i & 1) for i, w in enumerate(workers)]
        flip = seen(roles, shown, prefill, decode, now)[0].flip
        if flip is not None:
            changes.append(now)
            workers = flipped(workers, flip)
            left = {w.role for w in shown if w.is_ready and w.worker != flip.worker}
            assert left == {"prefill", "decode"}
    assert all(late - soon >= 10.0 for soon, late in itertools.pairwise(changes))
