"""Process of `test_gpu_transfer`: a pool on the GPU whose memory others may open.

It prints its offer as a line of JSON, and lives until its standard input ends.
"""

import json
import sys
from typing import Any

import torch

from baton.engine.executor.cache.cuda_ipc import CudaDriver
from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import IpcOffer, IpcRegion, offer

NUM_BLOCKS = 64


def layouts() -> list[KvLayout]:
    """Returns layouts of two cache groups; a block of the second is as small as one can be."""
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
    settle(device)
    return pools


def settle(device: str) -> None:
    """Waits for the device: transfers wait for no other work."""
    if device != "cpu":
        torch.cuda.synchronize()


def offer_to_json(pools: list[KvPool]) -> list[Any]:
    """Returns the offer of pools on a GPU, for `offer_from_json` of another process."""
    offered = offer(pools, CudaDriver())
    assert isinstance(offered, IpcOffer), offered
    regions = [
        (region.handle.hex(), region.offset, region.device_uuid.hex(), region.num_blocks)
        for region in offered.regions
    ]
    return [offered.host, regions]


def offer_from_json(described: list[Any]) -> IpcOffer:
    host, regions = described
    return IpcOffer(
        host,
        tuple(
            IpcRegion(bytes.fromhex(handle), offset, bytes.fromhex(uuid), count)
            for handle, offset, uuid, count in regions
        ),
    )


def main() -> None:
    pools = filled("cuda")
    print(json.dumps(offer_to_json(pools)), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
