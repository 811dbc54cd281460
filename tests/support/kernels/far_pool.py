"""The other process of `test_gpu_transfer`: a pool on the GPU whose memory others may open.

It prints, as a line of JSON, how; and lives until its standard input ends.
"""

import json
import sys

import torch

from baton.engine.cache.kv_pool import KvLayout, KvPool, KvShape, plan_layout
from baton_kvtransfer.connectors.cuda_ipc.driver_memory import DriverMemory
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import offer

NUM_BLOCKS = 64


def layouts() -> list[KvLayout]:
    """Of two cache groups; a block of the second one is too odd for the copying kernel."""
    return [
        plan_layout([KvShape(2, 64, 64)] * 3, torch.bfloat16, 16),
        plan_layout([KvShape(1, 3, 3)], torch.float16, 1, 8),
    ]


def filled(device: str) -> list[KvPool]:
    """Pools whose every block has bytes of its own, the same wherever this is called."""
    pools = [KvPool(layout, NUM_BLOCKS, torch.device(device)) for layout in layouts()]
    for pool in pools:
        noise = torch.Generator().manual_seed(7)
        content = torch.randint(256, pool.content.shape, dtype=torch.uint8, generator=noise)
        pool.content[1:] = content[1:].to(device)
    return pools


def main() -> None:
    pools = filled("cuda")
    torch.cuda.synchronize()
    offered = offer(pools, DriverMemory())
    assert not isinstance(offered, str), offered
    regions = [
        (region.handle.hex(), region.offset, region.device_uuid.hex(), region.num_blocks)
        for region in offered.regions
    ]
    print(json.dumps([offered.host, regions]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
