"""The model and the prompts that the engine's and the server's benchmarks share."""

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.models import locate

NUM_PROMPTS = 16
MAX_TOKENS = 32
VOCAB_SIZE = 3072


def save_model(folder: Path, **sizes: int) -> None:
    """A random Llama in float32, with the shipped tokenizer beside it. Of about 7 M parameters;
    `sizes` are other values of its configuration.

    Weights are scaled up so that the most likely token leads clearly: equal outputs then mean equal
    computation, and not luck with rounding.
    """
    torch.manual_seed(0)
    small = {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(
        **{**small, **sizes},
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(folder)
    for file in Path(locate("tiny")).glob("tokenizer*.json"):
        (folder / file.name).write_bytes(file.read_bytes())


def prompts(shortest: int = 32, longest: int = 128) -> list[list[int]]:
    """16 prompts of `shortest` to `longest` random tokens."""
    source = random.Random(1)
    lengths = [source.randint(shortest, longest) for _ in range(NUM_PROMPTS)]
    return [[source.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
