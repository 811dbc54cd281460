"""Proposals of role changes: slow to come, never the last of a role, and never back and forth."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.roles.role_balance import Balance, Flip, Hysteresis, RoleBalance, WorkerState

MARKS = Hysteresis(high=0.9, low=0.3, dwell_seconds=10.0, cooldown_seconds=60.0)
PRESSED, BETWEEN, IDLE = 1.5, 0.5, 0.1


def pools(num_prefill: int, num_decode: int) -> list[WorkerState]:
    return [
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
    roles: RoleBalance, workers: list[WorkerState], prefill: float, decode: float, *moments: float
) -> list[Balance]:
    return [roles.observe(workers, prefill, decode, moment) for moment in moments]


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


def test_role_balance_restarts_dwell_only_on_real_interruption():
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
        (None, "no pool is pressed while the other one is idle")
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
        pools(0, 2),
    ],
)
def test_role_balance_spares_last_or_unhelpful_worker(workers):
    balances = seen(RoleBalance(MARKS), workers, PRESSED, IDLE, *range(20))
    assert all(b.flip is None and "no decode worker can be spared" in b.reason for b in balances)


def test_role_balance_picks_least_busy_then_least_cached():
    workers = [
        *pools(1, 0),
        WorkerState("d0", "decode", 1, num_sequences=1, num_cached_blocks=0),
        WorkerState("d1", "decode", 1, num_sequences=0, num_cached_blocks=50),
        WorkerState("d2", "decode", 7, num_sequences=0, num_cached_blocks=20),
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
    workers: list[WorkerState], prefill: float, decode: float, limits: Hysteresis
) -> Iterator[Flip]:
    """What is proposed, and done, while work of this much a second arrives and is shared evenly."""
    roles = RoleBalance(limits)
    for moment in range(800):  # a change takes 46 of them at most
        shares = (prefill / num_of("prefill", workers), decode / num_of("decode", workers))
        flip = roles.observe(workers, *shares, float(moment)).flip
        if flip is not None:
            workers = flipped(workers, flip)
            assert num_of("prefill", workers) >= 1
            assert num_of("decode", workers) >= 1
            yield flip


@given(sizes, sizes, loads, loads, st.floats(0.01, 0.3), st.sampled_from([0.0, 3.0, 40.0]))
def test_role_balance_settles_under_constant_load(
    num_prefill, num_decode, prefill, decode, low, cooldown
):
    limits = Hysteresis(0.9, low, dwell_seconds=5.0, cooldown_seconds=cooldown)
    flips = list(flips_under(pools(num_prefill, num_decode), prefill, decode, limits))
    assert len({flip.role for flip in flips}) <= 1
    assert len(flips) <= num_prefill + num_decode - 2
    assert len({flip.worker for flip in flips}) == len(flips)


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
    limits = Hysteresis(dwell_seconds=3.0, cooldown_seconds=10.0)
    roles, workers, now = RoleBalance(limits), pools(num_prefill, num_decode), 0.0
    changes: list[float] = []
    for prefill, decode, pause in samples:
        now += pause
        shown = [replace(w, is_ready=not ready >> i & 1) for i, w in enumerate(workers)]
        flip = roles.observe(shown, prefill, decode, now).flip
        if flip is not None:
            changes.append(now)
            workers = flipped(workers, flip)
            left = {w.role for w in shown if w.is_ready and w.worker != flip.worker}
            assert left == {"prefill", "decode"}
    assert all(late - soon >= 10.0 for soon, late in itertools.pairwise(changes))
