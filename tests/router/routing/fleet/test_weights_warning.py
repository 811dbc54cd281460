"""Warning of workers with different weights under one name."""

import logging

import pytest

from baton.cluster.throttled_log import ThrottledLog
from baton_router.routing.fleet.weights_warning import WeightsWarning

OLD, NEW, NEWER = (bytes([number]) * 16 for number in range(3))
ONE_DTYPE = {"float32": ["d0", "d1"]}


@pytest.fixture
def warning() -> WeightsWarning:
    """One whose log withholds nothing."""
    return WeightsWarning(ThrottledLog(logging.getLogger("weights"), seconds=0.0))


def test_warning_comes_once_for_a_rollout(warning, caplog):
    rollout = [{OLD: ["d0", "d1"]}, {OLD: ["d0"], NEW: ["d2"]}, {OLD: ["d0"], NEW: ["d2", "d3"]}]
    for contents in rollout:
        warning.update("tiny", contents, ONE_DTYPE)
        warning.update("tiny", contents, ONE_DTYPE)
    (message,) = caplog.messages
    assert f"({OLD.hex()[:12]}: d0; {NEW.hex()[:12]}: d2)" in message
    assert message.endswith("Finish the rollout, or give the workers one model")


def test_warning_comes_again_for_further_weights(warning, caplog):
    for contents in ({OLD: ["d0"], NEW: ["d1"]}, {OLD: ["d0"], NEW: ["d1"], NEWER: ["d2"]}):
        warning.update("tiny", contents, ONE_DTYPE)
    assert len(caplog.messages) == 2


def test_warning_comes_again_for_the_next_rollout(warning, caplog):
    for contents in ({OLD: ["d0"], NEW: ["d1"]}, {NEW: ["d1"]}, {NEW: ["d1"], OLD: ["d2"]}):
        warning.update("tiny", contents, ONE_DTYPE)
    assert len(caplog.messages) == 2


def test_warning_names_dtypes_that_differ(warning, caplog):
    dtypes = {"float32": ["d0"], "bfloat16": ["d1"]}
    warning.update("tiny", {OLD: ["d0"], NEW: ["d1"]}, dtypes)
    assert "Their KV dtypes differ (float32: d0; bfloat16: d1)" in caplog.text
