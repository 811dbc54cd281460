"""Errors of an engine's process keep their types and fields on the way to its worker."""

import pytest

from baton.engine.core.process.error_codec import data_of, error_of
from tests.serving.test_errors import ROUND_TRIPS


@pytest.mark.parametrize(
    "error", [error for error, _ in ROUND_TRIPS], ids=lambda e: type(e).__name__
)
def test_error_keeps_its_type_across_engine_process(error):
    back = error_of(data_of(error))
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))
