"""The engine on a GPU, with a random model of the shape of Llama 3 8B, against what the GPU can do
and against transformers on the same weights."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from baton.engine import EngineConfig, SamplingParams
from baton.engine.assembly import assemble
from baton.engine.engine import Engine
from baton.engine.messages import EngineRequest
from baton.engine.models.transformers_model import AttentionHook
from bench.gpu_timing import copy_bandwidth, matrix_peak, seconds
from bench.report import Row

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
_CONTEXT = 512
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2  # of KV, over all layers
_NUM_PROMPTS, _PROMPT, _OUTPUT = 256, 512, 256


def rows(repeats: int) -> Iterator[list[Row]]:
    """Case by case, so that what is done is kept when a later one fails."""
    engine, num_weights = _engine()
    copying, peak = copy_bandwidth(), matrix_peak()
    for batch in (1, 16, 64, 256):
        yield [_decode_step(engine, num_weights, batch, copying, repeats)]
    yield [_prefill(engine, num_weights, peak, repeats)]
    default = _tokens_per_second(engine)
    _close(engine)
    del engine
    _collect()
    deterministic, _ = _engine(deterministic=True)
    invariant = _tokens_per_second(deterministic)
    _close(deterministic)
    del deterministic
    _collect()
    yield [
        Row(
            "engine, deterministic",
            invariant,
            "tokens/s",
            "engine",
            default,
            invariant / default,
            0.7,
        )
    ]
    theirs = _generate_batch()
    yield [
        Row(
            "engine, 256 prompts of 512",
            default,
            "tokens/s",
            "generate_batch",
            theirs,
            default / theirs,
            3,
        )
    ]


def _model(attention: str) -> LlamaForCausalLM:
    """Random weights, made where they stay."""
    config = LlamaConfig(**_SHAPE, attn_implementation=attention, dtype="bfloat16")
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


def _engine(**changes: Any) -> tuple[Engine, int]:
    """And the bytes of the weights that a decode reads."""
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=_NUM_PROMPTS,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        prefix_caching=False,
        gpu_memory_utilization=0.8,
        **changes,
    )
    hook = AttentionHook(16384)
    model = _model(hook.name)
    embedding = model.model.embed_tokens.weight.numel()
    num_weights = sum(p.numel() for p in model.parameters()) - embedding
    return Engine(config, assemble(model, hook, config, "", "random 8B")), num_weights * 2


def _close(engine: Engine) -> None:
    engine.close()


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 128000, length).tolist())


def _start(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for i in range(count):
        engine.add_request(EngineRequest(str(i), _prompt(length, i), params, length))


def _decode_step(
    engine: Engine, num_weights: int, batch: int, copying: Callable[[], float], repeats: int
) -> Row:
    _start(engine, batch, _CONTEXT, 16 + 32 * (repeats + 1))
    while engine.stats().num_step_tokens != batch or engine.stats().num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    times, ceilings = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(16):
            engine.step()
        times.append((time.perf_counter() - start) / 16)
        torch.cuda.synchronize()
        ceilings.append(copying())
    engine.abort(*map(str, range(batch)))
    while engine.has_work:
        engine.step()
    num_bytes = num_weights + batch * (_CONTEXT + 64) * _TOKEN_BYTES
    value, ceiling = num_bytes / statistics.median(times), statistics.median(ceilings)
    case = f"decode step of 8B, batch {batch}"
    return Row(case, value / 1e9, "GB/s", "device copy", ceiling / 1e9, value / ceiling, 0.75)


def _prefill(engine: Engine, num_weights: int, peak: Callable[[], float], repeats: int) -> Row:
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
    return Row(case, value / 1e12, "TFLOP/s", "bf16 product", ceiling / 1e12, value / ceiling, 0.6)


def _tokens_per_second(engine: Engine) -> float:
    """The second pass of two: the first compiles."""
    elapsed = 0.0
    for _ in range(2):
        _start(engine, _NUM_PROMPTS, _PROMPT, _OUTPUT)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        elapsed = time.perf_counter() - start
    return _NUM_PROMPTS * _OUTPUT / elapsed


def _generate_batch() -> float:
    model = _model("sdpa")
    config = GenerationConfig(
        do_sample=False, max_new_tokens=_OUTPUT, eos_token_id=-1, pad_token_id=0
    )
    prompts = [list(_prompt(_PROMPT, i)) for i in range(_NUM_PROMPTS)]

    def generate(some: list[list[int]]) -> None:
        model.generate_batch(inputs=some, generation_config=config)

    generate(prompts[:8])
    return _NUM_PROMPTS * _OUTPUT / seconds(lambda: generate(prompts), 1)
