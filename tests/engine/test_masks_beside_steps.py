"""Grammar masks that are computed beside the steps: other sequences do not wait for them."""

import threading

import pytest

from baton.engine.executor.grammar.masks import Mask
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.engines import assert_idle, drain, load

ROOM = {"num_blocks": 64, "block_size": 16}
PROMPT = (5, 6, 7)
FREE = SamplingParams(max_tokens=40, ignore_eos=True)
TOKEN = 9  # what each mask allows


class Slow:
    """A grammar of one token, again and again. Its first masks come at once, and take long."""

    def __init__(self, *, is_held: bool = True) -> None:
        self.may_go_on = threading.Event()
        if not is_held:
            self.may_go_on.set()

    def start(self, token_ids: tuple[int, ...] = (), field: str = "") -> "SlowState":
        assert not token_ids, field
        return SlowState(self.may_go_on)


class SlowState:
    failure: str | None = None
    is_finished = False
    mask_s = 1.0

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on = may_go_on
        self._has_begun = False

    def accept(self, token_id: int) -> bool:
        return token_id == TOKEN

    def fill_masks(self, drafts: list[int], rows: Mask) -> int:
        if self._has_begun:
            assert self._may_go_on.wait(60.0), "a step waits for it"
        self._has_begun = True
        rows[:] = 0
        rows[0, TOKEN // 32] = 1 << TOKEN % 32
        return 1 + len(drafts)


def add(engine: LLM, name: str, grammar: Slow, tenant: str = "") -> None:
    params = SamplingParams(max_tokens=5, grammar=Grammar(GrammarKind.REGEX, "a"))
    request = EngineRequest(name, PROMPT, params, len(PROMPT), tenant=tenant)
    engine.core.add(request, grammar)  # type: ignore[arg-type]


def told(engine: LLM, name: str, num_tokens: int) -> dict[str, list[int]]:
    """The tokens of all sequences once that of this name has so many."""
    tokens: dict[str, list[int]] = {name: []}
    for _ in range(10_000):
        for update in engine.core.step().updates:
            if update.token_id is not None:
                tokens.setdefault(update.request_id, []).append(update.token_id)
        if len(tokens[name]) >= num_tokens:
            return tokens
    raise AssertionError(f"{name} has {len(tokens[name])} tokens of {num_tokens}")


def rest(engine: LLM, name: str) -> list[int]:
    """The tokens of a sequence that are left, once all have ended."""
    return [u.token_id for u in drain(engine)[name] if u.token_id is not None]


@pytest.mark.parametrize("ahead", [False, True])
def test_slow_mask_delays_its_own_sequence_alone(checkpoints, ahead):
    engine = load(checkpoints["tiny"], **ROOM, async_scheduling=ahead)
    (alone,) = engine.generate([PROMPT], FREE)
    slow = Slow()
    add(engine, "slow", slow)
    engine.core.add(EngineRequest("free", PROMPT, FREE, len(PROMPT)))
    tokens = told(engine, "free", 40)
    assert tokens == {"free": list(alone.token_ids), "slow": [TOKEN]}
    slow.may_go_on.set()
    assert rest(engine, "slow") == [TOKEN] * 4
    assert_idle(engine)


def test_slow_masks_of_one_tenant_leave_a_thread_to_others(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM)
    slow = Slow()
    for i in range(3):
        add(engine, f"a{i}", slow, "a")
    add(engine, "b", Slow(is_held=False), "b")
    engine.core.add(EngineRequest("free", PROMPT, FREE, len(PROMPT)))
    assert told(engine, "b", 5)["b"] == [TOKEN] * 5
    slow.may_go_on.set()
    assert rest(engine, "a2") == [TOKEN] * 4
    assert_idle(engine)


def test_slot_of_a_sequence_that_ends_takes_no_late_mask(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM, max_num_seqs=2)
    first, second = Slow(), Slow(is_held=False)
    add(engine, "first", first)
    engine.core.add(EngineRequest("free", PROMPT, FREE, len(PROMPT)))
    told(engine, "free", 5)
    engine.core.scheduler.abort("first")
    add(engine, "second", second, "another")
    assert told(engine, "second", 5)["second"] == [TOKEN] * 5
    first.may_go_on.set()
    drain(engine)
    assert_idle(engine)
