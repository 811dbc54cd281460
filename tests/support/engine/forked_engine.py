"""Process with an engine in a child, as a worker has one, to be killed by a test.

Prints the child's id, and serves one long request until it is killed. Run by `python -m`, with
a checkpoint.
"""

import asyncio
import sys

from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from baton.engine.core.process.engine_child import EngineChild, fork_engine
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.request import EngineRequest
from baton.sampling import SamplingParams

_CONFIG = EngineConfig(device="cpu", dtype="float32", num_blocks=64, num_threads=1)


async def _serve(child: EngineChild, path: str) -> None:
    core = await asyncio.to_thread(EngineProcess.load, child, path, _CONFIG)
    failed = asyncio.Event()
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        failed.set()

    engine = EngineClient(core, on_failure=on_failure)
    engine.start()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with engine.open(EngineRequest("a", (1, 2, 3), params, 3)) as stream:
        await anext(stream.updates())
        print(child.pid, flush=True)
        await failed.wait()
    await engine.stop()
    print(*reasons, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(fork_engine(), sys.argv[1]))
