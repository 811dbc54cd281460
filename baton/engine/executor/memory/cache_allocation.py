"""KV cache allocation, from the configured size or the free memory of the GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.backend import Backend
from baton.engine.executor.cache.kv_layout import pool_bytes, share_memory
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.memory.cache_plan import CachePlan, EncoderPlan, shared_pool
from baton.engine.executor.memory.gpu_lock import gpu_lock
from baton.engine.executor.memory.machine_memory import allowed_memory, available_memory
from baton.engine.executor.memory.pool_size import (
    GpuMemory,
    bytes_for_pools,
    check_fits,
    check_holds_longest,
    cpu_bytes,
    longest_bytes,
    num_blocks,
)
from baton.engine.executor.memory.profiling import largest_step, measure
from baton.engine.executor.runner import DecoderModel

Measure = Callable[
    [EngineConfig, CachePlan, DecoderModel, Backend, torch.device, int], GpuMemory | None
]


def allocate(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
    *,
    lock: Callable[[torch.device], AbstractContextManager[None]] = gpu_lock,
    measure: Measure | None = None,
) -> KvCache:
    """Allocates as many blocks as memory permits beside those of the encoder, and host blocks of up
    to `swap_bytes` bytes; with `encoder_only` one block of each cache group, for its layout.

    `measure` returns the memory of the GPU that the model and its encoder take, None if sizes do
    not depend on it; by default it runs the model. `lock` is held meanwhile.

    Raises `InvalidArgumentError` if that is too little, or more than there can be.
    """
    # Workers that share a GPU would else measure the same free memory, and all take it.
    with lock(device):
        return _allocate(config, plan, model, backend, device, max_len, measure or _measured)


def _allocate(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
    measure: Measure,
) -> KvCache:
    chunk = config.tokens_per_step(device.type)
    shared = config.shared_pools and device.type == "cpu"
    encoder_pool = _encoder_pool(plan.encoder, device, shared=shared)  # before the measurement
    if config.encoder_only:
        counts = [1] * len(plan.layouts)
    else:
        gpu = measure(config, plan, model, backend, device, max_len)
        torch.cuda.empty_cache()  # the probe's memory, in pieces that no pool fits
        longest = longest_bytes(plan.layouts, max_len, chunk)
        num_bytes = bytes_for_pools(config, gpu, cpu_bytes(longest, available_memory()))
        counts = num_blocks(config, plan.layouts, max_len, chunk, num_bytes)
    needed = sum(map(pool_bytes, plan.layouts, counts))
    if encoder_pool is not None:
        needed += encoder_pool.content.nbytes
    check_fits("num_blocks" if config.num_blocks else "kv_cache_bytes", needed, memory_of(device))
    if device.type == "cuda" and not config.encoder_only:
        check_holds_longest(counts, plan.layouts, max_len, chunk)
    hosts = share_memory(plan.layouts, config.swap_bytes, counts) if config.swap_bytes else []
    pools = plan.shared_pools(counts) if shared else plan.pools(counts, device)
    return plan.cache(pools, hosts, encoder_pool)


def _encoder_pool(
    encoder: EncoderPlan | None, device: torch.device, *, shared: bool
) -> KvPool | None:
    if encoder is None:
        return None
    if shared:
        return shared_pool(encoder.layout, encoder.num_blocks)
    return KvPool(encoder.layout, encoder.num_blocks, device)


def memory_of(device: torch.device) -> int:
    """Returns the bytes of the GPU's memory, or those that the process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return allowed_memory()


def _measured(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
) -> GpuMemory | None:
    """Measures the GPU memory that the model and its encoder take; None on a CPU, or if the config
    sets sizes."""
    if device.type != "cuda" or config.num_blocks or config.kv_cache_bytes:
        return None
    return probe(config, plan, model, backend, device, max_len)


def probe(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
    measure: Callable[..., GpuMemory] = measure,
) -> GpuMemory:
    """Measures the memory of the largest step, over a cache of its own, and of recorded steps. The
    model has no attention afterwards."""
    chunk = config.tokens_per_step(device.type)
    step, num_needed = largest_step(chunk, max_len, config.block_size, len(plan.layouts))
    counts = [num_needed] * len(plan.layouts)
    attention = backend.attention(plan.cache(plan.pools(counts, device), []))
    model.use(attention)
    encode = None if plan.encoder is None else plan.encoder.encode_largest
    found = measure(model, attention, step, min(chunk, config.max_num_seqs), device, encode)
    found = replace(found, graphs=backend.graph_bytes(model, attention))
    model.use(None)
    return found
