"""Tokens chosen by kernels are those of the sampler of the CPU, whatever is asked for, and also
where the host has not seen the tokens before them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.executor.sampling.triton_choice import TritonChooser
from baton.sampling import SamplingParams
from tests.support.kernels.comparison import pairwise

VOCAB_SIZE, CAPACITY = 170, 64
EOS = frozenset({3})
BAD = ((), ((5,),), ((2, 7), (1,), (4, 2, 6)))
# Any two of them meet on a slot. Few tokens are likely, so that histories repeat themselves.
CASES = pairwise(
    temperature=(0.0, 0.7, 1.5),
    truncation=((), (("top_k", 9),), (("top_p", 0.8123),), (("min_p", 0.05),)),
    repetition_penalty=(1.0, 1.4),
    presence_penalty=(0.0, 0.7),
    frequency_penalty=(0.0, -0.4),
    logit_bias=((), ((2, 3.5), (8, -50.0), (VOCAB_SIZE - 1, 2.0))),
    bad_token_ids=BAD,
    min_tokens=(0, 3),
    logprobs=(False, True),
    has_grammar=(False, True),
)
NUM_SLOTS = len(CASES) + 2


def params_of(case: dict[str, Any], seed: int) -> SamplingParams:
    names = set(case) - {"truncation", "has_grammar"}
    return SamplingParams(**{n: case[n] for n in names}, **dict(case["truncation"]), seed=seed)


class Pair:
    """The two samplers, and the tokens of all slots as the host comes to know them."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = torch.device(device)
        self.dice = np.random.default_rng(seed)
        sizes = (NUM_SLOTS, VOCAB_SIZE)
        self.on_cpu = Sampler(*sizes, torch.device("cpu"), EOS)
        self.chooser = TritonChooser(*sizes, self.device)
        self.on_kernels = Sampler(*sizes, self.device, EOS, self.chooser)
        self.tokens = np.zeros((NUM_SLOTS, CAPACITY), np.int32)
        self.lengths = np.zeros(NUM_SLOTS, np.int64)
        self.has_grammar = np.zeros(NUM_SLOTS, np.bool_)
        for i, case in enumerate(CASES):
            self.batch_slot(i, case)

    def batch_slot(self, batch_slot: int, case: dict[str, Any]) -> None:
        """A sequence takes the slot; that it has some output already is as after a preemption."""
        num_prompt_tokens, num_output_tokens = self.dice.integers(1, 9), self.dice.integers(0, 4)
        self.lengths[batch_slot] = num_prompt_tokens + num_output_tokens
        self.tokens[batch_slot] = self.dice.integers(0, 12, CAPACITY)
        self.has_grammar[batch_slot] = case["has_grammar"]
        params = params_of(case, int(self.dice.integers(0, 2**63)))
        for sampler in (self.on_cpu, self.on_kernels):
            sampler.assign(batch_slot, params, int(num_prompt_tokens))

    def logits(self, num_rows: int) -> torch.Tensor:
        logits = torch.from_numpy(self.dice.normal(0, 1, (num_rows, VOCAB_SIZE)).astype(np.float32))
        logits[:, :9] += 4.0
        return logits

    def allowed(self, batch_slots: np.ndarray) -> Any:
        under = np.flatnonzero(self.has_grammar[batch_slots])
        shape = (len(under), -(-VOCAB_SIZE // 32))
        words = self.dice.integers(-(2**31), 2**31, shape, np.int32)
        words[::3, 1:] = 0  # so few that rules may ban them all
        words[::3, 0] = 1 << 5
        return (under, words) if len(under) else None

    def choose(
        self, batch_slots: Sequence[int], lengths: np.ndarray, known: np.ndarray
    ) -> np.ndarray:
        """Asserts that both choose the same. `known`: the columns as the host has them."""
        at, logits = np.array(batch_slots), self.logits(len(batch_slots))
        indices = self.dice.integers(0, 3, len(at))
        allowed = self.allowed(at)
        expected = self.on_cpu.choose(logits, at, indices, lengths, self.tokens, allowed).fetch()
        given = logits.to(self.device)
        found = self.on_kernels.choose(given, at, indices, lengths, known, allowed).fetch()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        if expected.logprobs is not None:
            np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        assert torch.equal(given.cpu(), logits)
        return expected.token_ids

    def decode(self, *, ahead: bool) -> None:
        """One more token for each slot. Ahead: the host lacks the tokens drawn last."""
        batch_slots = self.dice.permutation(len(CASES))
        known = self.tokens.copy()
        if ahead:
            known[batch_slots, self.lengths[batch_slots] - 1] = VOCAB_SIZE - 2
        chosen = self.choose(batch_slots, self.lengths[batch_slots], known)
        self.tokens[batch_slots, self.lengths[batch_slots]] = chosen
        self.lengths[batch_slots] += 1

    def verify_drafts(self) -> None:
        """Slots with guesses behind them have a row for each, and keep as many as were right."""
        batch_slots, lengths = [], []
        for batch_slot in range(len(CASES)):
            num_drafts = int(self.dice.integers(0, 4))
            batch_slots += [batch_slot] * (num_drafts + 1)
            lengths += range(self.lengths[batch_slot], self.lengths[batch_slot] + num_drafts + 1)
        chosen = self.choose(batch_slots, np.array(lengths), self.tokens)
        is_right = dict.fromkeys(batch_slots, True)
        for batch_slot, length, token_id in zip(batch_slots, lengths, chosen.tolist(), strict=True):
            if is_right[batch_slot]:
                is_right[batch_slot] = token_id == self.tokens[batch_slot, length]
                self.tokens[batch_slot, length] = token_id
                self.lengths[batch_slot] = length + 1

    def fork(self) -> None:
        """A slot with two rows at one place, the second of which goes on elsewhere."""
        batch_slot = int(self.dice.integers(len(CASES)))
        chosen = self.choose(
            [batch_slot, batch_slot], np.repeat(self.lengths[batch_slot], 2), self.tokens
        )
        self.tokens[batch_slot, self.lengths[batch_slot]] = chosen[0]
        self.lengths[batch_slot] += 1


@pytest.mark.parametrize("num_steps", [5, pytest.param(14, marks=pytest.mark.slow)])
def test_triton_sampler_equals_cpu_sampler_in_random_schedules(
    device: str, seed: int, num_steps: int
) -> None:
    pair = Pair(device, seed)
    pair.decode(ahead=False)
    pair.decode(ahead=True)
    for _ in range(num_steps):
        match pair.dice.integers(6):
            case 0:
                pair.verify_drafts()
                pair.decode(ahead=False)
            case 1:
                pair.fork()
                pair.decode(ahead=False)
            case 2:
                batch_slot = int(pair.dice.integers(len(CASES)))
                pair.batch_slot(batch_slot, CASES[int(pair.dice.integers(len(CASES)))])
                pair.decode(ahead=False)
            case _:
                pair.decode(ahead=True)
        for batch_slot in range(len(CASES)):  # none is as long as its columns
            if pair.lengths[batch_slot] > CAPACITY - 8:
                pair.batch_slot(batch_slot, CASES[batch_slot])
        num_known = pair.chooser.history._num_known
        on_device = pair.chooser.history.token_ids.cpu().numpy()
        for batch_slot in range(len(CASES)):
            known = slice(0, int(num_known[batch_slot]))
            assert np.array_equal(on_device[batch_slot, known], pair.tokens[batch_slot, known])


def test_triton_beam_candidates_equal_those_of_the_cpu(device: str, seed: int) -> None:
    pair = Pair(device, seed)
    batch_slots = np.flatnonzero([case["temperature"] == 0.0 for case in CASES])
    for _ in range(3):
        logits = pair.logits(len(batch_slots))
        ids, scores = pair.on_cpu.beam_candidates(
            logits, batch_slots, pair.lengths[batch_slots], pair.tokens, 4
        )
        found = pair.on_kernels.beam_candidates(
            logits.to(pair.device), batch_slots, pair.lengths[batch_slots], pair.tokens, 4
        )
        assert found[0].tolist() == ids.tolist()
        np.testing.assert_allclose(found[1], scores, atol=1e-4)
        pair.tokens[batch_slots] = pair.tokens[pair.dice.permutation(batch_slots)]
        pair.tokens[batch_slots, pair.lengths[batch_slots]] = ids[:, 0]
        pair.lengths[batch_slots] = pair.lengths[batch_slots].min() + 1


def test_triton_sampler_needs_no_history_from_the_host(device: str, seed: int) -> None:
    pair = Pair(device, seed)
    every = np.arange(len(CASES))
    assert pair.on_cpu.needs_history(every)
    assert not pair.on_kernels.needs_history(every)
