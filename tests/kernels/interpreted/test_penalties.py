"""Penalties against the sampler of the CPU, bit by bit."""

import numpy as np
import pytest
import torch

from baton.engine.executor.sampling.batch_state import SamplingColumns
from baton.engine.executor.sampling.logits_processors import process
from baton.sampling import SamplingParams
from baton_kernels.sampling.penalties import History, Penalties, penalise, reference_penalise


def params_of(row: int) -> SamplingParams:
    """Every combination of penalties in turn."""
    return SamplingParams(
        repetition_penalty=(1.0, 1.3, 0.7)[row % 3],
        presence_penalty=(0.0, 0.6)[row % 2],
        frequency_penalty=(0.0, -0.3, 0.0, 1.1)[row % 4],
    )


@pytest.mark.parametrize(("num_rows", "vocab_size", "capacity"), [(1, 8, 5), (12, 50, 2100)])
def test_penalties_are_bitwise_those_of_cpu_sampler(
    num_rows: int, vocab_size: int, capacity: int
) -> None:
    # Some tokens have no score, as those of an image; some rows have no output yet, or no history.
    tokens = torch.randint(-2, vocab_size + 3, (num_rows + 2, capacity), dtype=torch.int32)
    batch_slots = torch.randperm(num_rows + 2)[:num_rows]
    lengths = torch.randint(capacity + 1, (num_rows,))
    num_prompt_tokens = torch.minimum(torch.randint(1, capacity, (num_rows,)), lengths)
    columns = SamplingColumns(num_rows + 2, vocab_size, frozenset())
    for row, batch_slot in enumerate(batch_slots.tolist()):
        columns.assign(batch_slot, params_of(row), int(num_prompt_tokens[row]))
    scores = 5 * torch.randn(num_rows, vocab_size)
    expected, by_reference = scores.clone(), scores.clone()
    uses = columns.uses.take(batch_slots.numpy())
    process(
        expected, columns.rows(batch_slots.numpy(), lengths.numpy(), uses), columns, tokens.numpy()
    )

    every = [params_of(row) for row in range(num_rows)]
    penalties = Penalties(
        torch.tensor([p.repetition_penalty or 1.0 for p in every]),
        torch.tensor([p.presence_penalty for p in every]),
        torch.tensor([p.frequency_penalty for p in every]),
    )
    history = History(tokens, batch_slots, lengths, num_prompt_tokens, int(lengths.max()))
    counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32)
    penalise(scores, history, penalties, counts)
    assert np.array_equal(scores.numpy(), expected.numpy())
    assert not counts.any()
    reference_penalise(by_reference, history, penalties)
    assert torch.equal(by_reference, expected)


def test_penalties_refuse_wrong_dtype() -> None:
    history = History(torch.zeros(1, 4, dtype=torch.int32), *torch.zeros(3, 1).long(), longest=4)
    penalties = Penalties(torch.ones(1), torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="scores is float16; must be float32"):
        penalise(torch.zeros(1, 9).half(), history, penalties, torch.zeros(1, 9))
    with pytest.raises(ValueError, match="counts is float32; must be int32"):
        penalise(torch.zeros(1, 9), history, penalties, torch.zeros(1, 9))
