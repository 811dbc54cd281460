"""Cases of a long test, of which each day tries others."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

_NUM_TURNS = 12


def daily_mark(number: int, num_turns: int = _NUM_TURNS) -> pytest.MarkDecorator:
    """Returns the mark of a case of this number: `make test-full` tries one of `num_turns` that
    follow each other, another one each day, and `make nightly` all."""
    turn = datetime.now(UTC).toordinal() % num_turns
    return pytest.mark.slow if number % num_turns == turn else pytest.mark.nightly


def daily_cases(names: Sequence[object], num_turns: int = _NUM_TURNS) -> list[Any]:
    """Returns the cases with their marks, and those that have marks as they are."""
    return [_case(name, i, num_turns) for i, name in enumerate(names)]


def _case(value: Any, number: int, num_turns: int) -> Any:
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(value, marks=daily_mark(number, num_turns))
