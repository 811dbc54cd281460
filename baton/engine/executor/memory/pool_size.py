"""Number of KV blocks, from a byte budget or from the free memory of a machine or a GPU.

Knows nothing of tensors beyond their sizes; the caller measures the memory of a forward pass.
"""

from dataclasses import dataclass

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_layout import KvLayout, share_memory
from baton.errors import InvalidArgumentError

# On a CPU: the least; how many sequences of the longest length the pools hold where memory allows
# it; and the fraction of the free memory that they may take.
_CPU_BYTES = 512 * 2**20
_CPU_SEQUENCES = 4
_CPU_FRACTION = 0.25
_MIB = 2**20
# Fraction of a GPU that stays free for CUDA contexts and fragments, however many workers share it.
_FREE = 0.05


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU, in bytes.

    Attributes:
        total: memory of the device.
        used_by_others: used by other processes, the driver and libraries other than torch.
        peak: torch's own at the largest moment of a step, weights included.
        graphs: of the CUDA graphs to record: their inputs, activations and logits.
    """

    total: int
    used_by_others: int
    peak: int
    graphs: int = 0


def cpu_bytes(longest: int, available: int) -> int:
    """Returns the bytes of all pools together on a CPU, by default. They grow by factors of two, so
    that workers of one machine, which find a little more or less memory, offer the same length.

    Args:
        longest: bytes of a sequence of the longest length.
        available: bytes that the process may still take.
    """
    size = _CPU_SEQUENCES * longest
    while size > available * _CPU_FRACTION:
        size //= 2
    return max(size, _CPU_BYTES)


def bytes_for_pools(config: EngineConfig, gpu: GpuMemory | None, by_default: int) -> int:
    """Returns the bytes that all pools may take together. `gpu`: None for a CPU, where they are
    those `by_default`.

    `gpu_memory_utilization` bounds this worker alone; what others have taken bounds it only if less
    than that is free. Raises `InvalidArgumentError` if a GPU has nothing left for the pools.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    if gpu is None:
        return by_default
    utilization, taken = config.gpu_memory_utilization, gpu.peak + gpu.graphs
    allowed = int(gpu.total * utilization)
    free = int(gpu.total * max(1 - _FREE, utilization)) - gpu.used_by_others
    left = min(allowed, free) - taken
    if left <= 0:
        raise InvalidArgumentError(
            "gpu_memory_utilization",
            f"is {utilization:g}, which allows {allowed // _MIB} MiB of {gpu.total // _MIB}; the "
            f"model, the largest step and CUDA graphs take {taken // _MIB} and others on this GPU "
            f"{gpu.used_by_others // _MIB}, so that nothing is left for KV "
            "blocks: raise it, lower max_num_batched_tokens, or use a smaller model or dtype",
        )
    return left


def longest_bytes(layouts: list[KvLayout], max_len: int, max_chunk: int) -> int:
    """Returns the bytes of the KV of one sequence of `max_len` tokens."""
    return sum(layout.block_bytes * peak_blocks(layout, max_len, max_chunk) for layout in layouts)


def num_blocks(
    config: EngineConfig, layouts: list[KvLayout], max_len: int, max_chunk: int, num_bytes: int
) -> list[int]:
    """Returns the blocks of each cache group; for a window, at most as many as could ever be used.

    Args:
        max_len: tokens of the longest sequence.
        max_chunk: tokens of the largest step.
        num_bytes: bytes of all pools together, as `bytes_for_pools` returns them.
    """
    if config.num_blocks is not None:
        return [config.num_blocks] * len(layouts)
    # Twice the running sequences', so that prefixes stay cached after their window has passed.
    most = [
        2 * config.max_num_seqs * peak_blocks(layout, max_len, max_chunk)
        if layout.window
        else 2**62
        for layout in layouts
    ]
    counts = share_memory(layouts, num_bytes, most)
    if min(counts) == 0:
        raise InvalidArgumentError(
            "kv_cache_bytes",
            f"is {num_bytes}; one block of each cache group takes "
            f"{sum(layout.block_bytes for layout in layouts)}",
        )
    return counts


def check_fits(field: str, num_bytes: int, memory: int) -> None:
    """Raises `InvalidArgumentError` if what a `field` asks for, `num_bytes`, exceeds `memory`."""
    if num_bytes > memory:
        raise InvalidArgumentError(
            field,
            f"asks for {num_bytes // _MIB} MiB for KV blocks, where there are {memory // _MIB} MiB "
            "of memory in all; set less",
        )


def check_holds_longest(
    counts: list[int], layouts: list[KvLayout], max_len: int, max_chunk: int
) -> None:
    """Raises `InvalidArgumentError` if pools of `counts` blocks could never hold a sequence of
    `max_len` tokens."""
    for count, layout in zip(counts, layouts, strict=True):
        needed = peak_blocks(layout, max_len, max_chunk)
        if count < needed:
            raise InvalidArgumentError(
                "max_model_len",
                f"is {max_len}; one sequence of that length takes {needed} KV blocks and the pool "
                f"has {count}: set a smaller max_model_len, or leave the cache more memory "
                "(gpu_memory_utilization, kv_cache_bytes)",
            )


def peak_blocks(layout: KvLayout, num_tokens: int, max_chunk: int) -> int:
    """Returns the most blocks that one sequence holds: with a window, only the window before a
    step's tokens, those tokens, and one more where the ends lie within blocks."""
    total = -(-num_tokens // layout.block_size)
    if layout.window is None:
        return total
    return min(total, -(-(layout.window - 1 + max_chunk) // layout.block_size) + 1)
