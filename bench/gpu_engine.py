"""The engine on a GPU, with a random model of the shape of Llama 3 8B, against what the GPU can do
and against transformers on the same weights."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from baton.engine import EngineConfig, SamplingParams
from baton.engine.assembly import assemble
from baton.engine.engine import Engine
from baton.engine.messages import EngineRequest
from baton.engine.models.transformers_model import AttentionHook
from bench.gpu_speculation import speculation_rows
from bench.gpu_timing import Case, copy_bandwidth, matrix_peak, seconds
from bench.report import Row

HOST_CASE = "host time of a decode step, batch "
_SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}
# One layer of next to nothing: a step of it takes the host's time.
_HOST_SHAPE = {
    **_SHAPE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_BATCHES = (1, 16, 64, 256)
_CONTEXT = 512
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # of KV, over all layers
_PROMPT, _OUTPUT = 512, 128
_NUM_PROMPTS = 256
_NUM_SPECULATING, _MAX_DRAFTS = 16, 4
_NUM_BATCH_PROMPTS = 64  # `generate_batch` attends to the KV of all requests, and masks others'


def cases(repeats: int) -> Iterator[Case]:
    """Yields the cases one by one, so that one which fails takes no other with it."""
    yield "host time of decode steps", partial(_host_times, repeats)
    with _engine() as (engine, num_weights):
        copying, peak = copy_bandwidth(), matrix_peak()
        for batch in _BATCHES:
            yield (
                f"decode step of 8B, batch {batch}",
                partial(_decode_step, engine, num_weights, batch, copying, repeats),
            )
        yield "prefill of 8B, prompts of 8k", partial(_prefill, engine, num_weights, peak, repeats)
        default = _tokens_per_second(engine)
        fewer = _tokens_per_second(engine, _NUM_BATCH_PROMPTS)
    del engine, copying, peak  # the next one has no room beside it
    yield "engine, deterministic, and speculation", partial(_deterministic, default, repeats)
    yield "engine, against generate_batch", partial(_against_generate_batch, fewer)


def _host_times(repeats: int) -> list[Row]:
    with _engine(_HOST_SHAPE, num_blocks=2**15) as (engine, _):
        times = {batch: _step_seconds(engine, batch, repeats) * 1e3 for batch in _BATCHES}
    one = times[1]
    return [
        Row(f"{HOST_CASE}{batch}", took, "ms", "batch 1", one, one / took, None)
        for batch, took in times.items()
    ]


def _deterministic(default: float, repeats: int) -> list[Row]:
    prompts = [_prompt(_PROMPT, i) for i in range(_NUM_SPECULATING)]
    with _engine(deterministic=True, max_drafts=_MAX_DRAFTS) as (engine, _):
        value = _tokens_per_second(engine)
        speculation = speculation_rows(engine, prompts, _OUTPUT, repeats)
    case = "engine, deterministic"
    row = Row(case, value, "tokens/s", "engine", default, value / default, 0.7)
    return [row, *speculation]


def _against_generate_batch(ours: float) -> list[Row]:
    theirs = _generate_batch()
    case = f"engine, {_NUM_BATCH_PROMPTS} prompts of {_PROMPT}"
    return [Row(case, ours, "tokens/s", "generate_batch", theirs, ours / theirs, 3)]


def _model(attention: str, shape: dict[str, Any] = _SHAPE) -> LlamaForCausalLM:
    """Random weights, made where they stay."""
    config = LlamaConfig(**shape, attn_implementation=attention, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    return model.eval().requires_grad_(False)


@contextmanager
def _engine(shape: dict[str, Any] = _SHAPE, **changes: Any) -> Iterator[tuple[Engine, int]]:
    """Yields an engine and the bytes of the weights that a decode reads; closes the engine."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=max(_BATCHES),
        max_num_batched_tokens=8192,
        max_model_len=16384,
        prefix_caching=False,
        gpu_memory_utilization=0.8,
        **changes,
    )
    hook = AttentionHook(16384)
    model = _model(hook.name, shape)
    embedding = model.model.embed_tokens.weight.numel()
    num_weights = sum(p.numel() for p in model.parameters()) - embedding
    engine = Engine(config, assemble(model, hook, config, "", "random weights", b""))
    del model
    try:
        yield engine, num_weights * 2
    finally:
        engine.close()


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 128000, length).tolist())


def _start(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=False)
    for i in range(count):
        engine.add_request(EngineRequest(str(i), _prompt(length, i), params, length))


def _step_seconds(
    engine: Engine,
    batch: int,
    repeats: int,
    between: Callable[[], object] = lambda: None,
) -> float:
    """Returns the median over `repeats` of a decode step's seconds; calls `between` after each."""
    _start(engine, batch, _CONTEXT, 16 + 32 * (repeats + 1))
    while engine.stats().num_step_tokens != batch or engine.stats().num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(16):
            engine.step()
        times.append((time.perf_counter() - start) / 16)
        torch.cuda.synchronize()
        between()
    engine.abort(*map(str, range(batch)))
    while engine.has_work:
        engine.step()
    return statistics.median(times)


def _decode_step(
    engine: Engine,
    num_weights: int,
    batch: int,
    copying: Callable[[], float],
    repeats: int,
) -> list[Row]:
    ceilings: list[float] = []
    step = _step_seconds(engine, batch, repeats, lambda: ceilings.append(copying()))
    num_bytes = num_weights + batch * (_CONTEXT + 64) * _TOKEN_BYTES
    value, ceiling = num_bytes / step, statistics.median(ceilings)
    case = f"decode step of 8B, batch {batch}"
    return [Row(case, value / 1e9, "GB/s", "device copy", ceiling / 1e9, value / ceiling, 0.75)]


def _prefill(
    engine: Engine, num_weights: int, peak: Callable[[], float], repeats: int
) -> list[Row]:
    length, count = 8192, 4
    attention = 4 * 32 * 32 * 128 * length * length / 2
    head = 128256 * 4096 * 2  # bytes of the last product, of which one row is computed
    operations = count * (length * (num_weights - head) + attention)
    values, peaks = [], []
    for attempt in range(repeats + 1):
        _start(engine, count, length, 1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
        if attempt:  # the first compiles
            values.append(operations / (time.perf_counter() - start))
            peaks.append(peak())
    value, ceiling = statistics.median(values), statistics.median(peaks)
    case = "prefill of 8B, prompts of 8k"
    return [
        Row(case, value / 1e12, "TFLOP/s", "bf16 product", ceiling / 1e12, value / ceiling, 0.6)
    ]


def _tokens_per_second(engine: Engine, num_prompts: int = _NUM_PROMPTS) -> float:
    """The second pass of two: the first compiles."""
    elapsed = 0.0
    for _ in range(2):
        _start(engine, num_prompts, _PROMPT, _OUTPUT)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        elapsed = time.perf_counter() - start
    return num_prompts * _OUTPUT / elapsed


def _generate_batch() -> float:
    model = _model("sdpa")
    config = GenerationConfig(
        do_sample=False, max_new_tokens=_OUTPUT, eos_token_id=-1, pad_token_id=0
    )
    prompts = [list(_prompt(_PROMPT, i)) for i in range(_NUM_BATCH_PROMPTS)]

    def generate(some: list[list[int]]) -> None:
        model.generate_batch(inputs=some, generation_config=config)

    generate(prompts[:8])
    return _NUM_BATCH_PROMPTS * _OUTPUT / seconds(lambda: generate(prompts), 1)
