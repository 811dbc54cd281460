"""One engine of `bench peers`, in a process of the Python it is installed in.

`python -m bench.peers.peers_engine ENGINE FOLDER DTYPE`, where ENGINE is `baton` or `vllm`, says
`ready` once the model is loaded. Then each line is a JSON array, of prompts and the number of
tokens to generate after each, and is answered by the seconds that took and the tokens. Everything
else that an engine prints goes to standard error. Imports nothing that only one of them has.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine, folder, dtype = sys.argv[1:]
    generate = {"baton": _baton, "vllm": _vllm}[engine](folder, dtype)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts, max_tokens = json.loads(line)
        start = time.perf_counter()
        tokens = generate(prompts, max_tokens)
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, tokens]), file=answers, flush=True)


def _baton(folder: str, dtype: str) -> Generate:
    from baton.engine import LLM, EngineConfig, SamplingParams

    config = EngineConfig(device="cpu", dtype=dtype, prefix_caching=False)  # type: ignore[arg-type]
    engine = LLM.from_pretrained(folder, config)

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return [list(result.token_ids) for result in engine.generate(prompts, params)]

    return generate


def _vllm(folder: str, dtype: str) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, enable_prefix_caching=False)

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(inputs, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return generate


if __name__ == "__main__":
    main()
