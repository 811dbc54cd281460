"""Random model of the benchmark of a GPU, on a CPU."""

import torch

from bench.gpu.engine import random_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def test_random_model_computes_finite_logits_where_it_was_made() -> None:
    model = random_model("sdpa", SHAPE, device="cpu")
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
