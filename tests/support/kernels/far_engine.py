"""Process of `test_two_processes`: an engine that computes prompts for another process.

    python -m tests.support.kernels.far_engine MODEL SETTINGS

prints the offer of its pools as a line of JSON; for `[prompt, delay]` in a line of its standard
input, a line for each update as soon as there is one: `[num_computed_tokens, block_ids, token_id]`.
Each of its steps is `delay` seconds late. It lives until its input ends.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, Purpose
from baton.sampling import SamplingParams
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from tests.support.kernels.delayed_engine import cycles, delayed_engine
from tests.support.kernels.far_pool import to_json


def connector_for(pools: list[KvPool]) -> ShmConnector | CudaIpcConnector:
    """Returns the connector of pools in memory of the GPU, or of the host for a CPU."""
    return CudaIpcConnector(pools) if pools[0].content.is_cuda else ShmConnector(pools)


def _prefill(engine: LLM, name: str, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.core.add(EngineRequest(name, tuple(prompt), params, len(prompt), Purpose.PREFILL))
    while engine.core.has_work:
        for update in engine.core.step().updates:
            if name:
                told = [update.num_computed_tokens, update.block_ids, update.token_id]
                print(json.dumps(told), flush=True)


async def main(path: str, settings: str) -> None:
    engine, model = delayed_engine(path, EngineConfig(**json.loads(settings)))
    pools = engine.core.cache.pools
    async with AsyncExitStack() as stack:
        connector = connector_for(pools)
        stack.push_async_callback(connector.close)
        print(to_json(await connector.offer()), flush=True)
        prompt, delay = json.loads(await asyncio.to_thread(sys.stdin.readline))
        _prefill(engine, "", prompt)  # compiles
        engine.core.scheduler.release("")
        for pool in pools:
            pool.content.zero_()
        if pools[0].content.is_cuda:
            torch.cuda.synchronize()
        model.num_cycles = cycles(delay, engine.core.device)
        await asyncio.to_thread(_prefill, engine, "it", prompt)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
