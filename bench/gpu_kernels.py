"""Kernels against the ceilings of the GPU they run on, and against the library's."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.attention.interface import LayerAttention, RaggedBatch
from baton.engine.attention.mask_rule import MaskRule
from baton.engine.attention.triton_attention import TritonAttention, TritonBatch
from baton.engine.cache.kv_layout import KvShape, plan_groups
from baton.engine.cache.kv_pool import KvCache, KvPool
from baton_kernels.block_copy import copy_blocks
from bench.gpu_timing import Case, copy_bandwidth, rate
from bench.report import Row, interleaved

_GPU = torch.device("cuda")
_DTYPE = torch.bfloat16
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
_TOKEN_BYTES = 2 * _NUM_KV_HEADS * _HEAD_DIM * 2
_BLOCK_SIZE = 16
_LAYER = LayerAttention(_HEAD_DIM**-0.5, MaskRule())

# Contexts of the sequences of a batch: at least 1 GiB of KV together, but for the last.
_DECODES: dict[str, list[int]] = {
    "decode attention, 64 contexts of 8k": [8192] * 64,
    "decode attention, 256 contexts of 2k": [2048] * 256,
    "decode attention, 128 ragged contexts of 128 to 16k": np.linspace(128, 16384, 128)
    .astype(int)
    .tolist(),
    "decode attention, 1 context of 256k": [2**18],
    "decode attention, 1 context of 32k": [2**15],
}
_PREFILLS = (2048, 8192, 32768)


def cases(repeats: int) -> Iterator[Case]:
    """Yields the cases one by one, so that one which fails takes no other with it."""
    copying = copy_bandwidth()

    def against_copy(case: str, aim: float, make: Callable[[], Callable[[], float]]) -> Case:
        return case, lambda: [_against_copy(case, make(), copying, repeats, aim)]

    for case, contexts in _DECODES.items():
        yield against_copy(case, 0.85, partial(_decode, contexts))
    for length in _PREFILLS:
        yield f"prefill attention, {length // 1024}k tokens", partial(_prefill, length, repeats)
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


def _attention(num_tokens: int, max_context: int) -> tuple[TritonAttention, int]:
    """Over a pool of random K and V with blocks for so many tokens."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE) + 1
    shape = KvShape(_NUM_KV_HEADS, _HEAD_DIM, _HEAD_DIM)
    layouts, places = plan_groups([shape], [None], _DTYPE, _BLOCK_SIZE)
    pool = KvPool(layouts[0], num_blocks, _GPU)
    pool.layers[0].keys.normal_()
    pool.layers[0].values.normal_()
    cache = KvCache([pool], [], places)
    attention = TritonAttention(cache, [_NUM_HEADS], _DTYPE, max_context, deterministic=False)
    return attention, num_blocks


def _decode(contexts: list[int]) -> Callable[[], float]:
    counts = [-(-context // _BLOCK_SIZE) for context in contexts]
    attention, num_blocks = _attention(sum(counts) * _BLOCK_SIZE, max(contexts))
    table = np.zeros((len(contexts), max(counts)), np.int32)
    block_ids = 1 + np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32)
    taken = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = block_ids[taken : taken + count]
        taken += count
    batch_slots, starts = np.arange(len(contexts)), np.array(contexts) - 1
    batch = attention.prepare(RaggedBatch.of_decodes(batch_slots, starts, [table]))
    query = torch.randn(len(contexts), _NUM_HEADS, _HEAD_DIM, dtype=_DTYPE, device=_GPU)
    num_bytes = sum(contexts) * _TOKEN_BYTES
    return rate(lambda: attention.attend(0, _LAYER, query, batch), num_bytes)


def _prefill_batch(length: int) -> tuple[TritonAttention, TritonBatch]:
    attention, num_blocks = _attention(length, length)
    table = np.arange(1, num_blocks, dtype=np.int32)[None]
    one = np.ones(1, np.int64)
    return attention, attention.prepare(RaggedBatch(0 * one, 0 * one, length * one, 0, [table]))


def _prefill(length: int, repeats: int) -> list[Row]:
    attention, batch = _prefill_batch(length)
    query = torch.randn(length, _NUM_HEADS, _HEAD_DIM, dtype=_DTYPE, device=_GPU)
    num_operations = 4 * _NUM_HEADS * _HEAD_DIM * length * (length + 1) / 2
    contenders = {
        "ours": rate(lambda: attention.attend(0, _LAYER, query, batch), num_operations),
        "SDPA, cuDNN": _library(length, SDPBackend.CUDNN_ATTENTION, num_operations),
        "SDPA, flash": _library(length, SDPBackend.FLASH_ATTENTION, num_operations),
    }
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


def _library(length: int, backend: SDPBackend, num_operations: float) -> Callable[[], float]:
    query, key, value = (
        torch.randn(1, heads, length, _HEAD_DIM, dtype=_DTYPE, device=_GPU)
        for heads in (_NUM_HEADS, _NUM_HEADS, _NUM_HEADS)
    )

    def attend() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return rate(attend, num_operations)


def _cache_write(num_tokens: int) -> Callable[[], float]:
    attention, batch = _prefill_batch(num_tokens)
    key, value = (
        torch.randn(num_tokens, _NUM_KV_HEADS, _HEAD_DIM, dtype=_DTYPE, device=_GPU)
        for _ in range(2)
    )
    from baton_kernels.cache_write import write_kv

    blocks, slots = attention.blocks(0), attention.slots(0, batch)
    return rate(lambda: write_kv(key, value, blocks, slots), 2 * num_tokens * _TOKEN_BYTES, 50)


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
    logits = torch.randn(num_rows, vocab_size, dtype=_DTYPE, device=_GPU)
    batch_slots = np.arange(num_rows)
    history = np.zeros((num_rows, 1), np.int32)
    ones = np.ones(num_rows, np.int64)

    def choose() -> object:
        return sampler.choose(logits, batch_slots, 0 * ones, ones, history)

    return rate(choose, logits.numel() * logits.element_size())
