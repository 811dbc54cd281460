"""Engine in a process of its own that sizes its cache itself, and says what memory it takes.

    python -m tests.support.kernels.measured_engine CHECKPOINT SETTINGS

prints a JSON line once it has served, and ends with its standard input.
"""

import json
import sys

import torch

from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from tests.support.kernels.engine_families import GREEDY, PROMPTS


def main() -> None:
    path, settings = sys.argv[1:]
    engine = LLM.from_pretrained(path, EngineConfig(**json.loads(settings)))
    results = engine.generate(PROMPTS, GREEDY)
    is_cuda = engine.core.device.type == "cuda"
    found = {
        "token_ids": [result.token_ids for result in results],
        "num_blocks": [pool.num_blocks for pool in engine.core.cache.pools],
        "reserved": torch.cuda.max_memory_reserved(engine.core.device) if is_cuda else 0,
        "total": torch.cuda.get_device_properties(engine.core.device).total_memory
        if is_cuda
        else 0,
    }
    print(json.dumps(found), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
