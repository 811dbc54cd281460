"""Speculation of an engine whose outputs do not depend on drafts, bit for bit: tokens per second if
all drafts are right, and if none is, against the same engine without drafts."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from baton.engine import LLM, SamplingParams
from baton.engine.outputs import StepOutput
from baton.engine.request import EngineRequest
from baton.engine.scheduler.sequences.prompt_lookup import DraftRequest, TokenArray
from bench.report import Row, interleaved

# Of 4 right drafts a step has 5 tokens, and is not launched ahead.
_AIM_RIGHT = 2.5
# Wrong drafts become few: one in 8 tokens.
_AIM_WRONG = 0.85

Prompts = Mapping[str, tuple[int, ...]]
Outputs = Mapping[str, TokenArray]


class ShiftedDrafter:
    """Drafts what is known to come, plus `shift`: every draft is right if it is 0, else none is."""

    def __init__(self, prompts: Prompts, outputs: Outputs, shift: int, vocab_size: int) -> None:
        self._prompts = prompts
        self._outputs = outputs
        self._shift = shift
        self._vocab_size = vocab_size

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        return [self._after(request) for request in requests]

    def _after(self, request: DraftRequest) -> TokenArray:
        name = request.sequence_id.rsplit(".", 1)[0]
        done = len(request.token_ids) - len(self._prompts[name])
        following = self._outputs[name][done : done + request.max_drafts]
        return (following + np.int32(self._shift)) % np.int32(self._vocab_size)


def speculation_rows(
    engine: LLM, prompts: Sequence[tuple[int, ...]], max_tokens: int, repeats: int
) -> list[Row]:
    """Measures `prompts` at once; the engine has `max_drafts`."""
    named = {str(i): prompt for i, prompt in enumerate(prompts)}
    outputs = _outputs(engine, named, max_tokens, speculate=False)

    def rate(shift: int | None) -> float:
        if shift is not None:
            vocab_size = engine.core.facts.info.vocab_size
            engine.core.drafter = ShiftedDrafter(named, outputs, shift, vocab_size)
        start = time.perf_counter()
        found = _outputs(engine, named, max_tokens, speculate=shift is not None)
        seconds = time.perf_counter() - start
        assert all(np.array_equal(found[name], outputs[name]) for name in named), "drafts matter"
        return sum(map(len, found.values())) / seconds

    contenders: dict[str, Callable[[], float]] = {
        "without": lambda: rate(None),
        "right": lambda: rate(0),
        "wrong": lambda: rate(1),
    }
    rates = interleaved(contenders, repeats)
    without = rates["without"]
    case = f"speculation, {len(prompts)} sequences, all drafts "
    return [
        Row(case + name, rates[name], "tokens/s", "no drafts", without, rates[name] / without, aim)
        for name, aim in (("right", _AIM_RIGHT), ("wrong", _AIM_WRONG))
    ]


def _outputs(engine: LLM, prompts: Prompts, max_tokens: int, *, speculate: bool) -> Outputs:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=speculate)
    for name, prompt in prompts.items():
        engine.core.add(EngineRequest(name, prompt, params, len(prompt)))
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.core.has_work:
        for update in step(engine).updates:
            if update.token_id is not None:
                outputs[update.request_id].append(update.token_id)
    return {name: np.array(tokens, np.int32) for name, tokens in outputs.items()}


def step(engine: LLM) -> StepOutput:
    """Runs a step. Raises the error of a request that has failed, as of one without memory."""
    output = engine.core.step()
    for error in output.failed.values():
        raise error
    return output
