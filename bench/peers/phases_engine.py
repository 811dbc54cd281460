"""One engine of `bench peers` against llama.cpp, in a process of the Python it is installed in.

`python -m bench.peers.phases_engine ENGINE FILE DTYPE THREADS`, where ENGINE is `baton` or
`llama`, says `ready` once the GGUF file is loaded. Then each line is a JSON array, of prompts and
the number of tokens to generate after each, and is answered by the seconds until all prompts have
their first token, those of the tokens after it, the number of these, and all tokens. Everything
else that an engine prints goes to standard error. Imports nothing that only one of them has.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

Prompts = Sequence[Sequence[int]]
Answer = tuple[float, float, int, list[list[int]]]
LENGTH = 4096
MAX_SEQUENCES = 16
STEP = 512  # tokens of prompts that a step computes at most


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine, file, dtype, threads = sys.argv[1:]
    generate = {"baton": _baton, "llama": _llama}[engine](file, dtype, int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(*json.loads(line))), file=answers, flush=True)


def _baton(file: str, dtype: str, threads: int) -> Callable[[Prompts, int], Answer]:
    from baton.engine import LLM, EngineConfig, SamplingParams
    from baton.engine.request import EngineRequest

    config = EngineConfig(
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        num_threads=threads,
        prefix_caching=False,
        max_num_batched_tokens=STEP,
        max_num_tokens_with_decodes=STEP,
    )
    core = LLM.from_pretrained(file, config).core

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        start = first = time.perf_counter()
        num_first = 0
        for i, prompt in enumerate(prompts):
            core.add(EngineRequest(str(i), tuple(prompt), params, len(prompt)))
        while core.has_work:
            for update in core.step().updates:
                if update.token_id is not None:
                    tokens[update.request_id].append(update.token_id)
            if not num_first and all(tokens.values()):
                first, num_first = time.perf_counter(), sum(map(len, tokens.values()))
        seconds = time.perf_counter() - first
        num_after = len(prompts) * max_tokens - num_first
        return first - start, seconds, num_after, list(tokens.values())

    return generate


def _llama(file: str, _dtype: str, threads: int) -> Callable[[Prompts, int], Answer]:
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        file.encode(), llama_cpp.llama_model_default_params()
    )
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = MAX_SEQUENCES * LENGTH
    options.n_batch = options.n_ubatch = STEP
    options.n_seq_max = MAX_SEQUENCES
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    memory = llama_cpp.llama_get_memory(context)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(STEP, 0, 1)

    def compute(rows: Sequence[tuple[int, int, int]], chosen: Sequence[int]) -> list[int]:
        """Computes tokens, positions and sequences; returns the likeliest tokens after some."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, i in chosen
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert llama_cpp.llama_decode(context, batch) == 0, "llama.cpp has failed"
        logits = [llama_cpp.llama_get_logits_ith(context, i) for i in chosen]
        return [int(np.ctypeslib.as_array(each, shape=(size,)).argmax()) for each in logits]

    def first_token(prompt: Sequence[int], sequence: int) -> int:
        for begin in range(0, len(prompt), STEP):
            part = prompt[begin : begin + STEP]
            rows = [(token, begin + i, sequence) for i, token in enumerate(part)]
            is_last = begin + STEP >= len(prompt)
            found = compute(rows, [len(part) - 1] if is_last else [])
        return found[0]

    def generate(prompts: Prompts, max_tokens: int) -> Answer:
        llama_cpp.llama_memory_clear(memory, True)
        start = time.perf_counter()
        tokens = [[first_token(prompt, i)] for i, prompt in enumerate(prompts)]
        first = time.perf_counter()
        every = range(len(prompts))
        for step in range(max_tokens - 1):
            rows = [(tokens[i][-1], len(prompts[i]) + step, i) for i in every]
            for i, token in zip(every, compute(rows, every), strict=True):
                tokens[i].append(token)
        seconds = time.perf_counter() - first
        return first - start, seconds, len(prompts) * (max_tokens - 1), tokens

    return generate


if __name__ == "__main__":
    main()
