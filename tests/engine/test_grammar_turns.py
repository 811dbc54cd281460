"""Grammars of several tenants, which an engine compiles in turns beside its steps."""

import asyncio
from contextlib import suppress
from typing import Any

import psutil
import pytest

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadedModel
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.grammar.compiler import GrammarCompiler
from baton.engine.executor.grammar.judge import GrammarLimits
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.engines import load, load_parts
from tests.support.engine.streams import running
from tests.support.waiting import until

ROOM: dict[str, Any] = {"num_blocks": 64, "block_size": 16}
SLOW = "({}|[a-z]?{{10800}})"


class PatientCore(EngineCore):
    """Its trials may take a minute."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        super().__init__(config, loaded)
        info, limits = loaded.info, GrammarLimits(time_s=60.0)
        self._grammars = GrammarCompiler(
            loaded.path, info.vocab_size, info.eos_token_ids, limits=limits
        )

    def trials(self) -> list[psutil.Process]:
        """Returns the processes that try a grammar each."""
        assert self._grammars is not None
        return psutil.Process(self._grammars.trial_pid).children()


def request(tenant: str, pattern: str, salt: bytes = b"") -> EngineRequest:
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, pattern))
    return EngineRequest("r", (5, 6, 7), params, 3, tenant=tenant, salt=salt)


def end(trials: list[psutil.Process]) -> None:
    for trial in trials:
        with suppress(psutil.NoSuchProcess):
            trial.kill()


async def test_grammar_turns_pass_one_tenants_slow_grammars(checkpoints):
    core = PatientCore(*load_parts(checkpoints["tiny"], **ROOM))
    async with running(LLM(core)) as serving:
        assert await serving.compile_grammar(request("b", "[ab]{2}")) is not None
        slow = [
            asyncio.create_task(serving.compile_grammar(request("a", SLOW.format(n))))
            for n in range(6)
        ]
        await until(lambda: len(core.trials()) == 2)
        for trial in core.trials():
            trial.suspend()
        assert await serving.compile_grammar(request("b", "[ab]{2}")) is not None
        assert await serving.compile_grammar(request("b", "[ef]{5}")) is not None
        with pytest.raises(InvalidArgumentError, match="unclosed group"):
            await serving.compile_grammar(request("b", "(a"))
        assert not any(task.done() for task in slow)
        await until(lambda: end(core.trials()) or all(task.done() for task in slow))
        for task in slow:
            with pytest.raises(InvalidArgumentError, match="no memory was left"):
                await task


async def test_grammar_of_another_salt_is_compiled_again(checkpoints):
    engine = load(checkpoints["tiny"], **ROOM)
    async with running(engine) as serving:
        await serving.compile_grammar(request("a", "[ab]{3}", b"a"))
    assert engine.core.has_grammar(request("a", "[ab]{3}", b"a"))
    assert not engine.core.has_grammar(request("b", "[ab]{3}", b"b"))
