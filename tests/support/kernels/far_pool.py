"""Process of `test_gpu_transfer`: a pool on the GPU whose memory others may open.

It prints its offer as a line of JSON, and lives until its standard input ends.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton_kvtransfer.connector import Offer, Region
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector

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


def to_json(offer: Offer) -> str:
    """Returns an offer as a line, for `offer_of` in another process."""
    return json.dumps(asdict(offer), default=bytes.hex)


def offer_of(line: str) -> Offer:
    fields: dict[str, Any] = json.loads(line)
    for region in fields["regions"]:
        region.update({name: bytes.fromhex(region[name]) for name in ("handle", "device_uuid")})
    return Offer(
        fields["address"],
        fields["host"],
        num_blocks=tuple(fields["num_blocks"]),
        regions=tuple(Region(**region) for region in fields["regions"]),
    )


def main() -> None:
    pools = filled("cuda")
    print(to_json(asyncio.run(CudaIpcConnector(pools).offer())), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
