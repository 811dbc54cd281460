"""Recorded calls of the C library: repeated over the same memory, they compute the same."""

import threading
from collections.abc import Callable

import pytest
import torch

from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.recording import Recording
from baton_kernels.cpu.rowwise import RowwiseKernels
from tests.support.kernels.comparison import random

pytestmark = pytest.mark.system  # a C compiler

Layers = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def layers() -> Layers:
    """Calls whose results are the arguments of later ones, over views, too."""
    linear = PackedLinear(random(40, 40, dtype=torch.float32), None, torch.float32)
    rowwise, norm = RowwiseKernels(torch.float32), random(20, dtype=torch.float32)

    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            normed = rowwise.rms_norm(x.view(len(x), 2, 20), norm, 1e-6)
            x = linear.plus(normed.flatten(1), x)
        return x

    return compute


@pytest.mark.parametrize("num_rows", [1, 5, 30])
def test_repeated_calls_compute_what_is_in_their_memory(layers: Layers, num_rows: int) -> None:
    x = random(num_rows, 40, dtype=torch.float32)
    with Recording() as calls:
        out = layers(x)
    assert calls.can_repeat
    assert torch.equal(out, layers(x))
    other = random(num_rows, 40, dtype=torch.float32)
    x.copy_(other)
    calls.repeat()
    assert torch.equal(out, layers(other))


def test_memory_of_recorded_calls_is_kept(layers: Layers) -> None:
    """Memory that the recording alone holds: others would get it."""
    x = random(4, 40, dtype=torch.float32)
    with Recording() as calls:
        out = layers(x)
    expected = out.clone()
    poison = [torch.full((4, 40), torch.nan) for _ in range(100)]
    calls.repeat()
    assert torch.equal(out, expected)
    assert all(each.isnan().all() for each in poison)


@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.clone(), lambda x: x[[0, 0]]],
    ids=["add", "copy", "rows"],
)
def test_recording_cannot_repeat_what_torch_computes(layers: Layers, compute: Layers) -> None:
    x = random(4, 40, dtype=torch.float32)
    with Recording() as calls:
        layers(compute(x))
    assert not calls.can_repeat


def test_calls_of_other_threads_are_not_recorded(layers: Layers) -> None:
    x = random(2, 40, dtype=torch.float32)
    with Recording() as calls:
        out = layers(x)
        beside = threading.Thread(target=layers, args=(random(3, 40, dtype=torch.float32),))
        beside.start()
        beside.join()
    first = out.clone()
    calls.repeat()
    assert torch.equal(out, first)
    assert len(calls) == 6


def test_calls_after_a_recording_are_not_recorded(layers: Layers) -> None:
    x = random(2, 40, dtype=torch.float32)
    with Recording() as calls:
        layers(x)
    layers(x)
    assert len(calls) == 6
