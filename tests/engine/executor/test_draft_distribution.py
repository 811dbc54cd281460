"""Drafts change neither tokens nor their distribution, and a wrong way to accept them would show.

A first-order Markov chain stands for the model, so that the exact distribution of each token is
known; scheduler and sampler are the real ones.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.request import EngineRequest
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton.sampling import SamplingParams

VOCAB_SIZE = 5
# Most of the requests run at once; these are enough to find a wrong rule out.
NUM_REQUESTS = 150
NUM_TOKENS = 160
MAX_DRAFTS = 4
MIN_P_VALUE = 1e-4

Chosen = dict[str, list[int]]
Accept = Callable[[int, int, torch.Tensor], int]


class Chain:
    """Logits of the next token, by the last one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.probabilities = self.logits.double().softmax(-1).numpy()

    def drafts(self, last: int) -> list[int]:
        """Guesses that are right often, but not always the likeliest."""
        return [(last + i + 1) % VOCAB_SIZE for i in range(MAX_DRAFTS)]


def honest(token: int, _draft: int, _logits: torch.Tensor) -> int:
    return token


def gladly(token: int, draft: int, logits: torch.Tensor) -> int:
    """A wrong rule: it takes any draft that is not unlikely."""
    return draft if logits.softmax(-1)[draft] > 0.1 else token


def never(_token: int, draft: int, _logits: torch.Tensor) -> int:
    return (draft + 1) % VOCAB_SIZE


def generate(chain: Chain, *, with_drafts: bool, accept: Accept = honest) -> tuple[Chosen, int]:
    """The tokens of all requests, and how many drafts were right.

    Args:
        accept: what is taken for a row, given the chosen token, the draft there and the logits.
    """
    config = SchedulerConfig(
        max_num_batched_tokens=4096,
        max_num_seqs=128,
        block_size=16,
        max_model_len=NUM_TOKENS + 1,
        vocab_size=VOCAB_SIZE,
        prefix_caching=False,
        max_drafts=MAX_DRAFTS,
    )
    scheduler = Scheduler(config, [CacheGroup(BlockPool(128 * (NUM_TOKENS // 16 + 2)))])
    sampler = Sampler(config.max_num_seqs, VOCAB_SIZE, torch.device("cpu"), frozenset())
    for i in range(NUM_REQUESTS):
        scheduler.add(
            Request(
                spec=EngineRequest(
                    str(i),
                    (i % VOCAB_SIZE,),
                    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=i),
                    1,
                ),
                root=bytes(16),
                speculates=with_drafts,
            )
        )
    chosen: Chosen = {str(i): [i % VOCAB_SIZE] for i in range(NUM_REQUESTS)}
    while scheduler.has_work:
        for sequence in scheduler.speculating:
            scheduler.set_drafts(sequence, chain.drafts(int(sequence.token_ids[-1])))
        plan = scheduler.schedule()
        for sequence in plan.new_slots:
            sampler.assign(sequence.batch_slot, sequence.request.spec.params, 1)
        tokens = choose(chain, scheduler, sampler, plan, accept)
        progress = scheduler.apply(plan, StepResult(tokens))
        decoded = progress.decoded
        for sequence, token in zip(decoded.sequences, decoded.token_ids.tolist(), strict=True):
            chosen[sequence.request.request_id].append(token)
        for item in progress.others:
            chosen[item.request.request_id] += item.token_ids
    return chosen, scheduler.stats().num_accepted_tokens


def choose(
    chain: Chain, scheduler: Scheduler, sampler: Sampler, plan: StepPlan, accept: Accept
) -> npt.NDArray[np.int64]:
    columns, batch_slots, lengths = (
        scheduler.batch_slots.token_ids,
        plan.sample_slots,
        plan.sample_lengths,
    )
    logits = chain.logits[torch.from_numpy(columns[batch_slots, lengths - 1]).long()]
    tokens = (
        sampler.choose(logits, batch_slots, plan.sample_indices, lengths, columns).fetch().token_ids
    )
    for chunk in plan.chunks:
        for row in range(chunk.first_row, chunk.first_row + chunk.num_drafts):
            draft = int(columns[batch_slots[row], lengths[row]])
            tokens[row] = accept(int(tokens[row]), draft, logits[row])
    return tokens


def p_value(chain: Chain, chosen: Chosen) -> float:
    """Returns the p-value of the chi-square test that each token follows the one before it as the
    chain says."""
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for tokens in chosen.values():
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    assert counts.sum() == NUM_REQUESTS * NUM_TOKENS
    expected = counts.sum(1, keepdims=True) * chain.probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor(VOCAB_SIZE * (VOCAB_SIZE - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2)))


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


def test_drafts_keep_sampled_tokens_and_their_distribution(chain):
    alone, _ = generate(chain, with_drafts=False)
    guessed, num_accepted = generate(chain, with_drafts=True)
    assert guessed == alone
    assert num_accepted > 2_000
    assert p_value(chain, guessed) > MIN_P_VALUE


@pytest.mark.slow
def test_chi_square_test_detects_a_lenient_acceptance_rule(chain):
    guessed, _ = generate(chain, with_drafts=True, accept=gladly)
    assert p_value(chain, guessed) < MIN_P_VALUE


@pytest.mark.slow
def test_accepted_drafts_are_zero_when_none_are_right(chain):
    _, num_accepted = generate(chain, with_drafts=True, accept=never)
    assert num_accepted == 0
