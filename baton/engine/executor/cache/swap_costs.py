"""Preemption cost measurement: seconds to swap a block and to recompute a token."""

import time

import torch

from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.scheduler.sequences.config import PreemptionCosts

# Fixed costs dominate steps with fewer tokens.
_MIN_TOKENS = 16
# The weight of a new measurement in the running mean.
_WEIGHT = 0.1
_NUM_COPIES = 8


class CostMeter:
    """Cost meter: keeps `costs` current for the scheduler, which chooses by them."""

    def __init__(self, costs: PreemptionCosts, cache: KvCache) -> None:
        self._costs = costs
        self._is_used = bool(cache.host_pools)
        if self._is_used:
            pairs = zip(cache.pools, cache.host_pools, strict=True)
            costs.swap_block = max(_seconds_per_block(pool, host) for pool, host in pairs)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Updates the cost per token from a step of `num_tokens` tokens in `seconds`."""
        if self._is_used and num_tokens >= _MIN_TOKENS:
            per_token = seconds / num_tokens
            self._costs.compute_token += _WEIGHT * (per_token - self._costs.compute_token)


def _seconds_per_block(pool: KvPool, host: KvPool) -> float:
    """Measures copies of the null block to blocks that are not in use yet."""
    target = [1] * min(_NUM_COPIES, pool.num_blocks)

    def copy() -> None:
        pool.copy_blocks([0] * len(target), target, host)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)

    copy()  # compiles the kernel, and maps the memory
    start = time.perf_counter()
    copy()
    return (time.perf_counter() - start) / len(target)
