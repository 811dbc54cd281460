"""Steps of few tokens on a CPU, whose calls of C are recorded."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.engine.executor.attention.in_place_attention import InPlaceBatch
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.models.recorded_layers import MAX_TOKENS, RecordedLayers
from baton.sampling import SamplingParams
from baton_kernels.cpu.recording import Recording
from baton_kernels.cpu.rowwise import RowwiseKernels
from tests.engine.conftest import Checkpoints
from tests.support.engine.engines import load, tokens
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import random_prompt

pytestmark = pytest.mark.system  # a C compiler


def batch_of(count: int) -> InPlaceBatch:
    """One token of each of `count` sequences."""
    slots = np.arange(count)
    tables = [np.arange(count * 2, dtype=np.int32).reshape(count, 2)]
    return InPlaceBatch(RaggedBatch(slots, slots + 3, np.ones_like(slots), count, tables), 16)


class Counted:
    """Layers that count how often Python calls them."""

    def __init__(self, *, in_torch: bool) -> None:
        self.num_calls = 0
        self._in_torch = in_torch
        self._rowwise, self._weight = RowwiseKernels(torch.float32), torch.ones(8)

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: InPlaceBatch
    ) -> torch.Tensor:
        self.num_calls += 1
        normed = self._rowwise.rms_norm(hidden, self._weight, 1e-6)
        return normed * 2 if self._in_torch else normed


def run(layers: RecordedLayers, counts: Sequence[int]) -> None:
    for count in counts:
        hidden = torch.randn(count, 8)
        out = layers(hidden, torch.arange(count), batch_of(count))
        expected = torch.nn.functional.rms_norm(hidden, (8,), torch.ones(8), 1e-6)
        torch.testing.assert_close(out, expected)


def test_layers_are_recorded_the_second_time() -> None:
    computed = Counted(in_torch=False)
    run(RecordedLayers(computed), [1, 2, 1, 2, 1, 2, 1, 1])
    assert computed.num_calls == 4


def test_layers_that_torch_computes_are_called_each_time() -> None:
    computed = Counted(in_torch=True)
    layers = RecordedLayers(computed)
    for _ in range(5):
        hidden = torch.randn(2, 8)
        out = layers(hidden, torch.arange(2), batch_of(2))
        expected = 2 * torch.nn.functional.rms_norm(hidden, (8,), torch.ones(8), 1e-6)
        torch.testing.assert_close(out, expected)
    assert computed.num_calls == 5


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_hybrid", "llama_biased"])
def test_recorded_steps_have_the_tokens_of_transformers(
    checkpoints: Checkpoints, oracle: Oracle, family: str
) -> None:
    """Sequences begin and end, so that steps of each number of tokens are recorded and repeated."""
    path = checkpoints[family]
    engine = load(path, max_num_seqs=MAX_TOKENS + 1, num_threads=2)
    prompts = [random_prompt(length) for length in range(3, 3 + MAX_TOKENS + 1)]
    lengths = [6 * (i + 1) for i in range(len(prompts))]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    expected = [oracle(path, p, n) for p, n in zip(prompts, lengths, strict=True)]
    for _ in range(2):
        assert tokens(engine.generate(prompts, params)) == expected


@pytest.mark.parametrize("settings", [{}, {"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_recorded_step_equals_one_that_is_not(checkpoints: Checkpoints, settings: dict) -> None:
    """Logits, bit by bit: the first step of a number of tokens is not recorded."""
    engine = load(checkpoints["qwen3"], prefix_caching=False, **settings)
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=True, top_logprobs=5)
    first, *others = (engine.generate([random_prompt(30)], params) for _ in range(4))
    assert all(each == first for each in others)
    gc.collect()
    recorded = [each for each in gc.get_objects() if isinstance(each, Recording)]
    assert any(each.can_repeat and len(each) >= 3 * 10 for each in recorded)  # calls of a layer
