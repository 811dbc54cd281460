"""Benchmark of a GPU on a CPU: attention over the layers of one pool; every case at small sizes."""

import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import ContinuousBatchingConfig

from baton.engine.executor.attention.library_choice import LIBRARIES
from bench.gpu import ceilings as gpu_ceilings
from bench.gpu import gpu
from bench.gpu.attention import (
    LayeredAttention,
    Step,
    decodes,
    gathered_prompt,
    libraries,
    library_prompt,
    prompt,
)
from bench.gpu.sizes import AttentionShape, EngineSizes, KernelSizes, Sizes
from bench.gpu.stages import read_benchmark, read_ceilings
from bench.gpu.summary import summary
from bench.stages import Findings, StageResult
from tests.support.kernels.attention_libraries import STAND_INS
from tests.support.kernels.cpu_device import CpuDevice
from tests.support.kernels.interpreter import IS_INTERPRETED

SHAPE = AttentionShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
EMULATED = pytest.mark.skipif(IS_INTERPRETED, reason="engines are slow in the interpreter")
MODEL = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
SMALL = Sizes(
    EngineSizes(
        name="tiny",
        model=MODEL,
        host_model=MODEL,
        host_batches=(1, 2),
        batches=(1, 3),
        context=20,
        num_steps=2,
        max_step_tokens=40,
        num_long_prompts=1,
        long_prompt_tokens=40,
        num_prompts=3,
        prompt_tokens=18,
        output_tokens=4,
        num_masked_prompts=2,
        num_speculating=2,
        max_drafts=2,
        generate_batch={
            "continuous_batching_config": ContinuousBatchingConfig(
                num_blocks=16, max_batch_tokens=64
            )
        },
    ),
    KernelSizes(
        attention=replace(SHAPE, num_layers=1, dtype=torch.bfloat16),
        tiled=replace(SHAPE, num_layers=1, dtype=torch.bfloat16, block_size=64),
        decodes={"2 ragged contexts": (20, 33)},
        prefills=(20,),
        prompt_tokens=70,
        library_contexts=(20, 20),
        copied_bytes=2**17,
        block_bytes=(2**14, 2**15),
        sampled_rows=2,
        vocab_size=1024,
        sdpa={"SDPA, cuDNN": (SDPBackend.MATH, 0.8), "SDPA, flash": (SDPBackend.MATH, 1.0)},
    ),
    copied_bytes=2**16,
    matrix_size=32,
)
COPY, PRODUCT = "device copy", "bf16 product"
# (case, against): aim, of each row.
ENGINES = {
    ("host time of a decode step, batch 1", "batch 1"): None,
    ("host time of a decode step, batch 2", "batch 1"): None,
    ("decode graphs of tiny", "expected"): None,
    ("decode step of tiny, batch 1", COPY): 0.75,
    ("decode step of tiny, batch 3", COPY): 0.75,
    ("prefill of tiny, prompts of 40", PRODUCT): 0.6,
    ("engine, 3 prompts of 18", "copy and product"): None,
    ("engine, deterministic", "engine"): 0.7,
    ("speculation, 2 sequences, all drafts right", "no drafts"): 2.5,
    ("speculation, 2 sequences, all drafts wrong", "no drafts"): 0.85,
    ("engine, 2 prompts of 18", "generate_batch"): 3,
}
KERNELS = {
    ("decode attention, 2 ragged contexts", COPY): 0.85,
    ("prefill attention, 20 tokens", "SDPA, cuDNN"): 0.8,
    ("prefill attention, 20 tokens", "SDPA, flash"): 1.0,
    ("prefill attention, 70 tokens by TMA, blocks of 64", "pointers"): None,
    ("prefill attention, 70 tokens by TMA, blocks of 64", "blocks of 16"): None,
    **{
        (case, library): None
        for library in LIBRARIES
        for case in ("decode attention, 2 contexts of 20", "prefill attention, 70 tokens")
    },
    ("cache write, 70 tokens", COPY): 0.9,
    ("block copy, blocks of 16 KiB", COPY): 0.9,
    ("block copy, blocks of 32 KiB", COPY): 0.9,
    ("sampling, 2 rows of 1k", COPY): 0.5,
}


class Attended:
    """Notes which layers of which pool are attended, and the outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[LayeredAttention] = []
        self.queries: list[torch.Tensor] = []
        self.outputs: dict[int, torch.Tensor] = {}
        made = LayeredAttention.step

        def step(layers: LayeredAttention, ragged) -> Step:
            attend = layers.attention.attend

            def noted(index, rule, query, batch):
                self.queries.append(query)
                self.outputs[index] = attend(index, rule, query, batch)
                return self.outputs[index]

            layers.attention.attend = noted  # type: ignore[method-assign]
            self.layers.append(layers)
            return made(layers, ragged)

        monkeypatch.setattr(LayeredAttention, "step", step)


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the attention of the last tokens of a sequence.

    K and V are `[num_kv_heads, length, head_dim]`.
    """
    num_queries, length = len(query), keys.shape[1]
    mask = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def test_benchmark_prompt_attends_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    last = prompt(SHAPE, 40, "cpu")()
    (layers,), query = attended.layers, attended.queries[0]
    assert [*attended.outputs] == [0, 1, 2]
    assert last is attended.outputs[2]
    for index, layer in enumerate(layers.cache.pools[0].layers):
        keys, values = (
            x[1:].transpose(0, 1).flatten(1, 2)[:, :40] for x in (layer.keys, layer.values)
        )
        expected = reference(query, keys, values)
        torch.testing.assert_close(attended.outputs[index], expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(attended.outputs[0], attended.outputs[1])


def test_benchmark_compares_descriptors_with_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    shape = replace(SHAPE, dtype=torch.bfloat16, block_size=128)
    outputs = []
    for make in (prompt, gathered_prompt):
        torch.manual_seed(0)
        outputs.append(make(shape, 200, "cpu")())
    assert torch.equal(*outputs)
    described = [[kv.descriptors is not None for kv in x.attention.paged] for x in attended.layers]
    assert described == [[True] * 3, [False] * 3]


def test_benchmark_decodes_read_all_blocks_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    contexts = [5, 33, 16]
    out = decodes(SHAPE, contexts, "cpu")()
    (layers,) = attended.layers
    assert out.shape == (3, SHAPE.num_heads, SHAPE.head_dim)
    assert [*attended.outputs] == [0, 1, 2]
    assert layers.num_blocks == 1 + 3 + 1
    assert layers.cache.layouts[0].block_bytes == SHAPE.token_bytes * SHAPE.block_size


@pytest.mark.parametrize("name", LIBRARIES)
def test_benchmark_measures_libraries_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shape = replace(SHAPE, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, LIBRARIES[name].module, STAND_INS[name]())
    assert name in libraries(shape, "cpu")
    assert name not in libraries(SHAPE, "cpu")
    for make in (partial(prompt, shape, 20), partial(decodes, shape, [5, 33])):
        torch.manual_seed(0)
        ours = make("cpu")()
        torch.manual_seed(0)
        torch.testing.assert_close(make("cpu", name)(), ours, atol=2e-2, rtol=2e-2)


def test_benchmark_of_library_computes_as_many_layers() -> None:
    out = library_prompt(SHAPE, 8, SDPBackend.MATH, "cpu")()
    assert out.shape == (1, SHAPE.num_heads, 8, SHAPE.head_dim)


def test_benchmark_of_8b_has_its_operations_and_bytes() -> None:
    shape = AttentionShape()
    assert shape.token_bytes == 2**17
    assert shape.operations(1) == 32 * 4 * 4096


def cpu() -> CpuDevice:
    return CpuDevice(num_blocks=16)


def check_rows(file: Path, parts: list[str], expected: dict[tuple[str, str], float | None]) -> None:
    """Runs parts of the benchmark as a stage of `make gpu` does, and reads what it leaves."""
    with pytest.raises(SystemExit) as ended:
        gpu.main([str(file), "--repeats", "1", "--parts", *parts], cpu, SMALL)
    findings = read_benchmark(file)
    assert findings == Findings(findings.figures), "a case failed, or was left out"
    assert ended.value.code == 0
    rows = findings.figures["rows"]
    assert {(row["case"], row["against"]): row["aim"] for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert all(0 < row[name] < math.inf for name in ("value", "reference", "ratio")), row
    text = "\n".join(summary([StageResult("benchmark", 1, 1, findings.figures, ())]))
    for (case, against), aim in expected.items():
        assert aim is None or re.search(f"{case}: .* of {against}, aim {aim:g}\n", text)


@EMULATED
def test_benchmark_measures_every_case_of_engines(tmp_path: Path) -> None:
    check_rows(tmp_path / "report.json", ["engine", "deterministic", "generate_batch"], ENGINES)


@EMULATED
def test_benchmark_measures_every_case_of_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, library in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, library.module, STAND_INS[name]())
    check_rows(tmp_path / "report.json", ["kernels"], KERNELS)


@EMULATED
def test_benchmark_fails_a_case_without_memory_and_goes_on(tmp_path: Path) -> None:
    file, sizes = tmp_path / "report.json", replace(SMALL.engine, batches=(3, 1))
    with pytest.raises(SystemExit) as ended:
        gpu.main(
            [str(file), "--repeats", "1", "--parts", "engine"],
            lambda: CpuDevice(num_blocks=4),
            replace(SMALL, engine=sizes),
        )
    findings = read_benchmark(file)
    assert ended.value.code == 1
    assert any("batch 3" in failure for failure in findings.failures)
    assert "decode step of tiny, batch 1" in [row["case"] for row in findings.figures["rows"]]


def test_ceilings_of_device_are_in_the_summary(tmp_path: Path) -> None:
    file = tmp_path / "ceilings.json"
    gpu_ceilings.main(file, cpu, SMALL)
    findings = read_ceilings(file)
    lines = summary([StageResult("ceilings", 1, 1, findings.figures, ())])
    assert lines[1].startswith("ceilings    emulated GPU, torch ")
