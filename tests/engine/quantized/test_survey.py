"""Every format of quantized weights is served as transformers does, as documented."""

import json

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.kernel_choice import why_no_products_in_c
from baton.models.quantization import METHODS
from tests.support.daily_cases import daily_cases
from tests.support.engine.quantized import fp4
from tests.support.engine.quantized.formats import ALL, Packed, by_lanes
from tests.support.engine.quantized.sizes import sizes
from tests.support.engine.quantized.survey import SURVEYED, TABLE, survey

DOCUMENTED = json.loads(TABLE.read_text(encoding="utf-8"))


def test_survey_table_has_every_format_and_method() -> None:
    assert list(DOCUMENTED) == SURVEYED
    assert {row["method"] for row in DOCUMENTED.values()} == set(METHODS)


@pytest.mark.system  # a C compiler: weights stay in codes
@pytest.mark.parametrize("name", by_lanes(SURVEYED, ["w4a16"], ["nf4", "gptq in act-order"]))
def test_format_takes_the_documented_bytes(name: str, quantized: Packed) -> None:
    folders = quantized(name, "gpt_oss" if name in fp4.MXFP4 else "llama")
    assert sizes(ALL[name], *folders) == DOCUMENTED[name]["bytes"]


def test_gpu_has_no_products_of_codes() -> None:
    """So that what its memory has is plain."""
    why = why_no_products_in_c(EngineConfig(), torch.device("cuda"), torch.bfloat16)
    assert why is not None


@pytest.mark.parametrize("name", daily_cases(SURVEYED))
def test_format_is_served_as_documented(name: str, quantized: Packed) -> None:
    assert survey(name, quantized) == DOCUMENTED[name]
