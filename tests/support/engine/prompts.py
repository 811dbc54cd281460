"""Prompts that tests share, so that the oracle is asked once for each."""

import random

from tests.support.engine.checkpoints import BLOCK_SIZE, MAX_LEN, VOCAB_SIZE

NUM_TOKENS = 12
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 75, MAX_LEN - NUM_TOKENS)


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(5, vocab_size) for _ in range(length))


def awkward_prompts(vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[tuple[int, ...]]:
    """One of each awkward length: around a block's, several chunks, up to the model's limit."""
    return [random_prompt(length, seed, vocab_size) for length in LENGTHS]


def sharing_prompts() -> list[tuple[int, ...]]:
    """Prompts with common beginnings that part inside a block, at its end and right after it."""
    trunk = random_prompt(4 * BLOCK_SIZE, seed=9)
    ends = (3, BLOCK_SIZE, 2 * BLOCK_SIZE - 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE)
    return [trunk[:end] + random_prompt(5, seed=end) for end in ends] + [trunk, trunk[:-1]]
