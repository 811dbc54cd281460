"""Requests that overflow on our kernels: others get what torch's attention gives them."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.errors import NonFiniteError
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import save_random
from tests.support.engine.overflow import OVERFLOWING, BrokenDrafter, make_overflow
from tests.support.kernels.engine_families import FAMILIES

SHARED = tuple(range(20, 44))
OTHERS = {"shares": (*SHARED, 50, 51), "begins so": (*SHARED[:9], 52), "alone": (60, 61, 62)}
# In the middle of a prompt whose beginning others share, at its end, and where it begins.
BROKEN = {
    "middle": (*SHARED, 70, OVERFLOWING, 71, 72),
    "end": (*SHARED[:17], OVERFLOWING),
    "beginning": (OVERFLOWING, 80, 81),
}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


CROWDED, FP8 = {"max_num_seqs": 128, "num_blocks": 400}, {"kv_cache_dtype": "fp8_e4m3"}


def crowd(count: int) -> dict[str, tuple[int, ...]]:
    """As many short prompts as there is room for in a step beside others."""
    room = range(count - len(BROKEN | OTHERS))
    return {f"one of {count} {i}": (*SHARED[: i % 20], 40 + i % 60, 30) for i in room}


def answers(engine: LLM, prompts: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """The tokens of requests that are there at once; those that fail have none."""
    for name, prompt in prompts.items():
        engine.core.add(EngineRequest(name, prompt, PARAMS, len(prompt)))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.core.has_work:
        output = engine.core.step()
        for update in output.updates:
            if update.token_id is not None:
                tokens[update.request_id].append(update.token_id)
        for name, error in output.failed.items():
            assert isinstance(error, NonFiniteError)
            assert not tokens[name]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {"max_drafts": 2}, id="llama-drafts"),
        pytest.param("qwen3", {"deterministic": True}, id="deterministic"),
        pytest.param("mistral", {"max_num_batched_tokens": 24}, id="window-chunks"),
        pytest.param("gemma2", {}, id="written-apart", marks=pytest.mark.nightly),
        pytest.param("llama", CROWDED, id="crowd", marks=pytest.mark.nightly),
        pytest.param("llama", {**CROWDED, **FP8}, id="crowd-fp8", marks=pytest.mark.nightly),
    ],
)
def test_overflow_on_kernels_changes_no_other_request(
    load: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    save_random(FAMILIES[family](), tmp_path)
    make_overflow(tmp_path)
    path = str(tmp_path)
    others = OTHERS | crowd(changes.get("max_num_seqs", 0))
    plain = {key: changes[key] for key in (CROWDED | FP8).keys() & changes.keys()}
    expected = answers(load(path, **plain, kernels="torch", device="cpu"), others)
    engine = load(path, **changes)
    engine.core.drafter = BrokenDrafter()
    assert answers(engine, BROKEN | others) == expected | {name: [] for name in BROKEN}
    assert engine.core.scheduler.stats().num_non_finite_requests == len(BROKEN)
