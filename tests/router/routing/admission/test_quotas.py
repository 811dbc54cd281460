"""Quotas of tenants, and the file that sets them."""

from pathlib import Path

import pytest

from baton.errors import FailedPreconditionError
from baton_router.routing.admission.quotas import Quota, Quotas


def read(tmp_path: Path, text: str, clock=None) -> Quotas:
    path = tmp_path / "quotas"
    path.write_text(text)
    return Quotas.read(path)


def test_quota_file_has_lines_for_tenants_and_default(tmp_path):
    quotas = read(tmp_path, "# ours\ngold weight=4 # the best\n\n* max_concurrent=1\n")
    assert quotas.weight_of("gold") == 4.0
    assert quotas.weight_of("other") == 1.0
    for tenant in ("gold", "other"):
        quotas.enter(tenant, 10)
    assert quotas.is_admissible("gold")
    assert not quotas.is_admissible("other")
    quotas.leave("other", 10)
    assert quotas.is_admissible("other")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a wieght=2", r"quotas:1: 'wieght=2' is none of weight="),
        ("a\nb weight=x", r"quotas:2: weight is 'x'; must be a number"),
        ("a max_concurrent=1.5", r"max_concurrent is '1.5'; must be a number"),
        ("a max_concurrent=0", r"max_concurrent is 0; must be above 0"),
        ("a weight=nan", r"weight is nan; must be above 0"),
        ("a tokens_per_second=inf", r"tokens_per_second is inf; must be above 0"),
        ("a\na weight=2", r"quotas:2: a has a line already"),
    ],
)
def test_quota_file_error_names_line(tmp_path, text, says):
    with pytest.raises(FailedPreconditionError, match=says):
        read(tmp_path, text)


def test_quota_file_error_names_missing_file(tmp_path):
    with pytest.raises(FailedPreconditionError, match="absent"):
        Quotas.read(tmp_path / "absent")


def test_quota_allows_burst_then_its_rate():
    now = 0.0
    quotas = Quotas({"a": Quota(tokens_per_second=100.0)}, clock=lambda: now)
    taken = 0
    while now < 100.0:
        if quotas.is_admissible("a"):
            quotas.enter("a", 50)
            quotas.leave("a", 150)
            taken += 200
        now += 0.1
    assert taken == pytest.approx(100 * 110, abs=200), "ten seconds at once, and a hundred"


def test_quota_of_idle_tenant_saves_no_more_than_burst():
    now = 0.0
    quotas = Quotas({"a": Quota(tokens_per_second=100.0)}, clock=lambda: now)
    assert quotas.is_admissible("a")
    now = 1e6
    quotas.enter("a", 3000)
    quotas.leave("a", 0)
    assert quotas.seconds_until_available("a") == pytest.approx(20.0)


def test_quotas_keep_nothing_of_tenants_that_only_asked():
    quotas = Quotas(default=Quota(max_concurrent=1, tokens_per_second=1.0))
    for number in range(100):
        assert quotas.is_admissible(f"tenant {number}")
        assert quotas.seconds_until_available(f"tenant {number}") == 0.0
    assert not quotas.num_kept


def test_quotas_forget_tenants_whose_rate_is_whole_again():
    now = 0.0
    quotas = Quotas(default=Quota(tokens_per_second=100.0), clock=lambda: now)
    for number in range(10_000):
        quotas.enter(str(number), 50)
        quotas.leave(str(number), 50)
        now += 1.0
    assert quotas.num_kept < 2100
    quotas.enter("in flight", 0)
    for number in range(3000):
        quotas.enter("in debt", 10)
        quotas.leave("in debt", 10**6)
        quotas.enter(str(number), 50)
        quotas.leave(str(number), 50)
        now += 1.0
    assert quotas._usages["in flight"].num_in_flight == 1
    assert not quotas.is_admissible("in debt")
