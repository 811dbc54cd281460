"""Whole engines on our kernels: token for token what torch's attention and products give, replayed
from recorded steps or not; and, in the deterministic mode, bit for bit the same in any batch."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import baton.models
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.attention.static_batch import StaticTritonBatch
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.models.cuda_graphs import NO_GRAPHS, DecodeGraphs, Step, capture_sizes
from baton.engine.executor.models.triton.triton_model import TritonModel
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.checkpoints import save_random
from tests.support.engine.drafts import OracleDrafter
from tests.support.engine.oracle import Oracle
from tests.support.engine.quantisation import add_scales, decided
from tests.support.kernels.engine_families import (
    COMMON,
    GREEDY,
    KNOWN,
    PROMPTS,
    QUANTIZED,
    VOCAB_SIZE,
    tokens,
)

torch.set_num_threads(1)

LENGTHS = tuple(map(len, PROMPTS))
# By layer, for K and V: some numbers are clipped, and some are subnormal.
SCALES = {
    (layer, kind): torch.tensor(scale)
    for layer, kind, scale in ((0, "k", 0.005), (0, "v", 0.3), (1, "k", 1.7), (1, "v", 0.02))
}
SCALE_NAME = "model.layers.{layer}.self_attn.{kind}_scale"
SMOKE, SLOW, NIGHTLY = pytest.mark.smoke, pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=SMOKE if f == "llama" else NIGHTLY) for f in (*KNOWN, *QUANTIZED)],
)
def test_triton_engine_gives_the_tokens_of_torch(folder: Any, load: Any, family: str) -> None:
    engine = load(folder(family), max_num_batched_tokens=24)
    assert isinstance(engine.core.runner.attention, TritonAttention)
    assert isinstance(engine.core.runner.model, TritonModel)
    assert tokens(engine) == tokens(load(folder(family), kernels="torch", device="cpu"))


@SLOW
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_triton_experts_give_the_tokens_of_transformers(
    folder: Any, load: Any, family: str
) -> None:
    path, oracle = folder(family), Oracle()
    engine = load(path, deterministic=True, max_num_batched_tokens=24)
    assert isinstance(engine.core.runner.model, TritonModel)
    assert tokens(engine) == [oracle(path, prompt, GREEDY.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("family", "deterministic"),
    [
        pytest.param("llama", False, marks=SLOW),
        pytest.param("gemma2", False, marks=NIGHTLY),
        pytest.param("gpt_oss", False, marks=NIGHTLY),
        pytest.param("qwen3", True, marks=NIGHTLY),
    ],
)
def test_triton_fp8_cache_gives_tokens_over_rounded_kv(
    folder: Any, load: Any, tmp_path: Path, family: str, deterministic: bool
) -> None:
    path = add_scales(folder(family), tmp_path / "scaled", SCALES, SCALE_NAME)
    expected = decided(path, LENGTHS, GREEDY.max_tokens, SCALES, VOCAB_SIZE)
    settings = {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 24}
    engine = load(path, **settings, deterministic=deterministic)
    assert engine.core.cache.layouts[0].dtype == "float8_e4m3fn"
    assert isinstance(engine.core.runner.attention, TritonAttention)
    for one in (engine, load(path, **settings, kernels="torch", device="cpu")):
        results = one.generate([*expected], GREEDY)
        assert [r.token_ids for r in results] == [e.token_ids for e in expected.values()]


@SLOW
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": True, "top_logprobs": 2},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
    ],
)
def test_triton_draws_equal_those_of_torch(folder: Any, load: Any, changes: dict[str, Any]) -> None:
    params = [replace(GREEDY, seed=i, **changes) for i in range(3)] + [GREEDY]
    engines = load(folder("llama")), load(folder("llama"), kernels="torch", device="cpu")
    drawn, expected = (engine.generate(PROMPTS, params) for engine in engines)
    assert [r.token_ids for r in drawn] == [r.token_ids for r in expected]


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "logit_bias": ((9, 2.5), (30, -4.0))},
    {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.3, "seed": 4},
    {"bad_token_ids": ((5,), (7, 8), (1, 2, 3)), "min_tokens": 4, "stop_token_ids": (*range(64),)},
    {"temperature": 0.7, "top_k": 20, "seed": 1},
]


def generate(engine: LLM, params: list[SamplingParams]) -> tuple[list[tuple[int, ...]], int]:
    """The outputs, and after how many steps another was under way already."""
    outputs: dict[str, list[int]] = {}
    for i, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.core.add(EngineRequest(str(i), tuple(prompt), each, len(prompt)))
    num_ahead = 0
    for _ in range(100):
        if not engine.core.has_work:
            return [tuple(outputs[str(i)]) for i in range(len(PROMPTS))], num_ahead
        for update in engine.core.step().updates:
            if update.token_id is not None:
                outputs.setdefault(update.request_id, []).append(update.token_id)
        num_ahead += engine.core.is_ahead
    raise AssertionError("still not done after 100 steps")


@SLOW
def test_triton_async_steps_apply_processors_as_torch(folder: Any, load: Any) -> None:
    """Penalties and banned sequences look at tokens that the host has not seen then."""
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **changes) for changes in RULES]
    engine = load(folder("llama"), async_scheduling=True, max_num_batched_tokens=24)
    found, num_ahead = generate(engine, params)
    expected = load(folder("llama"), kernels="torch", device="cpu").generate(PROMPTS, params)
    assert found == [result.token_ids for result in expected]
    assert num_ahead >= 4


@pytest.fixture(scope="session")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint with the tokenizer of the shipped model."""
    path = tmp_path_factory.mktemp("with_tokenizer")
    config = {**COMMON, "vocab_size": 3072, "num_hidden_layers": 1, "eos_token_id": [0, 2]}
    save_random(transformers.LlamaConfig(**config), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(baton.models.locate("tiny"), name), path)
    return str(path)


@SLOW
def test_triton_engine_follows_grammars_as_torch(with_tokenizer: str, load: Any) -> None:
    """Beside others that look at their tokens; with a grammar among them steps wait."""
    pytest.importorskip("llguidance")
    digits, words = (
        Grammar(GrammarKind.REGEX, pattern) for pattern in ("[0-9]{3,5}", "(def|class) [a-z]{2,6}:")
    )
    params = [
        SamplingParams(max_tokens=6, grammar=digits),
        SamplingParams(max_tokens=8, grammar=words, temperature=1.0, seed=3, frequency_penalty=1.0),
        SamplingParams(max_tokens=5, ignore_eos=True, repetition_penalty=1.3),
        # All of the grammar's tokens are banned until the output is long enough.
        SamplingParams(max_tokens=4, grammar=Grammar(GrammarKind.REGEX, "a"), min_tokens=3),
    ]
    engine = load(with_tokenizer, async_scheduling=True)
    found, _ = generate(engine, params)
    expected = load(with_tokenizer, kernels="torch", device="cpu").generate(PROMPTS, params)
    assert found == [result.token_ids for result in expected]
    assert re.fullmatch("[0-9]{3,5}", engine.tokenizer.decode(found[0], skip_special_tokens=True))


class Rerun:
    """Records a step by noting it down; the output stays where it was at first."""

    def record(self, step: Step) -> Step:
        out = step()
        return lambda: out.copy_(step())


def max_blocks_of(engine: LLM) -> int:
    """Returns the most blocks of a sequence, and one for a step that begins within one."""
    facts = engine.core.facts
    return -(-facts.info.max_model_len // facts.block_size) + 1


@pytest.mark.parametrize(
    ("family", "asynchronous"),
    [
        pytest.param("llama", True, marks=[SMOKE, SLOW]),
        pytest.param("llama", False, marks=SLOW),
        pytest.param("mistral", True, marks=NIGHTLY),
        pytest.param("gpt_oss", True, marks=NIGHTLY),
    ],
)
@torch.inference_mode()
def test_triton_recorded_steps_give_equal_tokens(
    folder: Any, load: Any, device: str, family: str, asynchronous: bool, record_property: Any
) -> None:
    engine = load(
        folder(family), async_scheduling=asynchronous, max_num_seqs=3, cuda_graphs=device == "cuda"
    )
    runner = engine.core.runner
    if device == "cpu":
        batch = StaticTritonBatch(runner.attention, 3, max_blocks_of(engine))
        cpu = torch.device("cpu")
        runner.graphs = DecodeGraphs(runner.model.forward, batch, [1, 2, 3], cpu, Rerun())
    assert runner.graphs is not NO_GRAPHS
    record_property(f"recorded batch sizes of {family}", len(runner.graphs.sizes))
    assert tokens(engine) == tokens(load(folder(family), kernels="torch", device="cpu"))


def guess(engine: LLM, prompts: list[list[int]], outputs: list[tuple[int, ...]]) -> None:
    """Lets the engine's drafts come true, two of three."""
    names = [f"generate-{i}" for i in range(len(prompts))]
    lengths = dict(zip(names, map(len, prompts), strict=True))
    drafts = dict(zip(names, outputs, strict=True))
    engine.core.drafter = OracleDrafter(drafts, lengths, vocab_size=VOCAB_SIZE)


def record_drafts(engine: LLM, device: str) -> list[int]:
    """Has the engine replay its steps. Returns the most tokens of a sequence in each, once it has
    run."""
    runner = engine.core.runner
    if device == "cpu":
        sizes = capture_sizes(engine.core.config.max_num_seqs, 1 + engine.core.config.max_drafts)
        batch = StaticTritonBatch(runner.attention, sizes[-1], max_blocks_of(engine))
        cpu = torch.device("cpu")
        runner.graphs = DecodeGraphs(runner.model.forward, batch, sizes, cpu, Rerun())
    graphs, counts = runner.graphs, []
    assert graphs is not None
    replay = graphs.run

    def run(parts: Any, ragged: RaggedBatch, offsets: Any = None) -> torch.Tensor | None:
        logits = replay(parts, ragged, offsets)
        assert logits is not None, "a step does not fit"
        counts.append(int(ragged.num_queries.max()))
        return logits

    graphs.run = run  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=[SMOKE, SLOW]),
        pytest.param("mistral", marks=NIGHTLY),
        pytest.param("gpt_oss", marks=NIGHTLY),
    ],
)
@torch.inference_mode()
def test_triton_recorded_drafts_give_equal_tokens(
    folder: Any, load: Any, device: str, family: str
) -> None:
    """Accepted or not, beside sequences without any; sampled tokens, too."""
    params = [replace(GREEDY, max_tokens=8, temperature=i % 2, seed=i) for i in range(4)]
    params[1] = replace(params[1], speculate=False)
    plain = load(folder(family), kernels="torch", device="cpu")
    expected = [result.token_ids for result in plain.generate(PROMPTS, params)]
    settings = {"max_drafts": 4, "max_num_seqs": 3, "cuda_graphs": device == "cuda"}
    engine = load(folder(family), **settings)
    guess(engine, PROMPTS, expected)
    counts = record_drafts(engine, device)
    assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
    assert max(counts) > 2
    assert (
        engine.core.scheduler.stats().num_drafted_tokens
        > engine.core.scheduler.stats().num_accepted_tokens
        > 0
    )


@pytest.mark.gpu
def test_triton_engine_runs_a_forward_that_waits(
    folder: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a forward cannot be recorded; decodes run without graphs, and the GPU goes on."""
    forward = TritonModel.forward

    def wait(self: TritonModel, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        assert token_ids.sum().item() >= 0
        return forward(self, token_ids, *args)

    monkeypatch.setattr(TritonModel, "forward", wait)
    engine = load(folder("llama"), cuda_graphs=True)
    assert engine.core.runner.graphs is NO_GRAPHS
    assert engine.core.facts.num_graphs == 0 < engine.core.facts.num_expected_graphs
    assert tokens(engine) == tokens(load(folder("llama"), kernels="torch", device="cpu"))


@SLOW
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_swapped_blocks_keep_their_content(folder: Any, load: Any, dtype: str) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "preemption": "swap", "max_model_len": 64}
    settings["max_num_batched_tokens"] = 64
    prompts = [[i, *PROMPTS[1][1:]] for i in range(3)]  # a block each, and soon another
    engine = load(folder("llama"), **settings, num_blocks=4, swap_bytes=2**22)
    roomy = load(folder("llama"), **settings)
    results = [e.generate(prompts, GREEDY) for e in (engine, roomy)]
    assert results[0] == results[1]
    assert engine.core.scheduler.stats().num_swaps > 0


class Listening:
    """Notes the logits of one request's tokens, by position."""

    def __init__(self, engine: LLM, request_id: str) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        self._engine, self._request_id = engine, request_id
        self._forward = engine.core.runner.model.forward
        self._choose = engine.core.runner.head.sampler.choose
        engine.core.runner.head.sampler.choose = self.choose  # type: ignore[method-assign]

    def choose(
        self, logits: torch.Tensor, batch_slots: Any, indices: Any, lengths: Any, *rest: Any
    ) -> Any:
        requests = self._engine.core.scheduler.requests
        if self._request_id in requests:
            sequence = requests[self._request_id].sequences[0]
            for row, (batch_slot, length) in enumerate(
                zip(batch_slots.tolist(), lengths.tolist(), strict=True)
            ):
                if sequence.batch_slots is not None and batch_slot == sequence.batch_slot:
                    self.logits[length] = logits[row].clone()
        return self._choose(logits, batch_slots, indices, lengths, *rest)


@pytest.mark.usefixtures("_rows_are_computed_alike")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@NIGHTLY
@torch.inference_mode()
def test_deterministic_logits_are_equal_with_recorded_drafts(
    folder: Any, load: Any, device: str, dtype: str
) -> None:
    path, prompts = folder("llama"), [PROMPTS[3], PROMPTS[1]]
    params = replace(GREEDY, max_tokens=6)
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "max_model_len": 112}
    plain = load(path, **settings)
    alone = Listening(plain, "generate-0")
    expected = [result.token_ids for result in plain.generate(prompts, params)]
    graphs = device == "cuda"
    engine = load(path, **settings, max_drafts=4, max_num_seqs=2, cuda_graphs=graphs)
    guess(engine, prompts, expected)
    counts, drafted = record_drafts(engine, device), Listening(engine, "generate-0")
    assert [result.token_ids for result in engine.generate(prompts, params)] == expected
    assert max(counts) > 2
    assert engine.core.scheduler.stats().num_accepted_tokens > 0
    for length, logits in alone.logits.items():
        assert torch.equal(logits, drafted.logits[length]), f"at {length} tokens"


def logits_of(engine: LLM, others: list[list[int]]) -> dict[int, torch.Tensor]:
    """The logits of the longest prompt's tokens, in a batch with others."""
    listening = Listening(engine, "it")
    crowd = {f"other {i}": prompt for i, prompt in enumerate(others)}
    for name, prompt in {**crowd, "it": PROMPTS[3]}.items():
        engine.core.add(EngineRequest(name, tuple(prompt), GREEDY, len(prompt)))
    while engine.core.has_work:
        engine.core.step()
    return listening.logits


@pytest.mark.usefixtures("_rows_are_computed_alike")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param("llama", "float32", marks=NIGHTLY),
        pytest.param("llama", "bfloat16", marks=NIGHTLY),
        pytest.param("qwen3", "bfloat16", marks=NIGHTLY),
        pytest.param("mixtral", "float32", marks=NIGHTLY),
        pytest.param("mixtral", "bfloat16", marks=NIGHTLY),
        pytest.param("qwen3_moe", "bfloat16", marks=NIGHTLY),
        pytest.param("gpt_oss", "bfloat16", marks=NIGHTLY),
        pytest.param("llama in fp8", "float32", marks=NIGHTLY),
        pytest.param("qwen3 in gptq", "bfloat16", marks=NIGHTLY),
        pytest.param("mixtral in awq", "bfloat16", marks=NIGHTLY),
    ],
)
def test_deterministic_logits_are_equal_in_any_batch_or_chunking(
    folder: Any, load: Any, family: str, dtype: str
) -> None:
    """And through preemption: the third engine's pool is too small for all of the crowd."""
    path = folder(family)
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "max_model_len": 112}
    alone = logits_of(load(path, **settings, max_num_batched_tokens=64), [])
    assert len(alone) == GREEDY.max_tokens
    crowd = PROMPTS[:3]
    small = {"num_blocks": 7, "free_block_margin": 0, "prefix_caching": False}
    tight = load(path, **settings, max_num_batched_tokens=29, **small)
    for engine in (load(path, **settings, max_num_batched_tokens=13), tight):
        crowded = logits_of(engine, crowd)
        assert alone.keys() == crowded.keys()
        for length, logits in alone.items():
            assert torch.equal(logits, crowded[length]), f"at {length} tokens"
    assert tight.core.scheduler.stats().num_preemptions > 0


def test_deterministic_mode_rejects_unsupported_models_by_name(folder: Any, load: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="of Gemma2ForCausalLM there is no form whose"):
        load(folder("gemma2"), deterministic=True)
