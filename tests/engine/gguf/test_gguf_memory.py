"""Memory that the load of a GGUF model takes: the result and one tensor of it."""

from pathlib import Path

from tests.support.engine.checkpoints import small_config
from tests.support.engine.load_memory import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LARGEST_BYTES,
    NUM_LAYERS,
    SLACK,
    load_memory,
)
from tests.support.gguf.models import random_model
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf


def test_gguf_load_holds_result_and_one_tensor(tmp_path: Path) -> None:
    config = small_config(
        "LlamaConfig",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=398,
    )
    file = tmp_path / "model.gguf"
    write_gguf(file, random_model(config), sentence_piece(), lambda _name: "Q4_K")
    peak, result = load_memory(file, "auto")
    assert peak < result + 2 * LARGEST_BYTES + SLACK
