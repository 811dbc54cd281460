"""Engines of small checkpoints, and what every test asks of their results."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.core import assembly
from baton.engine.core.assembly import LoadedModel
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM, GenerationResult
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest
from baton.sampling import SamplingParams

MAX_STEPS = 5000


def config_of(**changes: object) -> EngineConfig:
    """Returns the config of an engine on the CPU in float32, with 96 blocks in each pool, none of
    them held free."""
    settings: dict[str, object] = {
        "device": "cpu", "dtype": "float32", "num_blocks": 96, "free_block_margin": 0.0,
    }  # fmt: skip
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def load(path: str, kind: type[EngineCore] = EngineCore, **changes: object) -> LLM:
    """An engine of `config_of` these changes, whose core is of this kind."""
    return LLM(kind.from_pretrained(path, config_of(**changes)))


def load_parts(path: str, **changes: object) -> tuple[EngineConfig, LoadedModel]:
    """The parts of an engine of `config_of` these changes, as its constructor takes them."""
    config = config_of(**changes)
    return config, assembly.load(path, config, lambda _phase, _fraction: None)


def mostly_slow(values: Iterable[object], *quick: object) -> list[Any]:
    """Parameters of which only the quick ones are in the short run of the tests."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def tokens(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    """The first completion of each."""
    return [r.token_ids for r in results]


def assert_idle(engine: LLM) -> None:
    engine.core.scheduler.check_integrity()
    assert engine.core.scheduler.stats().num_held_blocks == 0
    assert not engine.core.has_work


def request(
    request_id: str, prompt: Sequence[int], params: SamplingParams, **changes: Any
) -> EngineRequest:
    return EngineRequest(request_id, tuple(prompt), params, len(prompt), **changes)


def drain(engine: LLM, *, checked: bool = True) -> dict[str, list[SequenceUpdate]]:
    """Steps until nothing is left to do; the updates of each request.

    Asserts after every step that tables, counts and places agree.
    """
    updates: dict[str, list[SequenceUpdate]] = {}
    for _ in range(MAX_STEPS):
        if not engine.core.has_work:
            return updates
        for update in engine.core.step().updates:
            updates.setdefault(update.request_id, []).append(update)
        if checked:
            engine.core.scheduler.check_integrity()
    raise AssertionError(f"still not done after {MAX_STEPS} steps: {engine.core.scheduler.stats()}")


def answers(
    engine: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[list[SequenceUpdate]]:
    """Returns the updates of each prompt. Its request is named by its index."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, of_one) in enumerate(zip(prompts, each, strict=True)):
        engine.core.add(request(str(i), prompt, of_one))
    updates = drain(engine)
    return [updates[str(i)] for i in range(len(prompts))]


def output_of(updates: Sequence[SequenceUpdate]) -> dict[int, tuple[int, ...]]:
    """The tokens of each sequence by its index. Asserts that positions count up, and that each
    sequence ends once, with its last update."""
    out: dict[int, list[int]] = {}
    ended: set[int] = set()
    for update in updates:
        assert update.index not in ended, "an update behind the end"
        if update.token_id is not None:
            of_one = out.setdefault(update.index, [])
            assert update.position == len(of_one), "a position twice, or left out"
            of_one.append(update.token_id)
        if update.finish_reason is not None:
            ended.add(update.index)
    assert ended == out.keys(), "a sequence that never ended, or without a token"
    return {index: tuple(out[index]) for index in sorted(out)}


_said: dict[tuple[object, ...], tuple[int, ...]] = {}


def alone(
    engine: LLM, prompt: tuple[int, ...], params: SamplingParams, count: int
) -> dict[int, tuple[int, ...]]:
    """Returns what `count` requests of one sequence say, one after the other. Remembered."""
    for index in range(count):
        key = (engine.core.facts.info.fingerprint, prompt, params, index)
        if key not in _said:
            one = EngineRequest("alone", prompt, params, len(prompt), sequence_index=index)
            engine.core.add(one)
            _said[key] = output_of(drain(engine, checked=False)["alone"])[index]
    return {i: _said[engine.core.facts.info.fingerprint, prompt, params, i] for i in range(count)}
