"""Kernels against the ceilings of the GPU they run on, and against the library's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from baton_kernels.block_copy import copy_blocks
from baton_kernels.gpu import Gpu
from baton_kernels.rows.cache_write import write_kv
from bench.gpu.attention import (
    LayeredAttention,
    Step,
    decodes,
    gathered_prompt,
    libraries,
    library_prompt,
    prompt,
    prompt_batch,
)
from bench.gpu.sizes import in_k
from bench.gpu.timing import Bench, Case, Cases
from bench.report import Row, interleaved


def cases(bench: Bench) -> Cases:
    """Yields the cases, those that matter most first."""
    sizes, name = bench.sizes.kernels, bench.device.name
    copying = bench.copy_bandwidth()

    def against_copy(case: str, aim: float, make: Callable[[], Callable[[], float]]) -> Case:
        return case, lambda: [_against_copy(case, make(), copying, bench.repeats, aim)]

    for contexts in sizes.decodes:
        yield against_copy(f"decode attention, {contexts}", 0.85, partial(_decode, bench, contexts))
    for length in sizes.prefills:
        case = f"prefill attention, {in_k(length)} tokens"
        yield case, partial(_prefill, bench, case, length)
    if Gpu.of(torch.device(name)).has_tma:
        case = f"prefill attention, {in_k(sizes.prompt_tokens)} tokens by TMA"
        yield case, partial(_by_tma, bench, case)
    for library in libraries(sizes.attention, name):
        yield f"attention of {library}", partial(_against_library, bench, library)
    case = f"cache write, {in_k(sizes.prompt_tokens)} tokens"
    yield against_copy(case, 0.9, partial(_cache_write, bench))
    for block_bytes in sizes.block_bytes:
        case = f"block copy, blocks of {block_bytes // 1024} KiB"
        yield against_copy(case, 0.9, partial(_block_copy, bench, block_bytes))
    case = f"sampling, {sizes.sampled_rows} rows of {in_k(sizes.vocab_size)}"
    yield against_copy(case, 0.5, partial(_sampling, bench))


def _against_copy(
    case: str,
    work: Callable[[], float],
    copying: Callable[[], float],
    repeats: int,
    aim: float,
) -> Row:
    rates = interleaved({"work": work, "copy": copying}, repeats)
    value, reference = rates["work"] / 1e9, rates["copy"] / 1e9
    return Row(case, value, "GB/s", "device copy", reference, value / reference, aim)


def _decode(bench: Bench, name: str) -> Callable[[], float]:
    sizes = bench.sizes.kernels
    contexts = sizes.decodes[name]
    step = decodes(sizes.attention, contexts, bench.device.name)
    return bench.rate(bench.recorded(step), sum(contexts) * sizes.attention.token_bytes)


def _rates(
    bench: Bench, steps: dict[str, Step], amount: float, num_times: int = 1
) -> dict[str, float]:
    """Returns `amount` per second of each step."""
    contenders = {
        name: bench.rate(bench.recorded(step), amount, num_times) for name, step in steps.items()
    }
    return interleaved(contenders, bench.repeats)


def _prefill(bench: Bench, case: str, length: int) -> list[Row]:
    sizes, device = bench.sizes.kernels, bench.device.name
    shape = sizes.attention
    steps = {"ours": prompt(shape, length, device)}
    for name, (backend, _) in sizes.sdpa.items():
        steps[name] = library_prompt(shape, length, backend, device)
    rates = _rates(bench, steps, shape.operations(length) / 1e12)
    ours = rates["ours"]
    return [
        Row(case, ours, "TFLOP/s", other, rates[other], ours / rates[other], aim)
        for other, (_, aim) in sizes.sdpa.items()
    ]


def _by_tma(bench: Bench, case: str) -> list[Row]:
    sizes, device = bench.sizes.kernels, bench.device.name
    length, tiled, shape = sizes.prompt_tokens, sizes.tiled, sizes.attention
    steps = {
        "descriptors": prompt(tiled, length, device),
        "pointers": gathered_prompt(tiled, length, device),
        f"blocks of {shape.block_size}": prompt(shape, length, device),
    }
    rates = _rates(bench, steps, shape.operations(length) / 1e12)
    ours = rates.pop("descriptors")
    case = f"{case}, blocks of {tiled.block_size}"
    return [
        Row(case, ours, "TFLOP/s", other, theirs, ours / theirs, None)
        for other, theirs in rates.items()
    ]


def _against_library(bench: Bench, library: str) -> list[Row]:
    sizes, device = bench.sizes.kernels, bench.device.name
    shape, contexts, length = sizes.attention, sizes.library_contexts, sizes.prompt_tokens
    makes: dict[str, Callable[..., Step]] = {
        f"decode attention, {len(contexts)} contexts of {in_k(contexts[0])}": partial(
            decodes, shape, contexts, device
        ),
        f"prefill attention, {in_k(length)} tokens": partial(prompt, shape, length, device),
    }
    rows = []
    for case, make in makes.items():
        rates = _rates(bench, {"ours": make(), library: make(library)}, 1, 3)
        ours, theirs = rates["ours"], rates[library]
        rows.append(Row(case, ours, "steps/s", library, theirs, ours / theirs, None))
    return rows


def _cache_write(bench: Bench) -> Callable[[], float]:
    num_tokens, shape = bench.sizes.kernels.prompt_tokens, bench.sizes.kernels.attention
    layers = LayeredAttention(shape, num_tokens, num_tokens, bench.device.name)
    attention = layers.attention
    batch: Any = attention.prepare(prompt_batch(num_tokens, layers.num_blocks))
    size = (num_tokens, shape.num_kv_heads, shape.head_dim)
    key, value = (torch.randn(size, dtype=shape.dtype, device=layers.device) for _ in range(2))

    def write() -> torch.Tensor:
        for index in range(shape.num_layers):
            write_kv(key, value, attention.blocks(index), attention.slots(index, batch))
        return key

    return bench.rate(bench.recorded(write), 2 * num_tokens * shape.token_bytes)


def _block_copy(bench: Bench, block_bytes: int) -> Callable[[], float]:
    num_blocks, device = bench.sizes.kernels.copied_bytes // block_bytes, bench.device.name
    pool = torch.empty(2 * num_blocks, block_bytes, dtype=torch.uint8, device=device)
    order = torch.randperm(num_blocks, device=device)
    pairs = torch.stack([order, num_blocks + order.flip(0)], dim=1)
    return bench.rate(lambda: copy_blocks(pool, pool, pairs), 2 * num_blocks * block_bytes)


def _sampling(bench: Bench) -> Callable[[], float]:
    from baton.engine.executor.sampling.sampler import Sampler
    from baton.engine.executor.sampling.triton_choice import TritonChooser
    from baton.sampling import SamplingParams

    sizes, device = bench.sizes.kernels, torch.device(bench.device.name)
    num_rows, vocab_size = sizes.sampled_rows, sizes.vocab_size
    chooser = TritonChooser(num_rows, vocab_size, device)
    sampler = Sampler(num_rows, vocab_size, device, frozenset(), chooser)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)
    for batch_slot in range(num_rows):
        sampler.assign(batch_slot, params, 1)
    logits = torch.randn(num_rows, vocab_size, dtype=torch.bfloat16, device=device)
    batch_slots = np.arange(num_rows)
    history = np.zeros((num_rows, 1), np.int32)
    ones = np.ones(num_rows, np.int64)

    def choose() -> object:
        return sampler.choose(logits, batch_slots, 0 * ones, ones, history)

    return bench.rate(choose, logits.numel() * logits.element_size())
