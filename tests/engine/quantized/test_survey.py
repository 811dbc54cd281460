"""Every format of quantized weights is served as transformers does, as documented."""

import json

import pytest

from baton.models.quantization import METHODS
from tests.support.daily_cases import daily_cases
from tests.support.engine.quantized.formats import Packed
from tests.support.engine.quantized.survey import SURVEYED, TABLE, survey

DOCUMENTED = json.loads(TABLE.read_text(encoding="utf-8"))


def test_survey_table_has_every_format_and_method() -> None:
    assert list(DOCUMENTED) == SURVEYED
    assert {row["method"] for row in DOCUMENTED.values()} == set(METHODS)


@pytest.mark.parametrize("name", daily_cases(SURVEYED))
def test_format_is_served_as_documented(name: str, quantized: Packed) -> None:
    assert survey(name, quantized) == DOCUMENTED[name]
