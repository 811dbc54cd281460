"""Short soaks; `make soak` runs ten minutes."""

import pytest

from tests.support.cluster.soak import run

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]


@pytest.mark.parametrize(("seconds", "seed"), [(15.0, 1), (120.0, 2)])
def test_random_faults_lose_no_request_and_leak_nothing(seconds, seed):
    report = run(seconds, seed)
    assert report.lost == [], report
    assert report.wrong == [], report
    assert report.held == {}, report
    assert report.faults.total() > 5, report
    assert report.num_migrations > 0, report
