"""Attention by FlashInfer and FlashAttention 3: on a GPU the libraries themselves, where they are
installed; in Triton's interpreter stand-ins that check how they are called."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.library_attention import LibraryAttention, LibraryBatch
from baton.engine.executor.attention.library_choice import LIBRARIES
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.attention.static_batch import StaticTritonBatch
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.models.cuda_graphs import NO_GRAPHS, DecodeGraphs, Step
from baton.engine.llm import LLM
from baton_kernels.gpu import Gpu
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import random_prompt
from tests.support.kernels.attention_libraries import STAND_INS
from tests.support.kernels.engine_families import GREEDY, VOCAB_SIZE
from tests.support.kernels.interpreter import ON_CPU

SLOW = pytest.mark.slow
NAMES = [*LIBRARIES]
# Rounding to float16 moves logits by about a thousandth.
MARGIN = 0.02
LENGTHS = (1, 15, 17, 37)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, device: str) -> Any:
    """Makes a library available, on a CPU its stand-in for these dtypes; skips if it is not."""

    def of(name: str, dtype: torch.dtype) -> None:
        found = LIBRARIES[name]
        if ON_CPU:
            monkeypatch.setitem(sys.modules, found.module, STAND_INS[name]([dtype]))
            monkeypatch.setitem(LIBRARIES, name, replace(found, dtypes=(dtype,)))
            return
        pytest.importorskip(found.module)
        capability = Gpu.of(torch.device(device)).capability
        if not found.runs_on(capability):
            pytest.skip(f"{name} has no kernels for compute capability {capability}")

    return of


@pytest.fixture
def load_on(load: Any, library: Any) -> Any:
    """Loads an engine on a library, in the interpreter in float32."""

    def of(path: str, name: str, **changes: Any) -> LLM:
        dtype = torch.float32 if ON_CPU else torch.float16
        library(name, dtype)
        named = {"dtype": str(dtype).removeprefix("torch."), "attention_backend": name}
        engine: LLM = load(path, **named, **changes)
        assert isinstance(engine.core.runner.attention, LibraryAttention)
        return engine

    return of


def expected(oracle: Oracle, path: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """A prompt of each length with what follows it, in which no choice is close."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for length in LENGTHS:
        for seed in range(20):
            prompt = random_prompt(length, seed, VOCAB_SIZE)
            out = oracle.generate(path, prompt, GREEDY.max_tokens, None, output_logits=True)
            best = torch.cat(out.logits).topk(2).values
            if float((best[:, 0] - best[:, 1]).min()) > MARGIN:
                found[prompt] = tuple(out.sequences[0, length:].tolist())
                break
    assert len(found) == len(LENGTHS), "of some length no prompt is decided"
    return found


def generated(engine: LLM, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate([*prompts], GREEDY)]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("flashinfer", "llama"),
        ("flash-attn", "llama"),
        pytest.param("flashinfer", "mistral", marks=SLOW),
        pytest.param("flash-attn", "mistral", marks=SLOW),
        pytest.param("flashinfer", "gemma2", marks=SLOW),
        pytest.param("flash-attn", "gemma2", marks=SLOW),
        pytest.param("flash-attn", "qwen3", marks=SLOW),
    ],
)
def test_library_engine_gives_the_tokens_of_transformers(
    folder: Any, load_on: Any, oracle: Oracle, name: str, family: str
) -> None:
    path = folder(family)
    engine = load_on(path, name, max_num_batched_tokens=24)
    outputs = expected(oracle, path)
    assert generated(engine, [*outputs]) == [*outputs.values()]


class Rerun:
    """Records a step by noting it down; the output stays where it was at first."""

    def record(self, step: Step) -> Step:
        out = step()
        return lambda: out.copy_(step())


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_library_engine_replays_decodes_of_triton(
    folder: Any, load_on: Any, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = folder("llama")
    engine = load_on(path, name, max_num_seqs=4, cuda_graphs=not ON_CPU)
    runner = engine.core.runner
    if ON_CPU:
        batch, cpu = StaticTritonBatch(runner.attention.recorded, 4, 9), torch.device("cpu")
        runner.graphs = DecodeGraphs(runner.model.forward, batch, [1, 2, 3, 4], cpu, Rerun())
    assert runner.graphs is not NO_GRAPHS
    replay, num_replays = runner.graphs.run, 0

    def run(*args: Any) -> Any:
        nonlocal num_replays
        num_replays += 1
        return replay(*args)

    monkeypatch.setattr(runner.graphs, "run", run)
    outputs = expected(oracle, path)
    assert generated(engine, [*outputs]) == [*outputs.values()]
    assert num_replays >= GREEDY.max_tokens - 1


def attention_on(
    name: str, dtype: torch.dtype, window: int | None, device: str
) -> LibraryAttention:
    """Over a pool of several layers, full of random numbers, so that its views are strided."""
    shapes = [KvShape(2, 64, 64)] * 3
    layouts, places = plan_groups(shapes, [window] * 3, dtype, 16)
    pool = KvPool(layouts[0], 24, torch.device(device))
    for layer in pool.layers:
        layer.keys[1:].normal_()
        layer.values[1:].normal_()
    cache = KvCache([pool], [], places)
    recorded = TritonAttention(cache, [6] * 3, dtype, 128, deterministic=False)
    layers = [LayerAttention(0.3, MaskRule(window))] * 3
    kernels = LIBRARIES[name].kernels(recorded.device, dtype)
    return LibraryAttention(recorded, layers, pool.layers, kernels)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 1, 7, 20)], ids=["decodes", "mixed"])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_library_attends_strided_blocks_as_triton(
    library: Any,
    device: str,
    name: str,
    dtype: torch.dtype,
    window: int | None,
    lengths: tuple[int, ...],
) -> None:
    library(name, dtype)
    attention = attention_on(name, dtype, window, device)
    starts = np.array([0, 33, 15, 28])[: len(lengths)]
    table = np.random.default_rng(0).permutation(np.arange(1, 25, dtype=np.int32)).reshape(4, 6)
    num_decodes = len(lengths) if max(lengths) == 1 else 2
    ragged = RaggedBatch(np.arange(len(lengths)), starts, np.array(lengths), num_decodes, [table])
    query = torch.randn(sum(lengths), 6, 64, device=device).to(dtype)
    batch, recorded = attention.prepare(ragged), attention.recorded.prepare(ragged)
    assert isinstance(batch, LibraryBatch)
    layer = LayerAttention(0.3, MaskRule(window))
    for index in range(3):
        found = attention.attend(index, layer, query, batch)
        wanted = attention.attend(index, layer, query, recorded)
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_stand_in_has_the_parameters_of_flashinfer() -> None:
    """FlashInfer can be imported without a GPU."""
    real = pytest.importorskip("flashinfer")
    stand_in = STAND_INS["flashinfer"]()
    for wrapper in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        for method in ("__init__", "plan", "run"):
            ours = getattr(getattr(stand_in, wrapper), method)
            theirs = getattr(getattr(real, wrapper), method)
            accepted = parameters(theirs)
            if "kwargs" in accepted and method == "plan":
                accepted |= parameters(getattr(real, wrapper)._plan_impl)
            assert parameters(ours) <= accepted, (wrapper, method)


def test_stand_in_has_the_parameters_of_flash_attention() -> None:
    real = pytest.importorskip("flash_attn_interface")
    ours = STAND_INS["flash-attn"]().flash_attn_with_kvcache
    assert parameters(ours) <= parameters(real.flash_attn_with_kvcache)
