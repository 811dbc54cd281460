"""Kernels against the ceilings of the GPU they run on, and against the library's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from baton_kernels.block_copy import copy_blocks
from baton_kernels.cache_write import write_kv
from baton_kernels.gpu import Gpu
from bench.gpu_attention import (
    AttentionShape,
    LayeredAttention,
    Step,
    decodes,
    gathered_prompt,
    libraries,
    library_prompt,
    prompt,
    prompt_batch,
)
from bench.gpu_timing import Case, Cases, copy_bandwidth, rate, recorded
from bench.report import Row, interleaved

_GPU = torch.device("cuda")
_SHAPE = AttentionShape()

# Contexts of the sequences of a batch: 16 GiB of KV together over all layers, so that each finds
# its 512 MiB uncached, but for the last.
DECODES: dict[str, list[int]] = {
    "decode attention, 64 contexts of 2k": [2048] * 64,
    "decode attention, 256 contexts of 512": [512] * 256,
    "decode attention, 64 ragged contexts of 128 to 4k": np.linspace(128, 4096, 64)
    .astype(int)
    .tolist(),
    "decode attention, 1 context of 128k": [2**17],
    "decode attention, 1 context of 32k": [2**15],
}
PREFILLS = (2048, 8192, 32768)
# Blocks of whole tiles, which prefill loads by descriptors.
_TMA_LENGTH, TMA_SHAPE = 8192, replace(_SHAPE, block_size=64)


def cases(repeats: int) -> Cases:
    """Yields the cases, those that matter most first."""
    copying = copy_bandwidth()

    def against_copy(case: str, aim: float, make: Callable[[], Callable[[], float]]) -> Case:
        return case, lambda: [_against_copy(case, make(), copying, repeats, aim)]

    for case, contexts in DECODES.items():
        yield against_copy(case, 0.85, partial(_decode, contexts))
    for length in PREFILLS:
        yield f"prefill attention, {length // 1024}k tokens", partial(_prefill, length, repeats)
    if Gpu.of(_GPU).has_tma:
        yield f"prefill attention, {_TMA_LENGTH // 1024}k tokens by TMA", partial(_by_tma, repeats)
    for library in libraries(_SHAPE, "cuda"):
        yield f"attention of {library}", partial(_against_library, library, repeats)
    yield against_copy("cache write, 8k tokens", 0.9, partial(_cache_write, 8192))
    for block_bytes in (2**16, 2**20):
        case = f"block copy, blocks of {block_bytes // 1024} KiB"
        yield against_copy(case, 0.9, partial(_block_copy, block_bytes))
    yield against_copy("sampling, 256 rows of 128k", 0.5, _sampling)


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


def _decode(contexts: list[int]) -> Callable[[], float]:
    step = decodes(_SHAPE, contexts, "cuda")
    return rate(recorded(step), sum(contexts) * _SHAPE.token_bytes)


def _prefill(length: int, repeats: int) -> list[Row]:
    steps = {
        "ours": prompt(_SHAPE, length, "cuda"),
        "SDPA, cuDNN": library_prompt(_SHAPE, length, SDPBackend.CUDNN_ATTENTION, "cuda"),
        "SDPA, flash": library_prompt(_SHAPE, length, SDPBackend.FLASH_ATTENTION, "cuda"),
    }
    operations = _SHAPE.operations(length)
    contenders = {name: rate(recorded(step), operations, 1) for name, step in steps.items()}
    rates = interleaved(contenders, repeats)
    ours = rates.pop("ours") / 1e12
    aims = {"SDPA, cuDNN": 0.8, "SDPA, flash": 1.0}
    return [
        Row(
            f"prefill attention, {length // 1024}k tokens",
            ours, "TFLOP/s", other, rates[other] / 1e12, ours / (rates[other] / 1e12), aims[other],
        )
        for other in aims
    ]  # fmt: skip


def _by_tma(repeats: int) -> list[Row]:
    steps = {
        "descriptors": prompt(TMA_SHAPE, _TMA_LENGTH, "cuda"),
        "pointers": gathered_prompt(TMA_SHAPE, _TMA_LENGTH, "cuda"),
        f"blocks of {_SHAPE.block_size}": prompt(_SHAPE, _TMA_LENGTH, "cuda"),
    }
    operations = _SHAPE.operations(_TMA_LENGTH)
    contenders = {name: rate(recorded(step), operations, 1) for name, step in steps.items()}
    rates = {name: each / 1e12 for name, each in interleaved(contenders, repeats).items()}
    ours = rates.pop("descriptors")
    case = (
        f"prefill attention, {_TMA_LENGTH // 1024}k tokens by TMA, blocks of {TMA_SHAPE.block_size}"
    )
    return [
        Row(case, ours, "TFLOP/s", other, theirs, ours / theirs, None)
        for other, theirs in rates.items()
    ]


def _against_library(library: str, repeats: int) -> list[Row]:
    makes: dict[str, Callable[..., Step]] = {
        "decode attention, 64 contexts of 1k": partial(decodes, _SHAPE, [1024] * 64, "cuda"),
        "prefill attention, 8k tokens": partial(prompt, _SHAPE, 8192, "cuda"),
    }
    rows = []
    for case, make in makes.items():
        steps = {"ours": make(), library: make(library)}
        contenders = {name: rate(recorded(step), 1, 3) for name, step in steps.items()}
        rates = interleaved(contenders, repeats)
        ours, theirs = rates["ours"], rates[library]
        rows.append(Row(case, ours, "steps/s", library, theirs, ours / theirs, None))
    return rows


def _cache_write(num_tokens: int) -> Callable[[], float]:
    layers = LayeredAttention(_SHAPE, num_tokens, num_tokens, "cuda")
    attention = layers.attention
    batch: Any = attention.prepare(prompt_batch(num_tokens, layers.num_blocks))
    key, value = (
        torch.randn(
            num_tokens, _SHAPE.num_kv_heads, _SHAPE.head_dim, dtype=_SHAPE.dtype, device=_GPU
        )
        for _ in range(2)
    )

    def write() -> torch.Tensor:
        for index in range(_SHAPE.num_layers):
            write_kv(key, value, attention.blocks(index), attention.slots(index, batch))
        return key

    return rate(recorded(write), 2 * num_tokens * _SHAPE.token_bytes)


def _block_copy(block_bytes: int) -> Callable[[], float]:
    num_blocks = 2**30 // block_bytes
    pool = torch.empty(2 * num_blocks, block_bytes, dtype=torch.uint8, device=_GPU)
    order = torch.randperm(num_blocks, device=_GPU)
    pairs = torch.stack([order, num_blocks + order.flip(0)], dim=1)
    return rate(lambda: copy_blocks(pool, pool, pairs), 2 * num_blocks * block_bytes)


def _sampling() -> Callable[[], float]:
    from baton.engine.sampling.sampler import Sampler
    from baton.engine.sampling.triton_choice import TritonChooser
    from baton.sampling import SamplingParams

    num_rows, vocab_size = 256, 128 * 1024
    chooser = TritonChooser(num_rows, vocab_size, _GPU)
    sampler = Sampler(num_rows, vocab_size, _GPU, frozenset(), chooser)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)
    for batch_slot in range(num_rows):
        sampler.assign(batch_slot, params, 1)
    logits = torch.randn(num_rows, vocab_size, dtype=_SHAPE.dtype, device=_GPU)
    batch_slots = np.arange(num_rows)
    history = np.zeros((num_rows, 1), np.int32)
    ones = np.ones(num_rows, np.int64)

    def choose() -> object:
        return sampler.choose(logits, batch_slots, 0 * ones, ones, history)

    return rate(choose, logits.numel() * logits.element_size())
