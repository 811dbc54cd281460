"""Every model family of transformers is served as transformers does, or refused, as documented."""

import json
import random
from pathlib import Path

import pytest

from tests.support.daily_cases import daily_cases
from tests.support.engine.small_configs import MODEL_TYPES
from tests.support.engine.survey import TABLE, survey

DOCUMENTED = json.loads(TABLE.read_text(encoding="utf-8"))


def test_survey_table_has_every_family_of_transformers() -> None:
    assert list(DOCUMENTED) == MODEL_TYPES


@pytest.mark.filterwarnings("ignore")  # of families that transformers itself warns about
@pytest.mark.parametrize("model_type", daily_cases(MODEL_TYPES))
def test_family_is_served_or_refused_as_documented(
    model_type: str, tmp_path: Path, rng: random.Random
) -> None:
    assert survey(model_type, tmp_path, rng) == DOCUMENTED[model_type]
