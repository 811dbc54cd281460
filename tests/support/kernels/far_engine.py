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
from dataclasses import asdict
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.cuda_ipc import CudaDriver
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, Purpose
from baton.sampling import SamplingParams
from baton_kvtransfer.connector import Receiver
from baton_kvtransfer.connectors.cuda_ipc import memory_handles
from baton_kvtransfer.connectors.shm import claimant
from baton_kvtransfer.connectors.shm.source import HandleServer
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint
from baton_kvtransfer.stream.transfer_stream import TransferStream
from tests.support.kernels.delayed_engine import cycles, delayed_engine
from tests.support.kernels.far_pool import offer_from_json, offer_to_json


def attach(described: Any, pools: list[KvPool]) -> Receiver:
    """Opens the pools that a far engine offers: memory of the GPU, or of the host for a CPU."""
    if isinstance(described, dict):
        described["num_blocks"] = tuple(described["num_blocks"])
        return claimant.attach(HandleEndpoint(**described), [pool.layout for pool in pools])
    return memory_handles.attach(offer_from_json(described), pools, CudaDriver(), TransferStream())


async def _offer(pools: list[KvPool], stack: AsyncExitStack) -> Any:
    if pools[0].content.is_cuda:
        return offer_to_json(pools)
    return asdict((await stack.enter_async_context(HandleServer(pools))).endpoint)


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
        print(json.dumps(await _offer(pools, stack)), flush=True)
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
