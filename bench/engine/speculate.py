"""Gain of speculation by prompt lookup: tokens per second with and without, same tokens.

The shipped model, one sequence and eight at once. Repetitive text: a prompt that repeats a list of
assignments, continued greedily. Free text: prompts of ordinary code, continued by sampling at
temperature 1, where little repeats. Both sides give the same tokens, sampled ones too, which is
asserted. The last column of each case is the ratio; the drafts that were right are in its name.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine import LLM, EngineConfig, SamplingParams
from baton.models import locate
from bench.report import Row, interleaved

MAX_DRAFTS = 6
MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    prompts: list[str]
    params: SamplingParams


def run(repeats: int) -> list[Row]:
    """Tokens per second with drafts, against the same engine without."""
    plain, guessing = _engine(0), _engine(MAX_DRAFTS)
    rows = []
    for case in _cases():
        expected = _tokens(plain, case)
        assert _tokens(guessing, case) == expected, "drafts have changed the output"
        before = guessing.core.scheduler.stats()
        contenders: dict[str, Callable[[], float]] = {
            "with": lambda case=case: _rate(guessing, case),  # type: ignore[misc]
            "without": lambda case=case: _rate(plain, case),  # type: ignore[misc]
        }
        rates = interleaved(contenders, repeats)
        stats = guessing.core.scheduler.stats()
        drafted = stats.num_drafted_tokens - before.num_drafted_tokens
        accepted = stats.num_accepted_tokens - before.num_accepted_tokens
        rows.append(
            Row(
                f"{case.name} ({accepted} of {drafted} drafts right)",
                rates["with"],
                "tokens/s",
                "without drafts",
                rates["without"],
                rates["with"] / rates["without"],
                None,
            )
        )
    return rows


def _cases() -> list[_Case]:
    repetitive = "\n".join(
        f"        self.{name} = {name}" for name in ("name", "value", "path", "mode") * 4
    )
    code = [
        f"def {name}(self, {argument}):\n    "
        for name, argument in (
            ("read", "path"), ("close", "force"), ("append", "item"), ("parse", "text"),
            ("find", "key"), ("write", "data"), ("reset", "state"), ("open", "mode"),
        )
    ]  # fmt: skip
    greedy = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    sampled = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    classes = [f"class C{i}:\n    def __init__(self):\n{repetitive}\n" for i in range(8)]
    return [
        _Case("repetitive, 1 sequence", classes[:1], greedy),
        _Case("repetitive, 8 sequences", classes, greedy),
        _Case("free, 1 sequence", code[:1], sampled),
        _Case("free, 8 sequences", code, sampled),
    ]


def _engine(max_drafts: int) -> LLM:
    config = EngineConfig(
        device="cpu", dtype="float32", num_blocks=512, prefix_caching=False, max_drafts=max_drafts
    )
    return LLM.from_pretrained(locate("tiny"), config)


def _tokens(engine: LLM, case: _Case) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(case.prompts, case.params)]


def _rate(engine: LLM, case: _Case) -> float:
    start = time.perf_counter()
    num_tokens = sum(map(len, _tokens(engine, case)))
    return num_tokens / (time.perf_counter() - start)
