"""Cost of a swap: that of a copy, and not of the first one, which compiles its kernel."""

import time

import torch

from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.swap_costs import CostMeter
from baton.engine.scheduler.sequences.config import PreemptionCosts

CPU = torch.device("cpu")


class CompilingPool(KvPool):
    """Pool whose first copy takes as long as to compile a kernel."""

    num_copies = 0

    def copy_blocks(self, sources: list[int], targets: list[int], origin: KvPool) -> None:
        if not self.num_copies:
            time.sleep(0.5)
        self.num_copies += 1
        super().copy_blocks(sources, targets, origin)


def test_cost_meter_measures_swap_without_compilation() -> None:
    layouts, places = plan_groups([KvShape(2, 8, 8)], [None], torch.float32, 16)
    pools = [CompilingPool(layouts[0], 8, CPU)]
    costs = PreemptionCosts()
    CostMeter(costs, KvCache(pools, [KvPool(layouts[0], 8, CPU)], places))
    assert pools[0].num_copies > 1
    assert 0 < costs.swap_block < 0.05
