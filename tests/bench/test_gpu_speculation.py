"""Speculation as the benchmark of a GPU measures it, on a CPU."""

import pytest

from baton.engine import LLM, EngineConfig
from baton.models import locate
from bench.gpu.speculation import speculation_rows

PROMPTS = [(5, 6, 7, 8, 9), (40, 41, 42)]


@pytest.mark.parametrize(("max_drafts", "are_drafted"), [(4, True), (0, False)])
def test_speculation_benchmark_drafts_right_and_wrong(max_drafts: int, are_drafted: bool) -> None:
    config = EngineConfig(device="cpu", dtype="float32", num_blocks=64, max_drafts=max_drafts)
    with LLM.from_pretrained(locate("tiny"), config) as engine:
        right, wrong = speculation_rows(engine, PROMPTS, max_tokens=12, repeats=1)
        stats = engine.core.scheduler.stats()
    assert right.case == "speculation, 2 sequences, all drafts right"
    assert right.reference == wrong.reference > 0
    assert (stats.num_drafted_tokens > stats.num_accepted_tokens > 0) == are_drafted
