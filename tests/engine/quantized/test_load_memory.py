"""Memory that the load of quantized models takes: the result and one layer."""

from pathlib import Path

import pytest

from tests.support.engine.checkpoints import save_random, small_config
from tests.support.engine.load_memory import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LARGEST_BYTES,
    NUM_LAYERS,
    SLACK,
    load_memory,
)
from tests.support.engine.quantized.formats import FORMATS
from tests.support.engine.quantized.written import save_quantized

LAYER_BYTES = 4 * LARGEST_BYTES  # attention takes less than one of the three matrices beside it


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_load_of_plain_weights_holds_result_and_one_layer(name: str, tmp_path: Path) -> None:
    config = small_config(
        "LlamaConfig",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
    )
    save_random(config, tmp_path / "plain")
    save_quantized(FORMATS[name], tmp_path / "plain", tmp_path / "packed")
    peak, result = load_memory(tmp_path / "packed", "torch")
    mapped = (tmp_path / "packed" / "model.safetensors").stat().st_size  # pages of the cache
    assert peak < result + LAYER_BYTES + mapped + SLACK
