"""The engine on a GPU, with a random model of the shape of Llama 3 8B, against its ceilings."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine import EngineConfig, SamplingParams
from baton.engine.assembly import assemble
from baton.engine.engine import Engine
from baton.engine.messages import EngineRequest
from baton.engine.models.transformers_model import AttentionHook
from bench.gpu_speculation import speculation_rows
from bench.gpu_timing import Cases, copy_bandwidth, matrix_peak
from bench.report import Row

HOST_CASE = "host time of a decode step, batch "
SHAPE: dict[str, Any] = {
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
HOST_SHAPE = {
    **SHAPE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_HOST_BATCHES = (1, 16, 64, 256)
_BATCHES = (1, 64, 256)
_CONTEXT = 512
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # of KV, over all layers
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Lengths of the requests whose tokens per second are measured."""
_NUM_PROMPTS = 256
_NUM_SPECULATING, _MAX_DRAFTS = 16, 4


def cases(repeats: int, speeds: dict[str, float]) -> Cases:
    """Yields the cases. Those of the deterministic mode find tokens per second in `speeds`."""
    yield "host time of decode steps", partial(_host_times, repeats)
    with random_engine() as (engine, num_bytes):
        copying, peak = copy_bandwidth(), matrix_peak()
        yield "decode graphs of 8B", partial(_graphs, engine)
        for batch in _BATCHES:
            yield (
                f"decode step of 8B, batch {batch}",
                partial(_decode_step, engine, num_bytes, batch, copying, repeats),
            )
        yield "prefill of 8B, prompts of 8k", partial(_prefill, engine, num_bytes, peak, repeats)
        yield "engine", partial(_throughput, engine, num_bytes, copying, peak, speeds)


def deterministic_cases(repeats: int, speeds: dict[str, float]) -> Cases:
    """Yields the cases of the deterministic mode, after those of the default one."""
    yield "engine, deterministic, and speculation", partial(_deterministic, speeds, repeats)


def _graphs(engine: Engine) -> list[Row]:
    """Returns the number of decode steps that are recorded. Raises `RuntimeError` unless all are:
    the engine serves without, two to three times as slowly."""
    recorded, expected = engine.facts.num_graphs, engine.facts.num_expected_graphs
    if not 0 < recorded == expected:
        raise RuntimeError(
            f"{recorded} of {expected} decode steps were recorded as CUDA graphs; the log says why"
        )
    return [Row("decode graphs of 8B", recorded, "graphs", "expected", expected, 1.0, None)]


def _host_times(repeats: int) -> list[Row]:
    with random_engine(HOST_SHAPE, num_blocks=2**15) as (engine, _):
        times = {batch: _step_seconds(engine, batch, repeats) * 1e3 for batch in _HOST_BATCHES}
    one = times[1]
    return [
        Row(f"{HOST_CASE}{batch}", took, "ms", "batch 1", one, one / took, None)
        for batch, took in times.items()
    ]


def _deterministic(speeds: dict[str, float], repeats: int) -> list[Row]:
    prompts = [prompt_of(PROMPT_TOKENS, i) for i in range(_NUM_SPECULATING)]
    with random_engine(deterministic=True, max_drafts=_MAX_DRAFTS) as (engine, _):
        value = tokens_per_second(engine, _NUM_PROMPTS)
        speculation = speculation_rows(engine, prompts, OUTPUT_TOKENS, repeats)
    default = speeds.get("engine", float("nan"))  # its case may have failed
    case = "engine, deterministic"
    row = Row(case, value, "tokens/s", "engine", default, value / default, 0.7)
    return [row, *speculation]


def random_model(
    attention: str, shape: dict[str, Any] = SHAPE, device: str = "cuda"
) -> LlamaForCausalLM:
    """Returns a Llama of random weights, made where they stay."""
    config = LlamaConfig(**shape, attn_implementation=attention, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().requires_grad_(False)


@contextmanager
def random_engine(
    shape: dict[str, Any] = SHAPE, device: str = "cuda", **changes: Any
) -> Iterator[tuple[Engine, int]]:
    """Yields an engine and the bytes of the weights that a decode reads; closes the engine."""
    config = EngineConfig(
        device=device,
        dtype="bfloat16",
        max_num_seqs=_NUM_PROMPTS,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        prefix_caching=False,
        gpu_memory_utilization=0.8,
        **changes,
    )
    hook = AttentionHook(16384)
    model = random_model(hook.name, shape, device)
    embedding = model.model.embed_tokens.weight.numel()
    num_weights = sum(p.numel() for p in model.parameters()) - embedding
    engine = Engine(config, assemble(model, hook, config, "", "random weights", b""))
    del model
    try:
        yield engine, num_weights * 2
    finally:
        engine.close()


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """Returns a prompt of random tokens."""
    return tuple(np.random.default_rng(seed).integers(0, 128000, length).tolist())


def _start(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=False)
    for i in range(count):
        engine.add_request(EngineRequest(str(i), prompt_of(length, i), params, length))


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
    num_bytes: int,
    batch: int,
    copying: Callable[[], float],
    repeats: int,
) -> list[Row]:
    ceilings: list[float] = []
    step = _step_seconds(engine, batch, repeats, lambda: ceilings.append(copying()))
    read = num_bytes + batch * (_CONTEXT + 64) * _TOKEN_BYTES
    value, ceiling = read / step, statistics.median(ceilings)
    case = f"decode step of 8B, batch {batch}"
    return [Row(case, value / 1e9, "GB/s", "device copy", ceiling / 1e9, value / ceiling, 0.75)]


def _prefill(engine: Engine, num_bytes: int, peak: Callable[[], float], repeats: int) -> list[Row]:
    length, count = 8192, 4
    operations = count * _prefill_operations(num_bytes, length)
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


def _prefill_operations(num_bytes: int, length: int) -> float:
    """Returns the operations of a prompt: two for each weight, which has two bytes, and token."""
    head = 128256 * 4096 * 2  # bytes of the last product, of which one row is computed
    return length * (num_bytes - head) + 4 * 32 * 32 * 128 * length * length / 2


def _throughput(
    engine: Engine,
    num_bytes: int,
    copying: Callable[[], float],
    peak: Callable[[], float],
    speeds: dict[str, float],
) -> list[Row]:
    """Returns the tokens per second, and what they were if prompts were computed at the peak and
    decode steps read at the pace of a copy."""
    value = speeds["engine"] = tokens_per_second(engine, _NUM_PROMPTS)
    kv_bytes = _NUM_PROMPTS * (PROMPT_TOKENS + OUTPUT_TOKENS / 2) * _TOKEN_BYTES
    decoding = OUTPUT_TOKENS * (num_bytes + kv_bytes) / copying()
    prefilling = _NUM_PROMPTS * _prefill_operations(num_bytes, PROMPT_TOKENS) / peak()
    ceiling = _NUM_PROMPTS * OUTPUT_TOKENS / (decoding + prefilling)
    case = f"engine, {_NUM_PROMPTS} prompts of {PROMPT_TOKENS}"
    return [Row(case, value, "tokens/s", "copy and product", ceiling, value / ceiling, None)]


def tokens_per_second(engine: Engine, num_prompts: int) -> float:
    """Returns those of the second pass of two: the first compiles."""
    elapsed = 0.0
    for _ in range(2):
        _start(engine, num_prompts, PROMPT_TOKENS, OUTPUT_TOKENS)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        elapsed = time.perf_counter() - start
    return num_prompts * OUTPUT_TOKENS / elapsed
