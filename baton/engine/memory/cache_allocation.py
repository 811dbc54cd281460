"""KV cache allocation, from the configured size or the free memory of the GPU."""

from dataclasses import replace

import torch

from baton.engine.backend import Backend
from baton.engine.cache.kv_layout import pool_bytes, share_memory
from baton.engine.cache.kv_pool import KvCache
from baton.engine.config import EngineConfig
from baton.engine.memory.cache_plan import CachePlan
from baton.engine.memory.gpu_lock import gpu_lock
from baton.engine.memory.machine_memory import allowed_memory
from baton.engine.memory.pool_size import (
    GpuMemory,
    bytes_for_pools,
    check_fits,
    check_holds_longest,
    num_blocks,
)
from baton.engine.memory.profiling import largest_step, measure
from baton.engine.runner import DecoderModel


def allocate(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
) -> KvCache:
    """Allocates as many blocks as memory permits, and host blocks of up to `swap_bytes` bytes.

    Raises `InvalidArgumentError` if that is too little, or more than there can be.
    """
    # Workers that share a GPU would else measure the same free memory, and all take it.
    with gpu_lock(device):
        return _allocate(config, plan, model, backend, device, max_len)


def _allocate(
    config: EngineConfig,
    plan: CachePlan,
    model: DecoderModel,
    backend: Backend,
    device: torch.device,
    max_len: int,
) -> KvCache:
    chunk = config.tokens_per_step(device.type)
    gpu = _measured(config, plan, model, backend, device, max_len)
    counts = num_blocks(config, plan.layouts, max_len, chunk, bytes_for_pools(config, gpu))
    needed = sum(map(pool_bytes, plan.layouts, counts))
    check_fits("num_blocks" if config.num_blocks else "kv_cache_bytes", needed, _memory_of(device))
    if device.type == "cuda":
        check_holds_longest(counts, plan.layouts, max_len, chunk)
    hosts = share_memory(plan.layouts, config.swap_bytes, counts) if config.swap_bytes else []
    shared = config.shared_pools and device.type == "cpu"
    return plan.cache(plan.shared_pools(counts) if shared else plan.pools(counts, device), hosts)


def _memory_of(device: torch.device) -> int:
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
    """Measures the GPU memory that the model takes; None on a CPU, or if the config sets sizes."""
    if device.type != "cuda" or config.num_blocks or config.kv_cache_bytes:
        return None
    chunk = config.tokens_per_step(device.type)
    step, num_needed = largest_step(chunk, max_len, config.block_size, len(plan.layouts))
    counts = [num_needed] * len(plan.layouts)
    attention = backend.attention(plan.cache(plan.pools(counts, device), []))
    model.use(attention)
    found = measure(model, attention, step, min(chunk, config.max_num_seqs), device)
    return replace(found, graphs=backend.graph_bytes(model, attention))
