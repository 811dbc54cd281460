"""Attention as the benchmark of a GPU runs it, over the layers of one pool, on a CPU."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend

from baton.engine.attention.library_choice import LIBRARIES
from bench.gpu_attention import (
    AttentionShape,
    LayeredAttention,
    Step,
    decodes,
    gathered_prompt,
    libraries,
    library_prompt,
    prompt,
)
from tests.support.kernels.attention_libraries import STAND_INS

SHAPE = AttentionShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)


class Attended:
    """Notes which layers of which pool are attended, and the outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[LayeredAttention] = []
        self.queries: list[torch.Tensor] = []
        self.outputs: dict[int, torch.Tensor] = {}
        made = LayeredAttention.step

        def step(layers: LayeredAttention, ragged) -> Step:
            attend = layers.attention.attend

            def noted(index, rule, query, batch):
                self.queries.append(query)
                self.outputs[index] = attend(index, rule, query, batch)
                return self.outputs[index]

            layers.attention.attend = noted  # type: ignore[method-assign]
            self.layers.append(layers)
            return made(layers, ragged)

        monkeypatch.setattr(LayeredAttention, "step", step)


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of the last tokens of a sequence; K and V are `[num_kv_heads, length, head_dim]`."""
    num_queries, length = len(query), keys.shape[1]
    mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def test_benchmark_prompt_attends_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    last = prompt(SHAPE, 40, "cpu")()
    (layers,), query = attended.layers, attended.queries[0]
    assert [*attended.outputs] == [0, 1, 2]
    assert last is attended.outputs[2]
    for index, layer in enumerate(layers.cache.pools[0].layers):
        keys, values = (
            x[1:].transpose(0, 1).flatten(1, 2)[:, :40] for x in (layer.keys, layer.values)
        )
        expected = reference(query, keys, values)
        torch.testing.assert_close(attended.outputs[index], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(attended.outputs[0], attended.outputs[1])


def test_benchmark_compares_descriptors_with_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    shape = replace(SHAPE, dtype=torch.bfloat16, block_size=128)
    outputs = []
    for make in (prompt, gathered_prompt):
        torch.manual_seed(0)
        outputs.append(make(shape, 200, "cpu")())
    assert torch.equal(*outputs)
    described = [[kv.descriptors is not None for kv in x.attention.paged] for x in attended.layers]
    assert described == [[True] * 3, [False] * 3]


def test_benchmark_decodes_read_all_blocks_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    contexts = [5, 33, 16]
    out = decodes(SHAPE, contexts, "cpu")()
    (layers,) = attended.layers
    assert out.shape == (3, SHAPE.num_heads, SHAPE.head_dim)
    assert [*attended.outputs] == [0, 1, 2]
    assert layers.num_blocks == 1 + 3 + 1
    assert layers.cache.layouts[0].block_bytes == SHAPE.token_bytes * SHAPE.block_size


@pytest.mark.parametrize("name", LIBRARIES)
def test_benchmark_measures_libraries_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shape = replace(SHAPE, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, LIBRARIES[name].module, STAND_INS[name]())
    assert name in libraries(shape, "cpu")
    assert name not in libraries(SHAPE, "cpu")
    for make in (partial(prompt, shape, 20), partial(decodes, shape, [5, 33])):
        torch.manual_seed(0)
        ours = make("cpu")()
        torch.manual_seed(0)
        torch.testing.assert_close(make("cpu", name)(), ours, atol=2e-2, rtol=2e-2)


def test_benchmark_of_library_computes_as_many_layers() -> None:
    out = library_prompt(SHAPE, 8, SDPBackend.MATH, "cpu")()
    assert out.shape == (1, SHAPE.num_heads, 8, SHAPE.head_dim)


def test_benchmark_of_8b_has_its_operations_and_bytes() -> None:
    shape = AttentionShape()
    assert shape.token_bytes == 2**17
    assert shape.operations(1) == 32 * 4 * 4096
