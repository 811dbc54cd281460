"""Every format of quantized weights is served as transformers does, as documented."""

import json
from datetime import UTC, datetime

import pytest

from baton.models.quantization import METHODS
from tests.support.engine.quantized.formats import Packed
from tests.support.engine.quantized.survey import SURVEYED, TABLE, survey

DOCUMENTED = json.loads(TABLE.read_text(encoding="utf-8"))

# `make test-full` tries a sixth of them, another one each day; `make nightly` tries all.
_TURN = datetime.now(UTC).toordinal() % 6
BY_TURNS = [
    pytest.param(name, marks=pytest.mark.slow if i % 6 == _TURN else pytest.mark.nightly)
    for i, name in enumerate(SURVEYED)
]


def test_survey_table_has_every_format_and_method() -> None:
    assert list(DOCUMENTED) == SURVEYED
    assert {row["method"] for row in DOCUMENTED.values()} == set(METHODS)


@pytest.mark.parametrize("name", BY_TURNS)
def test_format_is_served_as_documented(name: str, quantized: Packed) -> None:
    assert survey(name, quantized) == DOCUMENTED[name]
