"""Cases of a long test, of which each day tries others."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

_NUM_TURNS = 6


def daily_cases(names: Sequence[str]) -> list[Any]:
    """Returns the cases: `make test-full` tries a sixth of them, another one each day, and `make
    nightly` all."""
    turn = datetime.now(UTC).toordinal() % _NUM_TURNS

    def mark(number: int) -> pytest.MarkDecorator:
        return pytest.mark.slow if number % _NUM_TURNS == turn else pytest.mark.nightly

    return [pytest.param(name, marks=mark(i)) for i, name in enumerate(names)]
