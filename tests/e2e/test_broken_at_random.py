"""A minute of the soak; `make soak` runs ten."""

import pytest

from tests.support.cluster.soak import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_minute_of_random_faults_loses_nothing_and_holds_nothing():
    report = run(60.0, seed=1)
    assert report.lost == [], report
    assert report.wrong == [], report
    assert report.held == {}, report
    assert report.faults.total() > 5, report
    assert report.num_migrations > 0, report
