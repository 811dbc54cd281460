"""The engine on a GPU, with a random model of the shape of Llama 3 8B, against its ceilings."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine import EngineConfig, SamplingParams
from baton.engine.executor.models.transformers_model import AttentionHook
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from bench.gpu.sizes import EngineSizes, in_k
from bench.gpu.speculation import speculation_rows, step
from bench.gpu.timing import Bench, Cases
from bench.report import Row


def cases(bench: Bench, speeds: dict[str, float]) -> Cases:
    """Yields the cases. Those of the deterministic mode find tokens per second in `speeds`."""
    sizes = bench.sizes.engine
    yield "host time of decode steps", partial(_host_times, bench)
    with random_engine(bench, sizes.model) as (engine, num_bytes):
        copying, peak = bench.copy_bandwidth(), bench.matrix_peak()
        yield f"decode graphs of {sizes.name}", partial(_graphs, bench, engine)
        for batch in sizes.batches:
            yield (
                f"decode step of {sizes.name}, batch {batch}",
                partial(_decode_step, bench, engine, num_bytes, batch, copying),
            )
        case = f"prefill of {sizes.name}, prompts of {in_k(sizes.long_prompt_tokens)}"
        yield case, partial(_prefill, bench, case, engine, num_bytes, peak)
        yield "engine", partial(_throughput, bench, engine, num_bytes, copying, peak, speeds)


def deterministic_cases(bench: Bench, speeds: dict[str, float]) -> Cases:
    """Yields the cases of the deterministic mode, after those of the default one."""
    yield "engine, deterministic, and speculation", partial(_deterministic, bench, speeds)


def _graphs(bench: Bench, engine: LLM) -> list[Row]:
    """Returns the number of decode steps that are recorded. Raises `RuntimeError` unless all are:
    the engine serves without, two to three times as slowly."""
    recorded, expected = engine.core.facts.num_graphs, engine.core.facts.num_expected_graphs
    if not 0 < recorded == expected:
        raise RuntimeError(
            f"{recorded} of {expected} decode steps were recorded as CUDA graphs; the log says why"
        )
    case = f"decode graphs of {bench.sizes.engine.name}"
    return [Row(case, recorded, "graphs", "expected", expected, 1.0, None)]


def _host_times(bench: Bench) -> list[Row]:
    sizes = bench.sizes.engine
    with random_engine(bench, sizes.host_model, num_blocks=2**15) as (engine, _):
        times = {batch: _step_seconds(bench, engine, batch) * 1e3 for batch in sizes.host_batches}
    one, case = times[1], "host time of a decode step, batch"
    return [
        Row(f"{case} {batch}", took, "ms", "batch 1", one, one / took, None)
        for batch, took in times.items()
    ]


def _deterministic(bench: Bench, speeds: dict[str, float]) -> list[Row]:
    sizes = bench.sizes.engine
    prompts = [prompt_of(sizes, sizes.prompt_tokens, i) for i in range(sizes.num_speculating)]
    changes = {"deterministic": True, "max_drafts": sizes.max_drafts}
    with random_engine(bench, sizes.model, **changes) as (engine, _):
        value = tokens_per_second(sizes, engine, sizes.num_prompts)
        speculation = speculation_rows(engine, prompts, sizes.output_tokens, bench.repeats)
    default = speeds.get("engine", float("nan"))  # its case may have failed
    case = "engine, deterministic"
    row = Row(case, value, "tokens/s", "engine", default, value / default, 0.7)
    return [row, *speculation]


def random_model(attention: str, shape: Mapping[str, Any], device: str) -> LlamaForCausalLM:
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
    bench: Bench, shape: Mapping[str, Any], **changes: Any
) -> Iterator[tuple[LLM, int]]:
    """Yields an engine and the bytes of the weights that a decode reads; closes the engine."""
    sizes, max_len = bench.sizes.engine, shape["max_position_embeddings"]
    config = EngineConfig(
        device=bench.device.name,
        dtype="bfloat16",
        max_num_seqs=sizes.num_prompts,
        max_num_batched_tokens=sizes.max_step_tokens,
        max_model_len=max_len,
        prefix_caching=False,
        gpu_memory_utilization=0.8,
        **changes,
    )
    hook = AttentionHook(max_len)
    model = random_model(hook.name, shape, bench.device.name)
    embedding = model.model.embed_tokens.weight.numel()
    num_weights = sum(p.numel() for p in model.parameters()) - embedding
    engine = bench.device.engine(model, hook, config)
    del model
    try:
        yield engine, num_weights * 2
    finally:
        engine.close()


def prompt_of(sizes: EngineSizes, length: int, seed: int) -> tuple[int, ...]:
    """Returns a prompt of random tokens."""
    tokens = np.random.default_rng(seed).integers(0, sizes.model["vocab_size"], length)
    return tuple(tokens.tolist())


def _start(sizes: EngineSizes, engine: LLM, count: int, length: int, max_tokens: int) -> None:
    """Adds requests, after it has ended those of a case that failed."""
    _end(engine, sizes.num_prompts)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=False)
    for i in range(count):
        prompt = prompt_of(sizes, length, i)
        engine.core.add(EngineRequest(str(i), prompt, params, length))


def _end(engine: LLM, count: int) -> None:
    engine.core.scheduler.abort(*map(str, range(count)))
    while engine.core.has_work:
        engine.core.step()


def _step_seconds(
    bench: Bench, engine: LLM, batch: int, between: Callable[[], object] = lambda: None
) -> float:
    """Returns the median of a decode step's seconds; calls `between` after each measurement."""
    sizes = bench.sizes.engine
    num_steps = sizes.num_steps
    _start(sizes, engine, batch, sizes.context, num_steps * (3 + 2 * bench.repeats))
    while (
        engine.core.scheduler.stats().num_step_tokens != batch
        or engine.core.scheduler.stats().num_waiting
    ):
        step(engine)
        if not engine.core.has_work:
            raise RuntimeError(f"{batch} sequences never decode at once; expected memory for them")
    for _ in range(num_steps // 2):
        step(engine)
    times = []
    for _ in range(bench.repeats):
        bench.device.wait()
        start = time.perf_counter()
        for _ in range(num_steps):
            step(engine)
        times.append((time.perf_counter() - start) / num_steps)
        bench.device.wait()
        between()
    _end(engine, batch)
    return statistics.median(times)


def _decode_step(
    bench: Bench, engine: LLM, num_bytes: int, batch: int, copying: Callable[[], float]
) -> list[Row]:
    sizes = bench.sizes.engine
    ceilings: list[float] = []
    seconds = _step_seconds(bench, engine, batch, lambda: ceilings.append(copying()))
    num_tokens = sizes.context + 4 * sizes.num_steps  # about those of the middle measurement
    read = num_bytes + batch * num_tokens * sizes.attention.token_bytes
    value, ceiling = read / seconds, statistics.median(ceilings)
    case = f"decode step of {sizes.name}, batch {batch}"
    return [Row(case, value / 1e9, "GB/s", "device copy", ceiling / 1e9, value / ceiling, 0.75)]


def _prefill(
    bench: Bench, case: str, engine: LLM, num_bytes: int, peak: Callable[[], float]
) -> list[Row]:
    sizes = bench.sizes.engine
    length, count = sizes.long_prompt_tokens, sizes.num_long_prompts
    operations = count * sizes.prefill_operations(num_bytes, length)
    values, peaks = [], []
    for attempt in range(bench.repeats + 1):
        _start(sizes, engine, count, length, 1)
        bench.device.wait()
        start = time.perf_counter()
        while engine.core.has_work:
            step(engine)
        bench.device.wait()
        if attempt:  # the first compiles
            values.append(operations / (time.perf_counter() - start))
            peaks.append(peak())
    value, ceiling = statistics.median(values), statistics.median(peaks)
    return [
        Row(case, value / 1e12, "TFLOP/s", "bf16 product", ceiling / 1e12, value / ceiling, 0.6)
    ]


def _throughput(
    bench: Bench,
    engine: LLM,
    num_bytes: int,
    copying: Callable[[], float],
    peak: Callable[[], float],
    speeds: dict[str, float],
) -> list[Row]:
    """Returns the tokens per second, and what they were if prompts were computed at the peak and
    decode steps read at the pace of a copy."""
    sizes = bench.sizes.engine
    count, length, num_tokens = sizes.num_prompts, sizes.prompt_tokens, sizes.output_tokens
    value = speeds["engine"] = tokens_per_second(sizes, engine, count)
    kv_bytes = count * (length + num_tokens / 2) * sizes.attention.token_bytes
    decoding = num_tokens * (num_bytes + kv_bytes) / copying()
    prefilling = count * sizes.prefill_operations(num_bytes, length) / peak()
    ceiling = count * num_tokens / (decoding + prefilling)
    case = f"engine, {count} prompts of {length}"
    return [Row(case, value, "tokens/s", "copy and product", ceiling, value / ceiling, None)]


def tokens_per_second(sizes: EngineSizes, engine: LLM, num_prompts: int) -> float:
    """Returns those of the second pass of two: the first compiles."""
    elapsed = 0.0
    for _ in range(2):
        _start(sizes, engine, num_prompts, sizes.prompt_tokens, sizes.output_tokens)
        start = time.perf_counter()
        while engine.core.has_work:
            step(engine)
        elapsed = time.perf_counter() - start
    return num_prompts * sizes.output_tokens / elapsed
